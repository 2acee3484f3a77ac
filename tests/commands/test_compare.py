"""The compare command."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from websockets.sync.server import ServerConnection, serve

from embodied import compare, export
from embodied.core.user_files import sha256
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.serving.client import PolicyConnection
from embodied.deployment.serving.protocol import decode, encode
from embodied.runtime import checkpoint
from embodied.session.config import compose_run
from embodied.session.deployed.planned import ServerPolicy, read_server_mapping
from embodied.session.factories import make_spec
from tests.commands.helpers import SMALL, Outcome, run, run_eval, run_train
from tests.deployment.servers import serving


def run_compare(tmp_path: Path, *words: str) -> Outcome:
    return run(compare.main, [*words, f"out={tmp_path / 'result.json'}", "device=cpu", "num_threads=1"])


def test_a_run_is_not_worse_than_itself(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir, outcome = trained
    last = run_dir / "checkpoints" / f"step_{outcome.result['env_steps']}"
    compared = run_compare(tmp_path, f"policies=[{run_dir},{last}]")
    assert compared.code == 0, compared.stderr
    result = compared.result
    assert (result["decision"], result["difference"], result["better"]) == ("not worse", 0.0, None)
    assert result["policies"] == [str(run_dir), str(last)]
    assert [entry["checkpoint"] for entry in result["checkpoints"]] == [last.name] * 2
    assert result == json.loads((tmp_path / "result.json").read_text())
    evaluated = run_eval(f"run={run_dir}", f"episodes={result['episodes']}", "num_threads=1").result
    assert result["success_at_end"] == [evaluated["success_at_end"]] * 2


def test_a_policy_that_is_worse_fails_the_gate(tmp_path: Path) -> None:
    """One policy does not move, which is enough for a large tolerance; the other one moves into a corner."""
    paths = [tmp_path / "still", tmp_path / "moving"]
    assert run_train(*SMALL, "total_steps=64", "eval_episodes=0", "task.success_m=0.2", f"out={paths[0]}").code == 0
    shutil.copytree(paths[0], paths[1], symlinks=True)
    for path, action in zip(paths, (0.0, 1.0), strict=True):
        found = checkpoint.load_latest(path)
        assert found is not None
        found.state["policy"]["actor.2.weight"].zero_()
        found.state["policy"]["actor.2.bias"].fill_(action)
        checkpoint.save(path, found.env_steps, found.state)
    words = "min_difference=0.1", "limit=80"
    compared = run_compare(tmp_path, f"policies=[{paths[0]},{paths[1]}]", *words)
    assert (compared.code, compared.result["decision"], compared.result["better"]) == (1, "worse", str(paths[0]))
    shown = [line for line in compared.stderr.splitlines() if "episodes: " in line]
    assert all(line.index(f"baseline {paths[0]}") < line.index(f"candidate {paths[1]}") for line in shown)
    assert compared.stderr.endswith(f"\nthe gate does not pass: {paths[1]} is worse\n")
    (tmp_path / "result.json").unlink()
    reverse = run_compare(tmp_path, f"policies=[{paths[1]},{paths[0]}]", *words)
    assert (reverse.code, reverse.result["decision"]) == (0, "not worse")
    assert reverse.result["episodes"] <= compared.result["episodes"] < 80


def test_an_undecided_comparison_ends_at_its_limit(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    compared = run_compare(tmp_path, f"policies=[{trained[0]},{trained[0]},{trained[0]}]", "limit=6", "seed=3")
    assert compared.code == 3, compared.stderr
    assert (compared.result["decision"], len(compared.result["comparisons"])) == ("undecided", 2)
    assert [row["episodes"] for row in compared.result["comparisons"]] == [6, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policies=[{run}]"], "policies: got"),
        (["policies=[{run},nowhere]"], "policies: 'nowhere' is no policy"),
        (["policies=[{run},{run}/checkpoints/step_7]"], "unknown checkpoint 'step_7'"),
        (["policies=[{run},{run}]", "min_difference=5"], "min_difference: got 5, allowed: at least 0 and below 1"),
        (["policies=[{run},{run}]", "sim=mojoco"], "mojoco"),
    ],
)
def test_what_cannot_be_compared_is_named(
    trained: tuple[Path, Outcome], tmp_path: Path, words: list[str], message: str
) -> None:
    refused = run_compare(tmp_path, *(word.format(run=trained[0]) for word in words))
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=push", "total_steps=64"], "is of task reach, {other} of push"),
        (["task=reach", "total_steps=64", "task.control.delta_m=0.03"], "they differ in action: "),
    ],
)
def test_policies_of_other_tasks_or_spaces_are_named(
    trained: tuple[Path, Outcome], tmp_path: Path, words: list[str], message: str
) -> None:
    other = tmp_path / "other"
    assert run_train(*SMALL, "eval_episodes=0", f"out={other}", *words).code == 0
    refused = run_compare(tmp_path, f"policies=[{trained[0]},{other}]")
    assert refused.code == 2
    assert message.format(other=other) in refused.stderr


@pytest.fixture(scope="module")
def bundle(trained: tuple[Path, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "reach"
    assert run(export.main, [f"run={trained[0]}", f"out={path}", "episodes=2", "device=cpu"]).code == 0
    return path


def test_a_bundle_and_a_server_play_as_their_run_does(
    trained: tuple[Path, Outcome], bundle: Path, tmp_path: Path
) -> None:
    with serving(PolicyRunner(bundle)) as (server, port):
        compared = run_compare(tmp_path, f"policies=[{bundle},{trained[0]},ws://127.0.0.1:{port}]", "limit=4")
        assert server.result()["requests"] == 4 * 40
    assert compared.code == 3, compared.stderr
    assert [row["difference"] for row in compared.result["comparisons"]] == [0.0, 0.0]
    of_bundle, of_run, of_server = compared.result["checkpoints"]
    assert of_bundle["policy_sha256"] == of_server["policy_sha256"] == sha256(bundle / "policy.onnx")
    assert of_bundle["checkpoint"] == of_run["checkpoint"]


def test_more_episodes_than_a_fixed_number_are_explained() -> None:
    row = {"policies": ["x", "y"], "success_at_end": [0.5, 0.6], "difference": 0.1, "difference_ci95": [0.0, 0.2]}
    row |= {"episodes": 80, "min_difference": 0.05, "decision": "not worse", "better": "y"}
    lines = compare.sentence(row | {"fixed_episodes": 60, "saved_episodes": -20}).splitlines()
    assert lines[0].startswith("baseline x 50.0%, candidate y 60.0% of the same 80 episodes")
    assert lines[1].endswith("; y is better")
    assert lines[2].endswith(
        "this took 20 more: choosing a fixed number needs these rates beforehand, this test does not"
    )


@contextmanager
def foreign_server(reply: Any, requests: list[Any]) -> Iterator[str]:
    """Somebody's policy server: openpi's protocol, other names."""

    def handle(connection: ServerConnection) -> None:
        connection.send(encode({"model": "mine"}))
        for message in connection:
            requests.append(decode(message, 2**20))
            connection.send(encode(reply))

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def foreign_mapping(tmp_path: Path, **changes: Any) -> str:
    content = {
        "state": {"name": "observation/state", "entries": ["tcp_pos[2]", "joint_pos[0]"], "scale": [1000, 1]},
        "action": {"name": "actions", "entries": ["1", "1", "0", "2"], "scale": [0.5]}, "execute": 2,
    }  # fmt: skip
    path = tmp_path / "mapping.json"
    path.write_text(json.dumps(content | changes))
    return f"mapping={path}"


def test_anybodys_policy_plays_behind_its_server(tmp_path: Path) -> None:
    requests: list[Any] = []
    with foreign_server({"actions": np.zeros((8, 3), np.float32)}, requests) as url:
        seen = {"images": {"observation/image": "front"}, "image_size": 16}
        words = f"policies=[{url},{url}]", "task=reach", "limit=2", foreign_mapping(tmp_path, **seen)
        compared = run_compare(tmp_path, *words)
    assert compared.code == 3, compared.stderr
    assert compared.result["task"] == "reach"
    assert len(requests) == 2 * 2 * 20  # policies, episodes, decisions of two actions
    assert set(requests[0]) == {"observation/state", "observation/image", "prompt"}
    assert (requests[0]["observation/image"].shape, requests[0]["observation/image"].dtype) == ((16, 16, 3), np.uint8)
    assert requests[0]["prompt"] == "move the gripper to the green sphere"
    height_mm, joint_rad = requests[0]["observation/state"]
    assert 100 < height_mm < 1000
    assert abs(joint_rad) < 3


def test_a_servers_chunk_goes_on_after_what_is_executed_of_it(tmp_path: Path) -> None:
    """A latency of two control steps executes rows 2 and 3 of a chunk of which two are executed."""
    mapping = read_server_mapping(Path(foreign_mapping(tmp_path, state=None).partition("=")[2]))
    sent = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    with foreign_server({"actions": sent}, []) as url, PolicyConnection(url) as connection:
        policy = ServerPolicy(connection, mapping, make_spec(compose_run({"task": "reach"})))
        planned = policy.plan({"state": torch.zeros(2, policy.spec.state_dim)})
    assert policy.execute == 2
    np.testing.assert_allclose(planned.numpy(), np.tile(0.5 * sent[:, [1, 1, 0, 2]], (2, 1, 1)))


@pytest.mark.parametrize(
    ("reply", "changes", "message"),
    [
        (
            {"action": [0.0]},
            {},
            "replied with no array 'actions', needed finite numbers [H, D] with at least 2 actions",
        ),
        ({"actions": np.full((8, 3), np.nan, np.float32)}, {}, "needed finite numbers"),
        ({"actions": np.zeros((1, 3), np.float32)}, {}, "replied with actions of float32 [1, 3]"),
        ({"actions": np.zeros((8, 2), np.float32)}, {}, "unknown entry of actions in action.entries '2'"),
        ({"actions": np.zeros((8, 3), np.float32)}, {"execute": 0}, "execute: got 0, allowed: at least 1"),
        ({"actions": np.zeros((8, 3), np.float32)}, {"state": {"name": "s", "entry": []}}, "mean 'state.entries'?"),
    ],
)
def test_a_server_that_answers_nonsense_is_named(
    tmp_path: Path, reply: Any, changes: dict[str, Any], message: str
) -> None:
    with foreign_server(reply, []) as url:
        words = f"policies=[{url},{url}]", "task=reach", "limit=2", foreign_mapping(tmp_path, **changes)
        refused = run_compare(tmp_path, *words)
    assert (refused.code, (tmp_path / "result.json").exists()) == (2, False), refused.stderr
    assert message in refused.stderr


def test_a_server_that_does_not_answer_is_named(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    nobody = run_compare(tmp_path, f"policies=[{trained[0]},ws://127.0.0.1:9]")
    assert nobody.code == 2
    assert "no policy server at ws://127.0.0.1:9" in nobody.stderr
    other = run_compare(tmp_path, f"policies=[ws://127.0.0.1:9,{trained[0]}]", foreign_mapping(tmp_path))
    assert "does not know its task: give task=" in other.stderr
    with foreign_server({}, []) as url:
        unmapped = run_compare(tmp_path, f"policies=[{trained[0]},{url}]")
    assert "is no policy server of this project" in unmapped.stderr

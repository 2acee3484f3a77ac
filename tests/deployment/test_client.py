"""The client of a policy server: what it plans is the runner's, and it believes a server little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.serving.client import RemotePlanner
from embodied.deployment.serving.protocol import encode
from tests.deployment.builders import SEES_AND_READS, make_bundle
from tests.deployment.exports import flow_bundle
from tests.deployment.servers import Gate, rows, serving


def row(index: int = 0) -> dict[str, np.ndarray]:
    return {name: value[index : index + 1] for name, value in rows().items()}


def url(port: int) -> str:
    return f"ws://127.0.0.1:{port}"


def test_it_plans_what_the_runner_plans(runner: PolicyRunner) -> None:
    with serving(runner) as (_, port), RemotePlanner(url(port), bundle=runner.bundle) as planner:
        assert planner.bundle == runner.bundle
        assert planner.bundle.horizon == 4
        for i in range(3):
            np.testing.assert_allclose(planner.plan(row(i)), runner.plan(row(i)), atol=1e-6)
        with pytest.raises(UserError, match="got 2 rows, allowed: 1"):
            planner.plan({name: value[:2] for name, value in rows().items()})
        with pytest.raises(UserError, match="lacks noise"):
            planner.plan({"state": row()["state"]})


def test_all_inputs_travel(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, **SEES_AND_READS)
    runner, draw = PolicyRunner(tmp_path), np.random.default_rng(0)
    with serving(runner) as (_, port), RemotePlanner(url(port)) as planner:
        assert planner.bundle == bundle
        for index in range(2):
            inputs = {
                "state": row()["state"], "noise": draw.standard_normal((1, *bundle.noise_shape), np.float32),
                "prefix": draw.standard_normal((1, 2, bundle.action_dim), np.float32),
                "delay": np.array([index]), "instruction": np.array([index]),
            }  # fmt: skip
            for camera in bundle.cameras:
                inputs[f"images.{camera.name}"] = draw.integers(0, 255, (1, camera.height, camera.width, 3), np.uint8)
            np.testing.assert_allclose(planner.plan(inputs), runner.plan(inputs), atol=1e-6)


def test_a_lost_connection_is_made_again_once(runner: PolicyRunner) -> None:
    with serving(runner) as (_, port):
        planner = RemotePlanner(url(port), bundle=runner.bundle)
        expected = planner.plan(row())
    with serving(runner, port=port) as (server, _):
        np.testing.assert_array_equal(planner.plan(row()), expected)
        assert server.clients == 1
    with pytest.raises(ConnectionError, match=f"no policy server at {url(port)}"):
        planner.plan(row())
    planner.close()


def test_a_late_reply_is_an_error_and_never_taken_for_the_next_one(runner: PolicyRunner) -> None:
    gate = Gate()
    with serving(gate) as (_, port), RemotePlanner(url(port), timeout_s=30, bundle=runner.bundle) as planner:
        planner.timeout_s = 0.3
        with pytest.raises(ConnectionError, match=r"did not reply within 0.3 s"):
            planner.plan(row(0))
        gate.open.set()
        planner.timeout_s = 30.0
        np.testing.assert_allclose(planner.plan(row(1)), runner.plan(row(1)), atol=1e-6)


def test_keys(runner: PolicyRunner, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    with serving(runner, api_key_file=str(tmp_path / "key")) as (_, port):
        for key in (None, "wrong"):
            with pytest.raises(UserError, match="the API key is missing or wrong"):
                RemotePlanner(url(port), api_key=key)
        with RemotePlanner(url(port), api_key="secret") as planner:
            assert planner.plan(row()).shape == (1, 4, 4)


def test_a_server_that_is_full_or_has_no_policy(runner: PolicyRunner) -> None:
    with serving(runner, max_clients=1) as (_, port), RemotePlanner(url(port)):
        with pytest.raises(ConnectionError, match="refused: 503 All 1 places"):
            RemotePlanner(url(port))
        with pytest.raises(ConnectionError, match="refused: 404"):
            RemotePlanner(f"{url(port)}/other")


def test_another_policy_than_that_of_the_local_bundle_is_refused(runner: PolicyRunner, tmp_path: Path) -> None:
    other = make_bundle(tmp_path)
    with serving(runner) as (_, port), pytest.raises(UserError, match="serves another policy"):
        RemotePlanner(url(port), bundle=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "server=127.0.0.1:8000: allowed: ws://host:port"),
        ({"url": "http://127.0.0.1"}, "allowed: ws://host:port"),
        ({"url": "ws://"}, "server=ws://"),
        ({"url": "ws://127.0.0.1:1", "timeout_s": 0.0}, "timeout_s: got 0.0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RemotePlanner(**options)


# -- servers that lie --------------------------------------------------------------------------------------------------
@contextmanager
def saying(greeting: str | bytes, reply: Callable[[], str | bytes]) -> Iterator[str]:
    """Address of a websocket server that greets and then replies to everything alike."""

    def converse(connection: ServerConnection) -> None:
        connection.send(greeting)
        for _ in connection:
            connection.send(reply())

    with serve(converse, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield url(server.socket.getsockname()[1])
        server.shutdown()
        thread.join()


def described(bundle: Bundle) -> dict[str, Any]:
    return asdict(bundle)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        ("go away", "is no policy server of this project: go away"),
        (b"\xc1", "is no policy server of this project: message: FormatError"),
        (encode({"horizon": 4}), "is no policy server of this project: metadata: lacks format"),
        (b"\xdf\xff\xff\xff\xff" + bytes(200_000), "exceeds max_map_len"),
        (bytes(9 * 2**20), "is no policy server: "),
    ],
)
def test_a_server_of_something_else_is_refused(greeting: str | bytes, message: str) -> None:
    with saying(greeting, lambda: b"") as address, pytest.raises(ConnectionError, match=message):
        RemotePlanner(address, timeout_s=30)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"actions": np.zeros((4, 5), np.float32)}, r"planned float32 \[1, 4, 5\], needed float32 \[1, 4, 4\]"),
        ({"actions": np.zeros((4, 4))}, "planned float64"),
        ({"actions": [[0.0] * 4] * 4}, "planned nothing, needed float32"),
        ({"action": np.zeros((4, 4), np.float32)}, "planned nothing"),
        ([1], "planned nothing"),
        ({"actions": np.full((4, 4), 0.07, np.float32)}, "outside of its range"),
        ({"actions": np.full((4, 4), np.nan, np.float32)}, "NaN or infinite"),
        (b"\xc1", "FormatError"),
        (bytes(100_000), "got 100000 bytes, allowed: at most"),
        (bytes(9 * 2**20), "closed the connection"),
    ],
)
def test_a_reply_that_the_policy_cannot_plan_is_refused(reply: Any, message: str) -> None:
    """Ranges are those of the bundle here, also if the server describes wider ones."""
    bundle = read_bundle(flow_bundle())
    wide = replace(bundle, action=(*(replace(term, scale=10.0) for term in bundle.action[:-1]), bundle.action[-1]))
    data = reply if isinstance(reply, bytes) else encode(reply)
    with (
        saying(encode(described(wide)), lambda: data) as address,
        RemotePlanner(address, timeout_s=30, bundle=bundle) as planner,
        pytest.raises(ConnectionError, match=message),
    ):
        planner.plan(row())


COLOURED = "\x1b[31mred\x1b]0;title\x07 \u202eabc\nline"


def test_a_text_of_the_server_commands_no_terminal() -> None:
    bundle = read_bundle(flow_bundle())
    with saying(COLOURED, lambda: b"") as address, pytest.raises(ConnectionError) as refused:
        RemotePlanner(address)
    with (
        saying(encode(described(bundle)), lambda: COLOURED) as address,
        RemotePlanner(address) as planner,
        pytest.raises(UserError) as replied,
    ):
        planner.plan(row())
    renamed = described(bundle) | {"robot": COLOURED}
    with saying(encode(renamed), lambda: b"") as address, pytest.raises(ConnectionError) as named:
        RemotePlanner(address, bundle=bundle)
    unknown = described(bundle) | {COLOURED: 1}
    with saying(encode(unknown), lambda: b"") as address, pytest.raises(ConnectionError) as keyed:
        RemotePlanner(address, bundle=bundle)
    for caught in (refused, replied, named, keyed):
        assert str(caught.value).isprintable()
        assert "red" in str(caught.value)


def test_a_server_that_describes_an_impossible_arm_is_refused() -> None:
    impossible = described(replace(read_bundle(flow_bundle()), horizon=10**9))
    with (
        saying(encode(impossible), lambda: b"") as address,
        pytest.raises(ConnectionError, match="horizon: got 1e\\+09"),
    ):
        RemotePlanner(address)


def test_an_error_of_the_server_is_repeated_in_part() -> None:
    bundle = read_bundle(flow_bundle())
    with saying(encode(described(bundle)), lambda: "no " * 10_000) as address, RemotePlanner(address) as planner:
        with pytest.raises(UserError) as caught:
            planner.plan(row())
        assert str(caught.value).startswith(f"{address}: no no")
        assert len(str(caught.value)) < 2100

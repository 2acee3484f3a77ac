"""Commands as processes: exit codes, streams, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from embodied.core.clock import SLACK_S, TICK_S
from embodied.report.metrics import read_metrics
from embodied.runtime import threads
from embodied.session import command
from tests.commands.helpers import SMALL, Outcome, checkpoint_of, run_train
from tests.commands.terminal import start_on_terminal

ROOT = Path(__file__).resolve().parents[2]


def start(module: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_last_line_of_stdout_is_json_and_bad_input_exits_with_2(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "embodied.train", *SMALL, "total_steps=64"]
    good = subprocess.run([*words, f"out={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["run"] == str(tmp_path / "run")
    assert "torch._dynamo" not in good.stderr, "it waits for a compiler that it does not use"
    bad = start("embodied.train", "task=rech")
    stdout, stderr = bad.communicate(timeout=120)
    assert (bad.returncode, stdout) == (2, "")
    assert stderr.startswith("error: unknown task 'rech'")


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--num_envs=2", 2), ("algo.gamma={", 2)])
def test_help_and_a_word_that_cannot_be_read_wait_for_no_large_library(word: str, code: int) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "embodied.train", word]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("resume=<run dir>" in done.stdout) == (word == "--help")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "embodied.core.config" in imported
    assert not imported & {"torch", "mujoco", "numpy", "gymnasium", "pyarrow", "transformers"}


COMPOSED = """
import importlib, sys
from pathlib import Path

for words in sys.argv[2:]:
    command, *words = words.split()
    assert importlib.import_module(f"embodied.{command}").main(words) == 2, words
from embodied.session.config import compose_run, read_run, to_yaml

run_dir = Path(sys.argv[1])
for name, algo, runtime in (("gaussian", "ppo", "sync"), ("vla_tiny", "sft", "ray"), ("dsrl", "grounding", "local")):
    config = compose_run({"task": "tabletop", "policy": name, "algo": algo, "runtime": runtime})
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert read_run(run_dir) == config
found = {"torch", "mujoco", "ray", "transformers", "envpool", "mani_skill"} & set(sys.modules)
assert not found, found
"""
MISTYPED = (
    "train tsk=reach", "train task=reech", "train policy=flw", "train algo.gama=0.9", "train policy.hidden=x",
    "train task=gym/CartPole-v1 algo.gama=0.9",
    "train task.robot=pnda", "train task.goal=x", "train runtime.decision=3", "train sim.dump=x", "train sampler=x",
    "train resume=nowhere", "eval rn=x", "eval run=nowhere", "export run=nowhere", "export run=nowhere out=x",
    "tasks chek=reach", "tasks check=reech", "convert source=x", "bench trian", "bench sim shrt=true",
)  # fmt: skip


def test_a_mistyped_word_and_a_configuration_wait_for_no_torch_and_no_simulator(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", COMPOSED, str(tmp_path), *MISTYPED]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    words = [*SMALL, "runtime=local", "max_staleness=1", "total_steps=1_000_000_000", f"out={run_dir}"]
    process = start("embodied.train", *words)
    deadline = time.monotonic() + 120
    while len(read_metrics(run_dir / "metrics.jsonl")) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED, stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    result = json.loads(stdout.splitlines()[-1])
    assert result["eval"] is None
    assert f"resume={run_dir}" in stderr
    assert "Traceback" not in stderr
    assert checkpoint_of(run_dir, result["env_steps"]).is_dir()
    resumed = run_train(f"resume={run_dir}", f"total_steps={result['env_steps'] + 64}", "eval_episodes=0")
    assert resumed.code == 0, resumed.stderr
    assert resumed.result["env_steps"] > result["env_steps"]
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))


def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    """The system and the shell both send SIGHUP, and nothing can be printed any more."""
    run_dir = tmp_path / "run"
    words = [*SMALL, "runtime=local", "max_staleness=1", "total_steps=1_000_000_000", f"out={run_dir}"]
    process, person = start_on_terminal("embodied.train", words, ROOT)
    while len(read_metrics(run_dir / "metrics.jsonl")) < 3:
        os.read(person, 4096)  # the progress line; an error if the command has ended
    os.close(person)
    os.killpg(process.pid, signal.SIGHUP)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED
    result = json.loads(stdout.splitlines()[-1])
    assert checkpoint_of(run_dir, result["env_steps"]).is_dir()


def test_a_stop_is_no_time_of_training(tmp_path: Path) -> None:
    """Rows of metrics before and after a stop: their clock and their rates leave it out."""
    stopped_s, run_dir = 4.0, tmp_path / "run"
    words = [*SMALL, "runtime=local", "max_staleness=1", "total_steps=1_000_000_000", f"out={run_dir}"]
    process = start("embodied.train", *words)

    def rows(count: int) -> list[dict[str, float]]:
        while len(found := read_metrics(run_dir / "metrics.jsonl")) < count:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        return found

    began_s = time.monotonic()
    first = len(rows(len(rows(1)) + 1))  # written since then
    os.killpg(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(stopped_s)
    last = len(rows(1)) + 2
    os.killpg(process.pid, signal.SIGCONT)
    found, passed_s = rows(last), time.monotonic() - began_s
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED
    most_s = passed_s - stopped_s + SLACK_S + TICK_S * threads.available_cores()
    assert found[last - 1]["wall_s"] - found[first - 1]["wall_s"] <= most_s
    steps = [after["env_steps"] - before["env_steps"] for before, after in pairwise(found[first - 1 : last])]
    rates = [row["perf/env_steps_per_s"] for row in found[first:last]]
    assert sum(made / rate for made, rate in zip(steps, rates, strict=True)) <= most_s


@pytest.mark.slow(reason="imports torch, and waits 8 s for an environment that hangs")
def test_a_second_signal_ends_a_run_whose_environment_hangs(tmp_path: Path) -> None:
    words = ["policy=gaussian", "num_envs=2", "policy.horizon=1", "policy.execute=1", f"out={tmp_path / 'run'}"]
    process = start("embodied.train", "task=gym/tests.envs.toy_gym:Hanging-v0", *words)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert "hanging\n" in lines
    os.killpg(process.pid, signal.SIGINT)
    assert any(line.startswith("stopping: ") for line in lines)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert "interrupted; a component did not shut down in time\n" in stderr
    assert (process.returncode, stdout) == (command.INTERRUPTED, "")


def test_a_crash_exits_with_1_and_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def crash(argv: object) -> dict[str, object]:
        print("noise")
        raise RuntimeError("the cause")

    assert command.run_command(crash, None, []) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "noise" in captured.err
    assert "RuntimeError: the cause" in captured.err


@pytest.mark.parametrize(
    ("words", "unread"),
    [(["status", "--help"], "stdout"), (["status", "rn=x"], "both"), (["tasks"], "stdout"), (["tasks"], "both")],
)
def test_output_that_nobody_reads_ends_the_command_quietly(words: list[str], unread: str) -> None:
    """As of ``| head``: the reader of stdout goes, or that of both streams."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", f"embodied.{words[0]}", *words[1:]], cwd=ROOT, stdout=write,
        stderr=write if unread == "both" else subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == command.UNREAD, done.stderr
    assert "Traceback" not in (done.stderr or "")


@pytest.mark.parametrize("closed", ["2>&-", "2</dev/null", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error_and_is_no_file(closed: str, tmp_path: Path) -> None:
    """What is written to it goes nowhere, also by a child process, and not into the file that was opened first."""
    code = (
        "import os, subprocess, sys\n"
        "from embodied.session.command import run_command\n"
        "def command(argv):\n"
        "    with open(argv[0], 'w', encoding='utf-8') as file:\n"
        "        os.write(2, b'noise')\n"
        "        print('noise', file=sys.stderr)\n"
        "        subprocess.run('echo noise >&2', shell=True, check=True)\n"
        "    return {'file': argv[0]}\n"
        "sys.exit(run_command(command, None, sys.argv[1:]))\n"
    )
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == ("" if ">&- " in closed else json.dumps({"file": str(tmp_path / "file")}) + "\n")
    assert (tmp_path / "file").read_text() == ""


def test_a_result_is_printed_where_stderr_is_closed(trained: tuple[Path, Outcome]) -> None:
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "embodied.status", f"run={trained[0]}"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout)["state"] == "finished"


def test_a_broken_pipe_of_something_else_is_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    def crash(argv: object) -> dict[str, object]:
        raise BrokenPipeError("the cause")

    assert command.run_command(crash, None, []) == 1
    assert "BrokenPipeError: the cause" in capsys.readouterr().err


def test_another_package_of_this_name_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.check_installation() is None
    monkeypatch.setattr("embodied.__distribution__", "embodied")
    problem = command.check_installation()
    assert problem is not None
    assert "another project" in problem
    outcome = run_train("task=reach")
    assert outcome.code == 2
    assert "pip uninstall" in outcome.stderr


def test_a_merged_install_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's record of the other distribution lies where our package is."""
    site = Path(command.__file__).resolve().parents[2]
    record = tmp_path / "embodied-2.0.3.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: embodied\nVersion: 2.0.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command.check_installation() is None  # installed elsewhere: harmless
    (tmp_path / "embodied").symlink_to(site / "embodied")
    problem = command.check_installation()
    assert problem is not None
    assert "merged" in problem

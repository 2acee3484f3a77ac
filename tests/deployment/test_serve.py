"""The serve command: its options, its signals, its result."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embodied import serve
from embodied.core.errors import UserError
from embodied.deployment.serving.protocol import VARIABLE, read_api_key
from tests.commands.helpers import run
from tests.deployment.exports import flow_bundle
from tests.deployment.servers import Client, http_get, rows
from tests.deployment.test_light import BLOCK

LIGHT = BLOCK.replace('"packaging"', '"packaging", "websockets", "msgpack"')


@contextmanager
def command(
    root: Path, *words: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command in a process that has no torch, and the port that it listens on."""
    code = f"{LIGHT}\nfrom embodied import serve\nsys.exit(serve.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"bundle={flow_bundle()}", "port=0", *words],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {}),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.match(r"listening on ws://127\.0\.0\.1:(\d+)$", line)
            if found:
                break
        else:
            pytest.fail("it ended without listening")
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_reports(root: Path, number: signal.Signals) -> None:
    with command(root) as (process, port):
        assert http_get(port, "/healthz") == (200, "OK\n")
        with Client(port) as client:
            assert client.ask({"state": rows()["state"][0]})["actions"].shape == (4, 4)
            assert client.ask({"stat": 1}).startswith("unknown key")
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    result = json.loads(stdout)
    duration_s = result.pop("duration_s")
    assert duration_s > 0
    assert result == {
        "bundle": str(flow_bundle()), "requests": 1, "errors": 1, "clients": 1, "refused": 0, "batches": 1,
        "largest_batch": 1, "port": port,
    }  # fmt: skip


def test_garbage_and_scans_leave_no_traceback(root: Path) -> None:
    with command(root) as (process, port):
        for data in (
            b"",
            b"\x00" * 100,
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET " + b"a" * 100_000,
            b"POST / HTTP/1.1\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(data)
        assert http_get(port, "/")[0] == 426
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    assert process.returncode == 130


def test_the_key_of_the_environment_is_asked_for(root: Path) -> None:
    with command(root, environment={VARIABLE: "secret"}) as (_, port):
        assert http_get(port, "/")[0] == 401
        with Client(port, additional_headers={"Authorization": "Api-Key secret"}) as client:
            assert client.ask({"state": rows()["state"][0]})["actions"].shape == (4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bundle is missing: give bundle=..."),
        (["bundle=nowhere"], "bundle=nowhere is not a directory"),
        (["bundle=x", "host=0.0.0.0"], "host=0.0.0.0 lets other machines command a robot without a key"),
        (["bundle=x", "api_key=secret"], "unknown key 'api_key'. Did you mean 'api_key_file'?"),
        (["bundle=x", "api_key_file=nowhere"], "api_key_file=nowhere cannot be read: No such file"),
        (["bundle=x", "port=many"], "port: got 'many', allowed: an integer"),
        (["bundle=x", "port=70000"], "port: got 70000, allowed: 0 to 65535"),
        (["bundle=x", "num_threads=0"], "num_threads: got 0, allowed: at least 1"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    outcome = run(serve.main, words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"error: {message}" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_key_comes_from_a_file_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv(VARIABLE, "other")
    assert read_api_key(None) == "other"
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert read_api_key(str(file)) == "secret"


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", "schlüssel".encode(), b"\xff\xfe"])
def test_a_key_that_fits_into_no_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"api_key_file=.* (got an empty key|cannot be read: it is no text)"):
        read_api_key(str(file))

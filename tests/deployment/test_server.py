"""The policy server: replies are the runner's, clients do not harm each other, strangers are refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle as BundleType
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.options import ServeOptions
from embodied.deployment.serving import server as server_module
from embodied.deployment.serving.protocol import encode, max_request_bytes
from embodied.deployment.validation import from_json
from tests.deployment.builders import SEES_AND_READS, make_bundle
from tests.deployment.exports import flow_bundle
from tests.deployment.servers import Client, Gate, http_get, rows, serving


@pytest.fixture(scope="module")
def port(runner: PolicyRunner) -> Iterator[int]:
    """A server that tests share."""
    with serving(runner) as (_, port):
        yield port


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def request(row: int) -> dict[str, Any]:
    return {name: value[row] for name, value in rows().items()}


# -- replies -----------------------------------------------------------------------------------------------------------
def test_the_first_frame_describes_the_bundle(port: int, runner: PolicyRunner) -> None:
    with Client(port) as client:
        assert from_json(BundleType, client.metadata, "metadata") == runner.bundle


def test_a_reply_is_what_the_runner_plans(port: int, runner: PolicyRunner) -> None:
    with Client(port) as client:
        first, second = client.ask(request(0)), client.ask(request(1))
    expected = runner.plan({name: value[:2] for name, value in rows().items()})
    np.testing.assert_allclose([first["actions"], second["actions"]], expected, atol=1e-6)
    assert first["actions"].dtype == np.float32
    assert first["server_timing"].keys() == {"infer_ms", "batch"}
    assert 0 < second["server_timing"]["infer_ms"] < second["server_timing"]["prev_total_ms"] * 1e3


def test_names_of_openpi_and_other_types_of_numbers(port: int) -> None:
    state = rows()["state"][2]
    noise = np.zeros_like(rows()["noise"][2])
    with Client(port) as client:
        plain = client.ask({"state": state, "noise": noise})
        assert np.array_equal(client.ask({"observation/state": state.astype(np.float64)})["actions"], plain["actions"])
        assert np.array_equal(client.ask({"state": state.astype(">f4")})["actions"], plain["actions"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update({"observation/stat": 1}), "unknown key of a request 'observation/stat'. Did you mean "),
        (lambda r: r.update({"images.front": 1}), "Allowed: noise, observation/state, prompt, state"),
        (lambda r: r.pop("state"), "the observation lacks state"),
        (lambda r: r.update({"observation/state": r["state"]}), "has two keys for state"),
        (lambda r: r.update(state=r["state"][:39]), r"state: got float32 \[39\], needed numbers \[40\]"),
        (lambda r: r.update(state=r["state"][None]), r"state: got float32 \[1, 40\], needed numbers \[40\]"),
        (lambda r: r.update(state=r["state"].tolist()), r"state: got list, needed numbers \[40\]"),
        (lambda r: r.update(state=r["state"] > 0), r"state: got bool \[40\]"),
        (lambda r: r.update(state=np.full(40, np.nan)), "state: has NaN"),
        (lambda r: r.update(state=np.full(40, 1e300)), "state: has NaN or infinite"),
        (lambda r: r.update(state=np.full(40, 600.0)), "training saw .* check unit"),
        (lambda r: r.update(prompt="dance"), "unknown instruction 'dance'"),
        (lambda r: r.update(prompt=3), "prompt: got '3', allowed: a text"),
        (lambda r: r.update(prompt="a" * 1001), "at most 1000 letters"),
    ],
)
def test_a_bad_request_gets_an_error_and_the_next_one_a_chunk(port: int, change: Any, message: str) -> None:
    bad = request(0)
    change(bad)
    with Client(port) as client:
        reply = client.ask(bad)
        assert isinstance(reply, str)
        with pytest.raises(UserError, match=message):
            raise UserError(reply)
        assert client.ask(request(0))["actions"].shape == (4, 4)


@pytest.mark.parametrize("message", ["text", b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_a_malformed_message_gets_an_error_and_the_next_one_a_chunk(port: int, message: str | bytes) -> None:
    with Client(port) as client:
        client.socket.send(message)
        assert isinstance(client.socket.recv(), str)
        assert client.ask(request(0))["actions"].shape == (4, 4)


def test_a_policy_that_sees_and_reads(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, **SEES_AND_READS)
    runner, draw = PolicyRunner(tmp_path), np.random.default_rng(0)
    images = {c.name: draw.integers(0, 255, (c.height, c.width, 3), np.uint8) for c in bundle.cameras}
    prefix = np.full((2, bundle.action_dim), 0.01, np.float32)
    state = rows()["state"][0]
    inputs = {"state": state, "noise": np.zeros(bundle.noise_shape, np.float32), "prefix": prefix}
    inputs |= {"instruction": np.int64(1), "delay": np.int64(2)}
    inputs |= {f"images.{name}": image for name, image in images.items()}
    with serving(runner) as (_, port), Client(port) as client:
        openpi = {f"observation/images/{name}": image for name, image in images.items()}
        openpi |= {"observation/state": state, "prompt": "lift the blue cube", "prefix": prefix, "delay": 2}
        expected = runner.plan({name: np.asarray(value)[None] for name, value in inputs.items()})
        np.testing.assert_allclose(client.ask(openpi)["actions"], expected[0], atol=1e-6)
        inputs |= {"prefix": np.zeros_like(prefix), "delay": np.int64(0)}
        expected = runner.plan({name: np.asarray(value)[None] for name, value in inputs.items()})
        plain = {k: v for k, v in openpi.items() if k not in ("prefix", "delay")}
        np.testing.assert_allclose(client.ask(plain)["actions"], expected[0], atol=1e-6)
        assert "a delay of 2 needs a prefix" in client.ask(plain | {"delay": 2})
        for change, message in (
            ({"prompt": "lift the blu cube"}, "Did you mean 'lift the blue cube'?"),
            ({"prompt": None}, "the policy needs one, such as 'lift the red cube'"),
            ({"delay": 3}, "delay: got [3], allowed: 0 to 2"),
            ({"observation/images/front": images["front"].astype(np.float32)}, "images.front: got float32 [6, 8, 3]"),
            ({"observation/images/front": images["wrist"]}, "got uint8 [4, 4, 3], needed uint8 [6, 8, 3]"),
            ({"observation/images/front": np.zeros((480, 640, 3), np.uint8)}, "got uint8 [480, 640, 3], needed"),
        ):
            assert message in client.ask(openpi | change)


def test_seeded_noise_is_drawn_by_the_server_and_differs_between_decisions(tmp_path: Path) -> None:
    make_bundle(tmp_path, noise="seeded")
    with serving(PolicyRunner(tmp_path)) as (_, port), Client(port) as client:
        state = {"state": rows()["state"][0]}
        assert not np.array_equal(client.ask(state)["actions"], client.ask(state)["actions"])


# -- batches -----------------------------------------------------------------------------------------------------------
def ask_together(gate: Gate, port: int, requests: list[dict[str, Any]]) -> list[Any]:
    """Replies to requests of as many clients; all but the first wait until it is being planned."""
    clients = [Client(port) for _ in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(clients[0].ask, requests[0])]
        assert gate.entered.wait(30)
        futures += [pool.submit(c.ask, r) for c, r in zip(clients[1:], requests[1:], strict=True)]
        waiting = threading.Event()
        while gate.waiting() < len(requests) - 1:
            assert not waiting.wait(0.01)
        gate.open.set()
        replies = [future.result(60) for future in futures]
    for client in clients:
        client.socket.close()
    return replies


@pytest.mark.parametrize(("max_batch", "sizes"), [(32, [1, 15]), (8, [1, 8, 7]), (1, [1] * 16)])
def test_what_waits_is_planned_together(gate: Gate, runner: PolicyRunner, max_batch: int, sizes: list[int]) -> None:
    with serving(gate, max_batch=max_batch) as (server, port):
        gate.waiting = server.batcher.queue.qsize
        replies = ask_together(gate, port, [request(i) for i in range(16)])
        assert gate.sizes == sizes
        assert server.result() == {
            "requests": 16, "errors": 0, "clients": 16, "refused": 0, "batches": len(sizes),
            "largest_batch": max(sizes),
        }  # fmt: skip
    expected = runner.plan({name: value[:16] for name, value in rows().items()})
    np.testing.assert_allclose([reply["actions"] for reply in replies], expected, atol=1e-6)
    assert sorted(reply["server_timing"]["batch"] for reply in replies) == sorted(n for n in sizes for _ in range(n))


def test_a_request_that_the_planner_refuses_does_not_spoil_its_batch(gate: Gate, runner: PolicyRunner) -> None:
    """Finite noise that overflows inside the network is found by the planner only."""
    requests = [request(i) for i in range(4)]
    requests[2]["noise"] = np.full_like(requests[2]["noise"], 3e38)
    with serving(gate) as (server, port):
        gate.waiting = server.batcher.queue.qsize
        replies = ask_together(gate, port, requests)
        assert server.errors == 1
    assert gate.sizes == [1, 3, 1, 1, 1]
    assert "NaN or infinite" in replies[2]
    for i in (0, 1, 3):
        expected = runner.plan({name: value[i : i + 1] for name, value in rows().items()})
        np.testing.assert_allclose(replies[i]["actions"], expected[0], atol=1e-6)


# -- clients that stall ------------------------------------------------------------------------------------------------
def test_clients_that_stall_do_not_block_others(runner: PolicyRunner) -> None:
    with serving(runner) as (_, port), socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n")  # a handshake that never ends
        raw = Client(port)
        raw.socket.socket.sendall(b"\x82\xfe\x01\x00")  # a frame that never ends
        with Client(port) as client:
            assert client.ask(request(0))["actions"].shape == (4, 4)
        raw.socket.socket.shutdown(socket.SHUT_RDWR)


def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SEND_S", 0.2)
    make_bundle(tmp_path, horizon=4000)  # replies of 64 kB fill every buffer soon
    state = {"state": rows()["state"][0]}
    with serving(PolicyRunner(tmp_path)) as (server, port), socket.create_connection(("127.0.0.1", port)) as lazy:
        lazy.sendall(HANDSHAKE)
        payload = encode(state)
        assert 126 <= len(payload) < 2**16
        assert cut_off(lazy, b"\x82\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload)
        with Client(port) as client:
            assert client.ask(state)["actions"].shape == (4000, 4)
        assert server.requests > 1


def test_a_client_that_sends_pings_and_reads_nothing_is_cut_off(runner: PolicyRunner) -> None:
    """Each ping is answered at once, whether or not somebody reads the answers."""
    with serving(runner) as (_, port), socket.create_connection(("127.0.0.1", port)) as lazy:
        lazy.sendall(HANDSHAKE)
        assert cut_off(lazy, 64 * (b"\x89\xfd" + bytes(4 + 125)))
        with Client(port) as client:
            assert client.ask(request(0))["actions"].shape == (4, 4)


def cut_off(connection: socket.socket, data: bytes) -> bool:
    """Send up to 64 MiB; return whether the other side cuts the connection meanwhile."""
    for _ in range(2**26 // len(data)):
        try:
            connection.sendall(data)
        except OSError:
            return True
    return False


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def test_an_idle_client_is_disconnected(runner: PolicyRunner) -> None:
    with serving(runner, idle_s=0.1) as (_, port), Client(port) as client:
        with pytest.raises(ConnectionClosed) as caught:
            client.socket.recv(timeout=30)
        assert caught.value.rcvd is not None
        assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1001, "no request for 0.1 s")


def test_a_message_that_is_too_large_closes_its_connection_alone(port: int) -> None:
    limit = max_request_bytes(read_bundle(flow_bundle()))
    with Client(port) as other, Client(port) as client:
        assert client.ask({"state": np.zeros(limit // 8 - 100)}).startswith("state: got float64")
        client.socket.send(bytes(limit + 1))
        with pytest.raises(ConnectionClosedError) as caught:
            client.socket.recv(timeout=30)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009
        assert other.ask(request(0))["actions"].shape == (4, 4)


def test_a_client_that_leaves_before_its_reply(gate: Gate) -> None:
    with serving(gate) as (server, port):
        gone = Client(port)
        gone.socket.send(b"\x80")
        gone.socket.close()
        with Client(port) as client:
            gate.open.set()
            assert client.ask(request(0))["actions"].shape == (4, 4)
        assert server.requests == 1


# -- strangers ---------------------------------------------------------------------------------------------------------
def refusal(port: int, path: str = "/", **options: Any) -> int:
    """Status of a refused handshake."""
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{port}{path}", proxy=None, legacy=True, **options)
    return caught.value.response.status_code


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text("secret")
    return str(tmp_path / "key")


def test_health_needs_no_key_and_says_nothing(runner: PolicyRunner, key_file: str) -> None:
    with serving(runner, api_key_file=key_file) as (server, port):
        assert http_get(port, "/healthz") == (200, "OK\n")
        assert http_get(port, "/")[0] == 401
        assert (server.clients, server.refused) == (0, 1)


def test_a_wrong_or_missing_key_is_refused(runner: PolicyRunner, key_file: str) -> None:
    with serving(runner, api_key_file=key_file) as (server, port):
        wrong = [
            None,
            "Api-Key",
            "Api-Key ",
            "Api-Key secre",
            "Api-Key secrett",
            "Bearer secret",
            "secret",
            "api-key secret",
        ]
        for text in wrong:
            assert refusal(port, additional_headers={"Authorization": text} if text else None) == 401
        twice = [("Authorization", "Api-Key secret"), ("Authorization", "Api-Key wrong")]
        assert refusal(port, additional_headers=twice) == 401
        with Client(port, additional_headers={"Authorization": "Api-Key secret"}) as client:
            assert client.ask(request(0))["actions"].shape == (4, 4)
        assert server.refused == len(wrong) + 1


def test_pages_of_browsers_and_other_paths_are_refused(port: int) -> None:
    assert refusal(port, origin="http://localhost") == 403
    assert refusal(port, "/other") == 404
    assert http_get(port, "/metrics")[0] == 404


def test_more_clients_than_places_are_refused_until_one_leaves(runner: PolicyRunner) -> None:
    with serving(runner, max_clients=2) as (_, port):
        with Client(port), Client(port):
            assert refusal(port) == 503
            assert http_get(port, "/healthz")[0] == 200
        while True:  # the server notices within moments that they left
            try:
                with Client(port) as client:
                    assert client.ask(request(0))["actions"].shape == (4, 4)
                break
            except InvalidStatus:
                continue


def test_connections_without_a_handshake_are_limited(runner: PolicyRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 4)
    with serving(runner, max_clients=1) as (_, port):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for connection in held[5:]:
            connection.settimeout(30)
            assert connection.recv(1) == b""
            connection.close()
        for connection in held:
            connection.close()


# -- options -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port: got 65536, allowed: 0 to 65535"),
        ({"max_batch": 0}, "max_batch: got 0, allowed: 1 to 4096"),
        ({"max_clients": 0}, "max_clients: got 0"),
        ({"idle_s": 0.0}, "idle_s: got 0, allowed: 0.001 to 86400"),
        ({"idle_s": float("nan")}, "idle_s: got nan"),
        ({"host": ""}, "host: got ''"),
        ({"host": "0.0.0.0"}, "host=0.0.0.0 lets other machines command a robot without a key"),
        ({"host": "::"}, "without a key"),
        ({"host": "robot.example"}, "without a key"),
        ({"host": "127.0.0.1.example"}, "without a key"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServeOptions(bundle="", **options)


def test_other_machines_with_a_key_or_on_purpose_are_allowed(key_file: str) -> None:
    assert ServeOptions(bundle="", host="0.0.0.0", api_key_file=key_file).api_key == "secret"
    assert ServeOptions(bundle="", host="0.0.0.0", insecure=True).insecure
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        assert ServeOptions(bundle="", host=host).host == host


def test_a_port_that_is_taken_is_refused(runner: PolicyRunner, port: int) -> None:
    async def listen() -> None:
        async with server_module.PolicyServer(runner, ServeOptions(bundle="", port=port)).listening():
            pass

    with pytest.raises(UserError, match=rf"cannot listen on host=127.0.0.1 port={port}: "):
        asyncio.run(listen())

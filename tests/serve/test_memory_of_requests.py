"""What requests under way take of a server's memory, wire by wire, measured at the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
from PIL import Image
from sinew_client import protocol
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from sinew.serve.decode.array import pack
from sinew.serve.decode.frames import MIN_BUDGET
from sinew.serve.scheduler import AHEAD, DECODERS
from sinew.serve.transport.ledger import HELD_REQUESTS
from sinew.serve.wires.vla_eval import pack as vla_eval_pack
from tests.serve.puppet import GOOD, WAIT_S, desk, frame, shake, until
from tests.serve.puppet import connect as plain

MIB = 1 << 20
LIMIT = 4 * MIB  # of one request here; 64 MiB by default
MANY = 24


# ----------------------------------------------------------------------------- the server, a process of its own


def _serve() -> None:
    from sinew.serve.transport.listen import Listen
    from sinew.serve.wires.lerobot.wire import LeRobotWire

    listen = Listen(max_message_bytes=LIMIT)
    with desk(("native", "groot", "web", "evo1", "vla-eval"), listen=listen) as at:
        lerobot = LeRobotWire(listen)
        lerobot.start(at.service)
        found = {name: getattr(at, name) for name in ("native", "groot", "web", "evo1", "vla-eval")}
        print(json.dumps(found | {"lerobot": lerobot.address}), flush=True)
        for line in sys.stdin:
            if line.strip() == "mark":
                at.puppet.release.clear()
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")
            elif line.strip() == "release":
                at.puppet.release.set()
            lines = Path("/proc/self/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            found = {name: int(status[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")}
            scheduler, stats = at.scheduler, at.scheduler.stats()
            full = scheduler._ahead >= AHEAD or not scheduler._received.order()
            found["settled"] = full and not scheduler._decoding
            found["under_way"] = stats["waiting"] + stats["running"]
            print(json.dumps(found), flush=True)
        lerobot.stop()


class Server:
    def __init__(self) -> None:
        fixed = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | fixed,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.at = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def tell(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._line()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    try:
        yield running
    finally:
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.process.wait(WAIT_S)


# ----------------------------------------------------------------------------- clients, one for each wire


def pixels(kind: str, size: int = LIMIT - (64 << 10)) -> np.ndarray:
    item = np.dtype(kind)
    width = 512
    return np.zeros((size // (3 * width * item.itemsize), width, 3), item)


def native(at: dict) -> Callable[[], Any]:
    """Return what sends one large request on a connection of its own, and returns the connection."""
    payload = protocol.encode_infer({**GOOD, "images": {"front": pixels("u1")}, "prompt": "hang"}, 1)

    def send() -> Any:
        peer = shake(at["native"])
        peer.sendall(frame(b"", 1) + frame(payload))
        return peer

    return send


def groot(at: dict) -> Callable[[], Any]:
    def raw(array: np.ndarray) -> dict:
        return {
            "nd": True,
            "type": array.dtype.str,
            "kind": "",
            "shape": [1, 1, *array.shape],
            "data": array.tobytes(),
        }

    data = {
        "video": {"front": raw(pixels("f2"))},
        "state": {"state": raw(np.zeros(2))},
        "language": {"task": ["hang"]},
    }
    payload = msgpack.packb({"endpoint": "get_action", "data": {"observation": data, "options": {}}})

    def send() -> Any:
        peer = shake(at["groot"])
        peer.sendall(frame(b"", 1) + frame(payload))
        return peer

    return send


def openpi(at: dict) -> Callable[[], Any]:
    payload = pack({"images/front": pixels("f2"), "state": np.zeros(2), "prompt": "hang"})

    def send() -> Any:
        peer = connect(at["web"], max_size=None).__enter__()
        peer.send(payload)
        return peer

    return send


def evo1(at: dict) -> Callable[[], Any]:
    picture = np.zeros((LIMIT // (12 * 128), 128, 3), int).tolist()
    fields = {"image": [picture], "state": [0, 0], "prompt": "hang", "image_mask": [1], "action_mask": [1, 1]}
    payload = json.dumps(fields, separators=(",", ":"))
    assert LIMIT // 2 < len(payload) < LIMIT

    def send() -> Any:
        peer = connect(at["evo1"], max_size=None).__enter__()
        peer.send(payload)
        return peer

    return send


def vla_eval(at: dict) -> Callable[[], Any]:
    payload = {"images": {"front": pixels("f2")}, "states": np.zeros(2), "task_description": "hang"}
    message = vla_eval_pack({"type": "observation", "payload": payload, "seq": 1, "timestamp": 0.0})

    def send() -> Any:
        peer = connect(at["vla-eval"], max_size=None).__enter__()
        peer.send(message)
        return peer

    return send


def http(at: dict, content: bytes = b"") -> Callable[[], Any]:
    body = content or pack({"images/front": pixels("f2"), "state": np.zeros(2), "prompt": "hang"})
    head = f"POST /v1/actions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"

    def send() -> Any:
        peer = plain(at["web"])
        peer.sendall(head.encode() + b"Content-Type: application/msgpack\r\n\r\n" + body)
        return peer

    return send


def pictures(at: dict) -> Callable[[], Any]:
    """Requests of 2 kB, whose picture has 48 MB."""
    file = io.BytesIO()
    Image.new("1", (4096, MIN_BUDGET // 4096)).save(file, "PNG")  # of one bit a pixel
    return http(at, pack({"images/front": file.getvalue(), "state": np.zeros(2), "prompt": "hang"}))


def lerobot(at: dict) -> Callable[[], Any]:
    from tests.serve.test_lerobot_wire import Robot, features
    from tests.serve.test_safe_pickle import TimedObservation, as_lerobot

    raw = {"front": pixels("f2"), "a": 0.0, "b": 0.0, "task": "hang"}
    data = as_lerobot(TimedObservation(0.0, 0, raw))
    about = {"policy_type": "puppet", "pretrained_name_or_path": "puppet", "actions_per_chunk": 3}

    def send() -> Any:
        robot = Robot(at["lerobot"]).hello(lerobot_features=features("front", joints=("a", "b")), **about)
        robot.send(data)
        return robot.channel

    return send


# Bytes of one frame in memory while it is decoded: the file's, Pillow's of four a pixel, RGB, and an array's.
DECODED = 12 * MIN_BUDGET
MAX_PIECE = 4 * MIB  # of a gRPC message, which gRPC reads before anybody counts it
WORK = (
    (DECODERS + 1) * 4 * LIMIT
)  # what decoding and computing a request of float16, the worst, takes beside it
HELD = HELD_REQUESTS * LIMIT  # bytes as they came,
FRAMES = 2 * HELD  # and decoded, of float16 to float32


@pytest.mark.parametrize(
    ("wire", "taken", "most"),
    [
        (native, 4, HELD + WORK),  # whose frames are views of what came
        (groot, 4, HELD + FRAMES + WORK),
        (openpi, 1, HELD + FRAMES + WORK),
        (http, 1, HELD + FRAMES + WORK),
        (evo1, 1, HELD + FRAMES + WORK),
        (vla_eval, 1, HELD + FRAMES + WORK),
        (lerobot, 0, HELD + FRAMES + WORK + MANY * MAX_PIECE),
        (pictures, MANY, AHEAD + (DECODERS + 1) * DECODED),
    ],
)
def test_requests_under_way_are_bounded(server, wire, taken, most):
    """However many send large ones at once, what they hold stays within what SECURITY.md says; when they are answered,
    nothing is left, although their connections are kept. taken: how many are computed or wait for it, at least; of the
    others the connections were closed."""
    send = wire(server.at)
    before = server.tell("mark")
    with contextlib.ExitStack() as stack:
        lock = threading.Lock()

        def one() -> None:
            with contextlib.suppress(
                OSError, WebSocketException, grpc.RpcError
            ):  # closed: they hold too much
                peer = send()
                with lock:
                    stack.callback(peer.close)

        threads = [threading.Thread(target=one) for _ in range(MANY)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        until(lambda: server.tell("look")["under_way"] >= taken, "the requests to arrive")
        until(lambda: server.tell("look")["settled"], "decoding to end")
        server.tell("release")
        until(
            lambda: (now := server.tell("look"))["settled"] and not now["under_way"],
            "the requests to be answered",
        )
        if wire is not lerobot:  # whose observations wait for their robot to ask for actions
            left = before["VmRSS"] + 6 * LIMIT
            until(lambda: server.tell("look")["VmRSS"] < left, "memory to be free")
        peak = server.tell("look")["VmHWM"] - before["VmRSS"]
    assert peak < most, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize(
    ("wire", "replies"),
    [
        *[(native, 0), (openpi, 2), (http, 0)],  # one of each transport; the others are dialects of theirs
        *[pytest.param(*each, marks=pytest.mark.slow) for each in ((groot, 0), (evo1, 1), (vla_eval, 1))],
    ],
)
def test_idle_connections_keep_nothing(server, wire, replies):
    """The last request of each connection stayed in memory, counted for nobody, until the next one came: 256
    connections of an hour ago could hold 16 GiB."""
    send = wire(server.at)
    before = server.tell("mark")
    server.tell("release")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            peer = send()
            stack.callback(peer.close)
            for _ in range(replies):
                peer.recv(WAIT_S)
            if not replies:
                assert peer.recv(1)
        until(lambda: server.tell("look")["VmRSS"] < before["VmRSS"] + 4 * LIMIT, "memory to be free")


if __name__ == "__main__":
    _serve()

"""One hostile server for every client: Python, C++, Rust and JavaScript, and what is built on the Python client.

Each client ends with an error of its own within its time. It does not crash, hang, print without end or take the
memory that a reply names. The ROS node and the LeRobot plugin are asked through the parts that need no ROS and no
LeRobot: both send and receive with the Python client alone, which a test holds.
"""

from __future__ import annotations

import ast
import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import zmtp
from sinew_client.schema import PredictRequest, PredictResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from sinew.serve.decode.array import pack
from tests import processes
from tests.clients.test_languages import CPP, JS, PACKAGES, RUST, Programs, tool
from tests.serve.puppet import GREETING, frame
from tests.serve.test_link import READY

TIME_S = 90.0  # of a client's process, on a busy machine
ROOM = 4 << 30  # bytes of address space; Node reserves more and is not limited
PRINTED = 20_000  # characters of an error


@pytest.fixture(scope="module")
def programs(folder_of_run: Path) -> Programs:
    return Programs(folder_of_run / "programs")


# ----------------------------------------------------------------------------- the server


def answer(request: PredictRequest, **fields: Any) -> bytes:
    return zmtp.message([b"", PredictResponse(request_id=request.request_id, **fields).SerializeToString()])


def chunk(request: PredictRequest, number: float, rows: int = 4, dim: int = 6, values: int = 24) -> bytes:
    return answer(request, actions=[number] * values, chunk_size=rows, action_dim=dim)


NOISE = random.Random(1).randbytes(50_000)
LONG = "é\n\x1b[31m\0" * 20_000
# name -> what is sent as soon as somebody connects
BEFORE: dict[str, bytes] = {
    "nothing": b"",
    "noise": NOISE,
    "HTTP": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "half a greeting": GREETING[:30],
    "a greeting, then noise": GREETING + NOISE,
    "a command without end": GREETING + frame(b"\x05READY", 4, 1 << 60),
    "an error for a handshake": GREETING + frame(b"\x05ERROR\xff" + b"x" * 200, 4),
}
# name -> the reply to each request
REPLIES: dict[str, Callable[[PredictRequest], bytes]] = {
    "silence": lambda _: b"",
    "noise": lambda _: NOISE,
    "a frame of noise": lambda _: zmtp.message([b"", NOISE]),
    "an empty message": lambda _: zmtp.message([b"", b""]),
    "a frame of an exabyte": lambda _: frame(b"", 1) + frame(b"x", 0, 1 << 60),
    "ten thousand parts": lambda _: frame(b"", 1) * 10_000,
    "pings": lambda _: frame(b"\x04PING\0\x10hello", 4) * 5_000,
    "half a reply": lambda seen: chunk(seen, 0.5)[:-9],
    "a chunk of NaN": lambda seen: chunk(seen, float("nan")),
    "a chunk of infinities": lambda seen: chunk(seen, float("inf")),
    "a chunk of no rows": lambda seen: chunk(seen, 0.5, 0, 6, 0),
    "a chunk of other sizes": lambda seen: chunk(seen, 0.5, 1 << 31, 1 << 30, 6),
    "a chunk of more numbers than it names": lambda seen: chunk(seen, 0.5, 1, 1, 100_000),
    "another request's chunk": lambda seen: chunk(PredictRequest(request_id=seen.request_id + 7), 0.5),
    "a long error": lambda seen: answer(seen, error=LONG, error_code=LONG),
    "metadata that is no object": lambda seen: answer(seen, metadata="[" * 100_000),
    "metadata of wrong kinds": lambda seen: answer(seen, metadata='{"policy": 5, "server": [1e999]}'),
}


def requests(peer: socket.socket) -> Iterator[PredictRequest]:
    """Yield what a client sends once it has greeted, as its ZMTP frames hold it."""
    data = b""
    while True:
        at = 64
        while len(data) >= at + 2:
            flags, wide = data[at], data[at] & 2
            size = int.from_bytes(data[at + 1 : at + 9], "big") if wide else data[at + 1]
            begin = at + (9 if wide else 2)
            if len(data) < begin + size:
                break
            if not flags & 4 and size:
                with contextlib.suppress(Exception):
                    yield PredictRequest.FromString(data[begin : begin + size])
            data, at = data[:64] + data[begin + size :], 64
        more = peer.recv(1 << 16)
        if not more:
            return
        data += more


@contextlib.contextmanager
def native(case: str, metadata: str = "") -> Iterator[str]:
    """A server on ZeroMQ's protocol that does what ``case`` names, to everybody who connects.

    metadata: what it answers to requests for it; "" answers them as all others.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            kind, name = case.split(": ", 1)
            if kind == "before":
                peer.sendall(BEFORE[name])
                while peer.recv(1 << 16):
                    pass
                return
            peer.sendall(GREETING + READY)
            for request in requests(peer):
                honest = metadata and request.kind == PredictRequest.METADATA
                peer.sendall(answer(request, metadata=metadata) if honest else REPLIES[name](request))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


NATIVE = [*(f"before: {name}" for name in BEFORE), *(f"reply: {name}" for name in REPLIES)]

# ----------------------------------------------------------------------------- the clients

PYTHON = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({ROOM}, {ROOM}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import numpy as np
from sinew_client import Client, ClientError
{{use}}
"""
# What these programs import, which is half of the seconds of a hundred of them: one process has it, and forks the rest.
IMPORTS = ("numpy", "sinew_client.client", "sinew_client.control.run", "sinew_client.control.robots")
USES = {
    "Client": """
for call in ("metadata", "infer", "health", "reset"):
    with Client(sys.argv[1], timeout=2.0) as robot:
        seen = {"images": {"front": np.zeros((48, 64, 3), np.uint8)}, "state": np.zeros(6), "prompt": "go"}
        try:
            found = robot.infer(seen) if call == "infer" else getattr(robot, call)()
            if call == "infer":
                sys.exit(f"{call} took {found}"[:300])
        except ClientError as error:
            print(call, type(error).__name__, error, file=sys.stderr)
sys.exit(1)
""",
    "Loop": """
from sinew_client.control import Loop, Servers, Settings
from sinew_client.control.robots import Dry
policy = {"cameras": [{"name": "front", "height": 48, "width": 64}], "state": {"dim": 6}, "action": {"dim": 6}}
arm = Dry(policy)
acts = []
arm.act = acts.append
loop = Loop(arm, Servers(sys.argv[1], without=("time",)), Settings(20.0, "aligned", "2", deadline=0.5), 6, "go")
try:
    loop.run(60)
except ClientError as error:
    print(type(error).__name__, error, file=sys.stderr)
loop.close()
sys.exit(f"the robot was sent {len(acts)} rows" if acts else 1)
""",
}


@cache
def nursery() -> processes.Nursery:
    return processes.Nursery(sys.executable, IMPORTS)


def ended_python(use: str, *words: object) -> tuple[int, str]:
    """Run a program with the Python client to its end; return its status and what it printed."""
    command = [sys.executable, "-c", PYTHON.replace("{use}", use), *words]
    done = processes.run(command, timeout=TIME_S, nursery=nursery())
    return done.returncode, done.stdout + done.stderr


def ended(command: list[object], limited: bool = True) -> tuple[int, str]:
    """Run a client of another language to its end; return its status and what it printed."""

    def limit() -> None:
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        errors="replace",
        timeout=TIME_S,
        check=False,
        preexec_fn=limit,
    )
    return done.returncode, done.stdout + done.stderr


def refused(status: int, printed: str) -> None:
    assert status == 1, printed[-2000:]  # an error, and neither a signal nor a chunk
    assert len(printed) < PRINTED
    assert "\x1b" not in printed
    for word in ("Traceback", "panicked", "AddressSanitizer", "terminate called", "was sent", " took "):
        assert word not in printed, printed[-2000:]


def refuse_each(cases: Sequence[str], ask: Callable[[str], tuple[int, str]]) -> None:
    """Let a client ask a server of each case, several at once, as some wait for their time to end."""
    with ThreadPoolExecutor(8) as pool:
        for case, (status, printed) in zip(cases, pool.map(ask, cases), strict=True):
            try:
                refused(status, printed)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("use", USES)
def test_the_python_client_refuses_each(use: str) -> None:
    def ask(case: str) -> tuple[int, str]:
        with native(case) as address:
            return ended_python(USES[use], address)

    # A loop waits for a server as long as it runs, and says so (tests/control/test_promises.py).
    refuse_each([case for case in NATIVE if use == "Client" or case.startswith("reply")], ask)


@pytest.mark.parametrize("language", ["cpp", "rust"])
def test_a_compiled_client_refuses_each(language: str, programs: Programs, tmp_path: Path) -> None:
    program = programs.built(CPP / "ask.cpp" if language == "cpp" else RUST / "examples" / "ask.rs")
    (tmp_path / "front").write_bytes(b"P6 2 2 255\n" + bytes(12))
    options = ["go", "--image", f"front={tmp_path / 'front'}", "--state", "0,0,0,0,0,0"]

    def ask(case: str) -> tuple[int, str]:
        with native(case) as address:
            return ended([program, address, *options])

    refuse_each(NATIVE, ask)


GREETED = pack(
    {"policy": {"cameras": [{"name": "front"}]}, "image_keys": ["images/front"], "state_keys": ["state"]}
)
FLOATS = np.zeros((4, 6), np.float32)
WEB: dict[str, tuple[bytes | str, bytes | str | None]] = {
    "silence": ("", None),
    "noise": (NOISE, NOISE),
    "text": ("hello", "hello"),
    "no object": (pack(5), pack(5)),
    "deep lists": (b"\x91" * 100_000, b"\x91" * 100_000),
    "an array of an exabyte": (GREETED, b"\x81\xa7actions\xdd\xff\xff\xff\xff"),
    "a chunk of NaN": (GREETED, pack({"actions": FLOATS * np.nan})),
    "a chunk of no rows": (GREETED, pack({"actions": FLOATS[:0]})),
    "a chunk of text": (GREETED, pack({"actions": LONG})),
    "a long error": (GREETED, LONG),
    "a prototype": (GREETED, pack({"__proto__": {"actions": 1}, "constructor": 2})),
}


def test_the_javascript_client_refuses_each(tmp_path: Path) -> None:
    node = tool("node", "the JavaScript client's tests")
    (tmp_path / "front").write_bytes(b"P6 2 2 255\n" + bytes(12))
    options = ["go", "--image", f"front={tmp_path / 'front'}", "--state", "0,0,0,0,0,0"]

    def ask(case: str) -> tuple[int, str]:
        greeting, reply = WEB[case]

        def talk(robot: Any) -> None:
            with contextlib.suppress(ConnectionClosed):
                if greeting:
                    robot.send(greeting)
                for _ in robot:
                    if reply is not None:
                        robot.send(reply)

        with serve(talk, "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
            found = ended([node, "--experimental-websocket", JS / "ask.js", address, *options], limited=False)
            server.shutdown()
            return found

    refuse_each([*WEB], ask)


# ----------------------------------------------------------------------------- ROS and LeRobot

ABOUT = {
    "name": "hostile", "architecture": "none", "chunk_size": 4, "noise_dim": 6, "solver_steps": 1,
    "max_prompt_tokens": 1, "control_hz": 20.0, "motion": {"kind": "absolute"},
    "cameras": [{"name": "front", "height": 48, "width": 64}],
    "state": {"dim": 6, "names": list("abcdef"), "units": [""] * 6},
    "action": {"dim": 6, "names": list("abcdef"), "units": [""] * 6},
}  # fmt: skip
METADATA = json.dumps({"policy": ABOUT, "server": {}})
ROS_NODE = """
import threading, time
from types import SimpleNamespace
sys.path.insert(0, sys.argv[2])
from sinew_ros.bridge import Bridge
from sinew_ros.contract import parse

IMAGE, ARRAY = "sensor_msgs/msg/Image", "std_msgs/msg/Float64MultiArray"


class Topics:
    def __init__(self):
        self.sinks, self.commands = {}, []

    def subscribe(self, topic, kind, quality, callback):
        self.sinks[topic] = callback

    def publisher(self, topic, kind):
        return self.commands.append if topic == "/arm" else lambda message: None

    def now(self):
        return time.time()


topics = Topics()
try:
    bridge = Bridge(
        parse({
            "server": sys.argv[1], "prompt": "go", "hz": 20, "start": True, "stamps": "arrival",
            "control": {"replan": "2", "deadline": 0.5, "motion": {"kind": "absolute"}},
            "cameras": {"front": {"topic": "/front", "type": IMAGE}},
            "state": {"topic": "/joints", "joints": list("abcdef")},
            "action": [{"topic": "/arm", "type": ARRAY, "joints": list("abcdef")}],
        }),
        topics,
        timeout=2.0,
    )
except ClientError as error:
    sys.exit(f"{type(error).__name__}: {error}")
ended = threading.Event()


def sense():
    while not ended.wait(0.02):
        topics.sinks["/front"](SimpleNamespace(
            header=None, height=48, width=64, encoding="rgb8", is_bigendian=0, step=192, data=bytes(48 * 192)))
        topics.sinks["/joints"](SimpleNamespace(
            header=None, name=list("abcdef"), position=[0.0] * 6, velocity=[], effort=[]))


threading.Thread(target=sense, daemon=True).start()
bridge.run(30)
ended.set()
held = bridge.report()["control"]["held"]
print(held, file=sys.stderr)
sys.exit(f"the robot was sent {len(topics.commands)} rows" if topics.commands else 1 if held else "never held")
"""
PLUGIN = """
import importlib, types
name = "lerobot_policy_sinew"
package = types.ModuleType(name)  # its own __init__ needs LeRobot
package.__path__ = [sys.argv[2]]
sys.modules[name] = package
ahead = importlib.import_module(name + ".ahead")
try:
    with Client(sys.argv[1], timeout=2.0) as policy:
        playing = ahead.Ahead(policy, policy.spec, "aligned", "2", "", 2.0, "", 0)
        try:
            row = playing.step({"front": np.zeros((48, 64, 3), np.uint8)}, np.zeros(6, np.float32), "go")
            print(f"the robot was sent {row}")
        finally:
            playing.close()
except (ClientError, ValueError) as error:
    sys.exit(f"{type(error).__name__}: {error}"[:2000])
"""


@pytest.mark.parametrize("client", ["ROS", "LeRobot"])
@pytest.mark.parametrize("about", ["", METADATA], ids=["at its metadata", "at its chunks"])
def test_the_ros_node_and_the_lerobot_plugin_refuse_each(client: str, about: str) -> None:
    """The bridge of the node with the topics of this process, and the plugin's loop without LeRobot around it."""
    use = ROS_NODE if client == "ROS" else PLUGIN
    plugin = PACKAGES / "lerobot_policy_sinew" / "src" / "lerobot_policy_sinew"
    source = PACKAGES / "sinew_ros" if client == "ROS" else plugin

    def ask(case: str) -> tuple[int, str]:
        with native(case, about) as address:
            return ended_python(use, address, source)

    # Chunks come after the metadata, so what breaks the connection before them is no case of theirs.
    refuse_each([case for case in NATIVE if not about or case.startswith("reply")], ask)


SENDS = {
    "socket",
    "zmq",
    "grpc",
    "requests",
    "urllib",
    "http",
    "aiohttp",
    "websockets",
    "websocket",
    "pickle",
}


@pytest.mark.parametrize("package", ["sinew_ros/sinew_ros", "lerobot_policy_sinew/src"])
def test_what_is_built_on_the_python_client_reads_no_bytes_of_a_server_itself(package: str) -> None:
    """So that the tests above are of the ROS node and of LeRobot's plugin, too."""
    imported = set()
    for path in (PACKAGES / package).rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            names += [each.module or ""] if isinstance(each, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    assert "sinew_client" in imported
    assert not imported & SENDS

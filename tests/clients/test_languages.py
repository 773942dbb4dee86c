"""Clients in C++, Rust and JavaScript: their bytes are those of the Python client, and so are the actions they get."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, protocol, schema, zmtp
from sinew_client.robot_report import RobotReport
from sinew_client.streams import StreamLink

from sinew.policy import load
from sinew.serve.decode.array import pack, unpack
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, openpi, parse
from tests import processes
from tests.serve import browser
from tests.serve.puppet import GREETING, desk, frame, until
from tests.serve.test_link import READY, more_of, peer
from tests.serve.test_replay import FRAMES, WITHOUT_TORCH, chunk_of, record
from tests.serve.test_server import serving
from tests.serve.test_streams import serving as streaming

ROOT = Path(__file__).parents[2]
PACKAGES, HERE = ROOT / "packages", Path(__file__).parent
CPP, JS, RUST = PACKAGES / "sinew-cpp", PACKAGES / "sinew-js", PACKAGES / "sinew-rust"
KEY = "a key of the test"
WAIT_S = 120.0
SILENT_S = 6  # of a call: half of it is for the address that is silent, half for the one that answers
# What fields.cpp and fields.rs ask, as the Python client asks it.
EVERYTHING = {
    "images": {
        "front": np.array([*range(11), 255], np.uint8).reshape(2, 2, 3),
        "wrist": b"\xff\xd8\xff",
    },
    "state": np.array([0.1, -2, 3e8], np.float32),
    "prompt": "grüß dich",
    "tokens": [1, 300, 70000],
    "noise": [[0.5, -0.5]],
    "seed": 0,
    "solver_steps": 10,
    "session": "arm",
    "time": 12.5,
    "deadline_ms": 100.0,
    "previous": [[1.0, 2.0], [3.0, 4.0]],
    "delay": 0,
    "horizon": 2,
    "rtc": "guided",
    "schedule": "exp",
    "beta": 5.0,
    "advantage": "",
    "guidance_scale": 1.5,
    "adapter": "kitchen",
    "subtask": True,
    "text_only": True,
    "question": "what?",
    "text_tokens": 16,
}
REPORT = RobotReport(  # of fields.rs
    run=1 << 63, state="moves", name="arm", reason="none", hz=50.0, rate_hz=49.5, rows_hz=48.0, age_p50_ms=0.0,
    age_p95_ms=80.5, steps=300, late=1, skipped=2, held={"paused": 3, "late": 0}, clipped_commands=4,
    clipped={"velocity": 4}, limits=("range", "velocity"), failed_requests=5, takeovers=6, steps_by_hand=7, episodes=2,
    successes=0, arm=(0.0, 0.5, 1.0),
)  # fmt: skip
RECORDED = base64.b64decode(
    "EgYBrALwogQiCAAAAD8AAAC/KICAgICAIOADAeoDBXdoYXQ/8AMBsgQAuQQAAAAAAAD4P6oGC2dyw7zDnyBkaWNosgYFZnJv"
    "bnSyBgV3cmlzdLoGDM3MzD0AAADAGA2PTcIGA2FybcgGANAGCtkGAAAAAAAAKUDlBgAAyELqBgNrZXnyBhAAAIA/AAAAQAAA"
    "QEAAAIBA+AYAgAcCigcGZ3VpZGVkkgcDZXhwnQcAAKBAugcGcG9saWN5wAcQygcHa2l0Y2hlbgoUCAEQAhgCIgwAAQIDBAUG"
    "BwgJCv8KBSID/9j/"
)
LIVE = (
    """\
[0.5, 0.5, 0.5, 0.5, 0.5, 0.5] true
state: expected shape [2], got shape [1] [bad_observation]
[0.25, 0.25, 0.25, 0.25, 0.25, 0.25] true
observations: expected 1 to 64, got 0 [bad_observation]
images: expected a frame of each camera, got none [bad_observation]
observations[0].images: expected a frame of each camera, got none [bad_observation]
images.front: expected 2 * 2 * 3 bytes, got 9216 [bad_observation]
observations[0].images.front: expected 2 * 2 * 3 bytes, got 9216 [bad_observation]
images.front: expected a JPEG or PNG file, got no bytes [bad_observation]
observations[0].images.front: expected a JPEG or PNG file, got no bytes [bad_observation]
images.front: expected 1 * 1 * 3 numbers, got 6 [bad_observation]
observations[0].images.front: expected 1 * 1 * 3 numbers, got 6 [bad_observation]
images.front: expected numbers from 0 to 1, got NaN [bad_observation]
observations[0].images.front: expected numbers from 0 to 1, got NaN [bad_observation]
action 0, dimension 0: expected 2 to inf, got 0.5 [unsafe_chunk]
action 0, dimension 0: expected -inf to NaN, got 0.5 [unsafe_chunk]
limits: expected 2 numbers, got 1 [unsafe_chunk]
no answer in time [timeout]
""".splitlines()
    + [
        f"address: expected tcp://HOST:PORT or ipc:///PATH, got {each} [bad_address]"
        for each in ("udp://host:1", "host", "host:0", "host:65536", "host:+1", ":1", "ipc://relative")
    ]
)
# The same for openpi's wire, as far as it has the fields; text_tokens stands for integers of several bytes.
SAID = {
    "policy": {"cameras": [{"name": "front"}]},
    "image_keys": ["images/front"],
    "state_keys": ["state"],
    "prompt_key": "prompt",
}
OPENPI_REQUEST = """
import { encode, pack, unpack } from "./sinew.js";
const said = JSON.parse(process.argv[1]);
const front = { data: Uint8Array.from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255]), height: 2, width: 2 };
const alpha = [0, 1, 2, 9, 3, 4, 5, 9, 6, 7, 8, 9, 9, 10, 255, 9];
const canvas = { data: Uint8ClampedArray.from(alpha), height: 2, width: 2 };
const seen = {
  state: [0.1, -2, 3e8], prompt: "grüß dich", seed: 2 ** 40, solver_steps: 10, delay: 0, horizon: 200,
  noise: { data: [0.5, -0.5], shape: [1, 2] }, previous: { data: [1, 2, 3, 4], shape: [2, 2] }, time: 12,
  beta: 5, rtc: "guided", schedule: "exp", subtask: true, question: "what?", text_only: false, text_tokens: 70000,
  adapter: "kitchen", advantage: "", guidance_scale: 1.5, session_id: "arm", deadline_ms: 100,
};
const hex = (bytes) => Buffer.from(bytes).toString("hex");
for (const frame of [front, canvas]) console.log(hex(encode({ images: { front: frame }, ...seen }, said)));
const kinds = [null, true, -1, -33, -129, -32769, -(2 ** 40), 127, 128, 65535, 65536, 2 ** 40, 0.5, "x".repeat(300),
  [..."x".repeat(20)], new Uint8Array(70000)];
console.log(hex(pack(kinds)), JSON.stringify(unpack(pack(kinds))) === JSON.stringify(kinds));
const [images, narrow] = [{ front }, { front: { ...front, width: 3 } }];
const none = { front: { height: 2, width: 2 } };
for (const wrong of [{ images, state: [1], stat: 1 }, { images: narrow, state: [1] }, { images: none, state: [1] }])
  try { encode(wrong, said); } catch (error) { console.log(error.message); }
const whole = encode({ images: { front }, ...seen }, said);
let cut = 0;
for (let size = 0; size < whole.length; size++)
  try { unpack(whole.subarray(0, size)); } catch (error) { cut += error.code === "bad_reply"; }
console.log(cut === whole.length);
"""


# A server in the place of the WebSocket: says `said` first, and answers each request with the next of `answers`.
STRANGE_SERVERS = """
import { Client, decode, pack } from "./sinew.js";
const numbers = new Uint8Array(96);
const reply = (changed) => pack({ actions: { dtype: "<f4", shape: [2, 12], data: numbers, ...changed } });
const told = async (call) => { try { return await call(); } catch (error) { return error.code ?? error.stack; } };
const rows = async (changed) => console.log(await told(() => decode(reply(changed)).rows));
for (const changed of [{}, { shape: [-1, -24] }, { shape: [0.5, 48] }, { shape: [2n ** 60n, 12] },
  { data: Array(96).fill(0) }, { data: "x".repeat(96) }, { shape: [1, 1200], data: new Uint8Array(4800) }])
  await rows(changed);
let opened = 0;
const server = (said, answers = []) => class {
  constructor() { opened++; setTimeout(() => this.onmessage({ data: pack(said).buffer })); }
  send() { if (answers.length) setTimeout(() => this.onmessage({ data: answers.shift().buffer })); }
  close() {}
};
const seen = { images: { front: { data: new Uint8Array(3), height: 1, width: 1 } }, state: [0] };
const asked = async (WebSocket, calls = 1, options = {}) => {
  const robot = new Client("ws://robot", { WebSocket, ...options }), found = [];
  opened = 0;
  for (let call = 0; call < calls; call++) found.push(await told(async () => (await robot.infer(seen)).rows));
  robot.close();
  console.log(...found, opened);
};
await asked(server(null));
await asked(server({ policy: { cameras: 5 } }));
const none = reply({ shape: [0, 12], data: new Uint8Array(0) });
await asked(server({}, [none, reply({})]), 2); // a connection of its own for the second
await asked(server({}, [reply({})]), 1, { timeoutMs: Infinity });
await asked(server({}), 1, { timeoutMs: 20 });
const long = (data) => class {
  constructor() { setTimeout(() => this.onmessage({ data })); }
  close() {}
};
await asked(long({ byteLength: 2 ** 28 + 1 }));
await asked(long("x".repeat(2 ** 16 + 1)));
await asked(class { constructor() { throw new SyntaxError("no address"); } });
const ends = (open) => class {
  constructor() { setTimeout(() => { if (open) this.onopen(); this.onclose({ type: "close", reason: "" }); }); }
  close() {}
};
for (const [url, open] of [["ws://robot", true], ["ws://robot", false], ["wss://robot", false]])
  try { await new Client(url, { WebSocket: ends(open) }).metadata(); } catch (error) { console.log(error.message); }
const robot = new Client("ws://robot", { WebSocket: server({}, [reply({})]) });
opened = 0;
const calls = [robot.infer(seen), robot.infer(seen)].map((call) => told(() => call));
robot.close();
console.log(...await Promise.all(calls), await told(() => robot.metadata()), opened);
"""


NEVER = "no server of this protocol answers at {}://robot, the key is not its own, or "


@cache
def runs(name: str) -> str | None:
    """Return where a tool is, if it runs: a launcher of versions may have none in this home."""
    found = shutil.which(name)
    return (
        found if found and not subprocess.run([found, "--version"], capture_output=True).returncode else None
    )


def tool(name: str, what: str) -> str:
    found = runs(name)
    if found is None:
        pytest.skip(f"no {name} runs here, and {what} need it")
    return found


def run(*command: object, status: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=WAIT_S,
        cwd=cwd,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{CPP}")


class Programs:
    """Programs over the C++ and the Rust client, each compiled when it is first asked for, once for all workers."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def built(self, source: Path) -> Path:
        made = self.folder / f"{source.stem}{source.suffix[1:]}"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return made if made.exists() else self._build(source, made)

    def _build(self, source: Path, made: Path) -> Path:
        if source.suffix == ".rs":
            compiler = (tool("rustc", "the Rust client's tests"), "--edition=2021", "-Dwarnings")
            client = self.folder / "libsinew_client.rlib"
            if not client.exists():
                run(
                    *compiler,
                    "--crate-type=rlib",
                    "--crate-name=sinew_client",
                    RUST / "src" / "lib.rs",
                    "-o",
                    client,
                )
            run(*compiler, source, "--extern", f"sinew_client={client}", "-o", made)
            return made
        compiler = (tool("g++", "the C++ client's tests"), *STRICT)
        client = self.folder / "sinew_client.o"
        if not client.exists():
            run(*compiler, "-c", CPP / "sinew_client.cpp", "-o", client)
        run(*compiler, source, client, "-o", made)
        return made


@pytest.fixture(scope="module")
def programs(folder_of_run: Path) -> Programs:
    return Programs(folder_of_run / "programs")


@pytest.fixture(scope="module", params=["cpp", "rs"])
def fields(programs: Programs, request: pytest.FixtureRequest) -> Path:
    return programs.built(HERE / f"fields.{request.param}")


# ----------------------------------------------------------------------------- bytes


def test_the_schema_in_other_languages_is_the_schema() -> None:
    spec = importlib.util.spec_from_file_location("generate", PACKAGES / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.generated().items():
        assert path.read_text() == text, "run python packages/generate.py"
    # Every field that the Python client sends, so that a new one is not forgotten.
    sent = set(schema.PredictRequest.DESCRIPTOR.fields_by_name) - {
        *("state", "precomputed_img_emb", "precomputed_img_emb_n_views", "attention_mask"),  # vla.cpp's form
        "generation",  # of memory that Python's client shares
    }
    source = generate.CPP.read_text()
    encoder = source[source.index("std::string encode(") : source.index("Chunk decode_reply")]
    control = source[source.index("std::string Client::control") :]
    # C++ has no messages of several, which evaluations ask for, and no reports, which are of the Python client's loop.
    assert {name for name in sent if name not in encoder + control} == {"observations", "report"}
    rust = (RUST / "src" / "messages.rs").read_text()
    assert {name for name in sent if f"asked::{name.upper()}" not in rust} == set()
    reported = schema.Report.DESCRIPTOR.fields_by_name
    assert {name for name in reported if f"run::{name.upper()}" not in rust} == set()


def test_their_bytes_are_those_of_python(fields: Path, tmp_path: Path) -> None:
    run(fields, "request", tmp_path / "request")
    written = (tmp_path / "request").read_bytes()
    assert written == RECORDED
    assert written == protocol.encode_infer(EVERYTHING, 1 << 40, None, "key", "policy")

    reply = schema.PredictResponse(request_id=7, horizon=2, dim=3, seed=1 << 63, session="arm", time=0.1)
    actions = np.random.default_rng(0).normal(size=6).astype(np.float32)
    reply.actions.extend(actions.tolist())
    reply.warnings.append("strange")
    reply.text, reply.adapter = "pick", "kitchen"
    reply.timing.total_ms, reply.timing.text_ms, reply.timing.batch = 1.5, 0.25, 4
    reply.timing.step_ms.extend([1.0, 2.0])
    (tmp_path / "reply").write_bytes(reply.SerializeToString())
    whole, *cut = run(fields, "reply", tmp_path / "reply").splitlines()
    numbers, rest, timing = whole.split(" | ")
    assert numbers.split()[:2] == ["2", "3"]
    np.testing.assert_array_equal(np.array(numbers.split()[2:], np.float32), actions)
    assert rest == f"{1 << 63} arm 0.10000000000000001 pick kitchen strange"
    assert timing == "1.5 2 0.25 4"
    assert len(cut) == len(reply.SerializeToString())
    without = "adapter: expected an answer of 'kitchen', got '' [unsafe_chunk]"  # which C++ compares in infer
    assert all("bad_reply" in line or line.startswith("2 3 ") or line == without for line in cut), cut

    for change, said in (
        ({"request_id": 8}, "request_id: expected 7, got 8 [bad_reply]"),
        ({"error": "too many", "error_code": "busy"}, "too many [busy]"),
        ({"horizon": 3}, "the reply holds 6 numbers for 3 actions of 3 dimensions [bad_reply]"),
        ({"horizon": 1 << 31, "dim": 0}, "[bad_reply]"),
    ):
        wrong = schema.PredictResponse.FromString(reply.SerializeToString())
        for name, value in change.items():
            setattr(wrong, name, value)
        (tmp_path / "reply").write_bytes(wrong.SerializeToString())
        assert said in run(fields, "reply", tmp_path / "reply").splitlines()[0]
    reply.actions[4] = float("nan")
    (tmp_path / "reply").write_bytes(reply.SerializeToString())
    assert "not finite [unsafe_chunk]" in run(fields, "reply", tmp_path / "reply").splitlines()[0]


def test_their_streams_bytes_are_those_of_python(fields: Path, tmp_path: Path) -> None:
    run(fields, "sample", tmp_path / "sample")
    sample = schema.PredictRequest.FromString(RECORDED)
    del sample.images[:]
    sample.kind, sample.rate, sample.frame_time, sample.interpolation = 4, 30.0, 12.25, "hold"
    written, images = (tmp_path / "sample").read_bytes(), EVERYTHING["images"]
    assert written == b"".join(protocol.with_frames(sample, images.items()))  # type: ignore[attr-defined]
    # As it was recorded: the request, and the four fields of a stream in their places.
    kind, rate = RECORDED.index(b"\xaa\x06\x0bgr"), RECORDED.index(b"\xba\x07\x06policy")
    pace = bytes.fromhex("a5070000f041a907000000000080 2840b20704") + b"hold"
    assert written == RECORDED[:kind] + b"\xa0\x06\x04" + RECORDED[kind:rate] + pace + RECORDED[rate:]

    message = schema.PredictResponse(request_id=9, horizon=2, dim=2, actions=[0.5, -1, 0.25, 3e8])
    window = message.window
    window.step, window.run, window.label, window.text, window.said = (
        -3,
        1 << 40,
        "whole chunks",
        "pi",
        "pick",
    )
    window.sample_time, window.frame_time = 12.5, 12.25
    window.prefix_age_ms, window.sensor_age_ms, window.head_ms = 1.5, 0.25, 8
    (tmp_path / "window").write_bytes(message.SerializeToString())
    whole, *cut = run(fields, "window", tmp_path / "window").splitlines()
    numbers, rest = whole.split(" | ")
    assert [float(each) for each in numbers.split()] == [-3, 2, 2, 0.5, -1, 0.25, 3e8]
    times, words = rest.split(" ", 2)[:2], rest.split(" ", 2)[2]
    assert [float(each) for each in times] == [12.5, 12.25]
    assert words == f"1.5 0.25 8 {1 << 40} 9 whole chunks pi pick"
    assert len(cut) == message.ByteSize()
    assert all("bad_reply" in line for line in cut), cut
    for change, said in (
        ({"error": "all places are taken", "error_code": "busy"}, "all places are taken [busy]"),
        ({"dim": 3}, "the reply holds 4 numbers for 2 actions of 3 dimensions [bad_reply]"),
        ({"actions": [0, 0, 0, np.inf]}, "not finite [unsafe_chunk]"),
        ({"window": {"sample_time": np.nan}}, "the window holds times that are not finite [unsafe_chunk]"),
    ):
        wrong = schema.PredictResponse.FromString(message.SerializeToString())
        for name in change:
            wrong.ClearField(name)
        wrong.MergeFrom(schema.PredictResponse(**change))
        (tmp_path / "window").write_bytes(wrong.SerializeToString())
        assert said in run(fields, "window", tmp_path / "window").splitlines()[0]


def test_their_streams_are_those_of_python(
    fields: Path, programs: Programs, rolling_bundle: Path, tmp_path: Path
) -> None:
    """The first window of a stream whose noise is drawn from a seed is the same in every language, also of a second
    stream on the connection of the first; what a server refuses, and one that reads nothing, keep nobody waiting."""
    front = np.full((16, 16, 3), 7, np.uint8)
    policy = load(rolling_bundle, engine="eager", threads=1)
    with streaming(policy, api_key=KEY) as server:
        link = StreamLink(server.native, 100.0, "arm", KEY, {"seed": 7})
        assert link.wait_connected(WAIT_S)
        assert link.send([0.5, 0.25], 0.0, images={"front": front}, prompt="go")
        assert link.wait_window(WAIT_S)
        (window,) = link.windows()[:1]
        link.close()
        first, second, wrong, untimed = run(fields, "stream", server.native, KEY).splitlines()
        refused = run(fields, "stream", server.native, "another").splitlines()
        (tmp_path / "front").write_bytes(b"P6\n16 16\n255\n" + front.tobytes())
        ask = programs.built(CPP / "ask.cpp" if fields.name.endswith("cpp") else RUST / "examples" / "ask.rs")
        line = ("go", "--image", f"front={tmp_path / 'front'}", "--state", "0,0", "--key", KEY, "--rate")
        windows = [line.split() for line in run(ask, server.native, *line, 100, "--times", 5).splitlines()]
        other = run(ask, server.native, *line, 50, status=1)
        until(lambda: not server.streams.robots, "the end of every stream")
    for said, number in ((first, 1), (second, 2)):
        numbers, of = said.split(" of ")
        assert numbers.split()[:3] == [str(each) for each in (window.step, *window.rows.shape)]
        np.testing.assert_array_equal(np.array(numbers.split()[3:], np.float32), window.rows.ravel())
        assert int(of) == number
    assert wrong == "state: expected shape [2], got shape [1] [bad_observation]"
    assert untimed == "time: expected seconds of the robot's clock, got none [bad_observation]"
    assert [line.rpartition("[")[2] for line in refused] == [*["unauthorized]"] * 3, "bad_observation]"]
    assert len(windows) == 5
    assert all(int(step[:-1]) > 0 and len(nodes) <= 6 for step, *nodes in windows)
    assert (
        other == "error: rate: expected 100 nodes per second, the rate at which this head was trained,"
        " got 50 [bad_observation]\n"
    )

    def reads_nothing(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        over.wait(WAIT_S)

    def goes_away(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        made.recv(1 << 16)

    over = threading.Event()
    with peer(reads_nothing) as address:
        assert run(fields, "full", address) == "dropped\n"
        over.set()
    with peer(goes_away) as address:
        assert "[connection_lost]" in run(ask, address, *line, 100, status=1)


def said_first(made: socket.socket, more: bytes = b"") -> None:
    """Shake hands, and wait until a request has come whole."""
    made.sendall(GREETING + READY + more)
    asked = b""
    while b"READY" not in asked or not asked.endswith(b"arm"):
        asked += more_of(made)


def never_stops_talking(made: socket.socket) -> None:
    made.sendall(GREETING + READY)
    while True:
        made.sendall(frame(b"\x04NOPE", 4) * 1000)


def never_shakes_hands(made: socket.socket) -> None:
    made.sendall(GREETING)
    while True:
        made.sendall(frame(b"\x04NOPE", 4) * 1000)


def a_long_command(made: socket.socket) -> None:
    said_first(made)
    made.sendall(frame(b"\x04NOPE" + bytes(1 << 20), 4))
    made.recv(1)


def many_warnings(made: socket.socket) -> None:
    said_first(made)
    reply = schema.PredictResponse(request_id=1, warnings=[""] * 2000).SerializeToString()
    made.sendall(zmtp.message([b"", reply]))
    made.recv(1)


def another_reply_behind_the_first(made: socket.socket) -> None:
    said_first(made)
    reply = zmtp.message([b"", schema.PredictResponse(request_id=1, metadata="one").SerializeToString()])
    made.sendall(reply * 2)
    made.recv(1)


@pytest.mark.parametrize(
    ("talk", "told", "seconds"),
    [
        (never_stops_talking, ["no answer in time [timeout]"], 0.5),
        (never_shakes_hands, ["no answer in time [timeout]"], 0.5),
        (a_long_command, ["the reply: expected at most 1024 bytes, got 1048581 [bad_reply]"], WAIT_S),
        (many_warnings, ["warnings: expected at most 1024, got more [bad_reply]"], WAIT_S),
        # The second call opens a connection of its own, which nobody answers, and does not take what was left.
        (another_reply_behind_the_first, ["one", "no answer in time [timeout]"], SILENT_S),
    ],
)
def test_they_leave_a_server_that_is_none(talk: Any, told: list[str], seconds: float, fields: Path) -> None:
    with peer(talk) as address:
        assert run(fields, "reset", address, len(told), seconds).splitlines() == told


def test_they_go_past_an_address_that_is_silent(fields: Path, tmp_path: Path) -> None:
    """The first of a name's two addresses takes no connection and refuses none, as a host behind a broken tunnel."""

    def answers(made: socket.socket) -> None:
        said_first(made)
        made.sendall(
            zmtp.message([b"", schema.PredictResponse(request_id=1, metadata="one").SerializeToString()])
        )
        made.recv(1)

    both_hosts = tmp_path / "both.so"
    run(tool("gcc", "a host of two addresses"), "-shared", "-fPIC", HERE / "both.c", "-o", both_hosts, "-ldl")
    with peer(answers) as address, socket.socket() as full, contextlib.ExitStack() as waiting:
        port = int(address.rpartition(":")[2])
        full.bind(("127.0.0.2", port))
        full.listen(0)
        for _ in range(4):  # its queue is full: the kernel is silent to whoever comes next
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        both = run("env", f"LD_PRELOAD={both_hosts}", fields, "reset", f"tcp://both.test:{port}", 1, SILENT_S)
        socket.create_connection(("127.0.0.1", port)).close()  # whoever still waits there ends
        alone = run(fields, "reset", f"tcp://127.0.0.2:{port}", 1, 0.5)
    refused = run(fields, "reset", f"tcp://127.0.0.3:{port}", 1, SILENT_S)  # where nobody listens
    assert refused.startswith(f"no server at 127.0.0.3:{port}: Connection refused")
    assert both.splitlines() == ["one"]
    assert alone.lower().splitlines() == [f"no server at 127.0.0.2:{port}: connection timed out [timeout]"]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["cpp", "rs"])
def test_replies_of_noise(language: str, tmp_path: Path, programs: Programs) -> None:
    """C++ under the sanitizers; Rust as it is built to be debugged, where a number that overflows ends the program."""
    fields = tmp_path / "fields"
    if language == "rs":
        fields = programs.built(HERE / "fields.rs")
    else:
        flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")
        sources = (HERE / "fields.cpp", CPP / "sinew_client.cpp")
        run(tool("g++", "the C++ client's tests"), *STRICT, *flags, *sources, "-o", fields)
    run(fields, "request", tmp_path / "request")
    rng = np.random.default_rng(1)
    reply = schema.PredictResponse(request_id=7, horizon=2, dim=2, actions=[0, 1, 2, 3], warnings=["x"])
    # The actions come in two parts, of which the first is empty.
    whole = np.frombuffer(b"\xa2\x06\x00" + reply.SerializeToString(), np.uint8)
    for _ in range(100):
        noise = np.where(rng.random(len(whole)) < 0.1, rng.integers(0, 256, len(whole)), whole)
        (tmp_path / "reply").write_bytes(noise.astype(np.uint8).tobytes())
        run(fields, "reply", tmp_path / "reply")


@pytest.mark.slow
def test_rusts_own_tools_have_nothing_to_say(tmp_path: Path) -> None:
    cargo = tool("cargo", "the Rust client's tests")
    environment = ("env", f"CARGO_TARGET_DIR={tmp_path}")
    for verb in (("fmt", "--check"), ("clippy", "--all-targets", "--offline", "--locked", "--", "-Dwarnings"),
                 ("test", "--doc", "--offline", "--locked")):  # fmt: skip
        if verb[0] == "test" or shutil.which(f"cargo-{verb[0]}"):
            run(*environment, cargo, *verb, cwd=RUST)


def test_javascript_writes_and_reads_what_openpi_does() -> None:
    node = tool("node", "the JavaScript client's tests")
    program = ("--input-type=module", "-e", OPENPI_REQUEST, json.dumps(SAID))
    bytes_, canvas, kinds, unknown, pixels, none, cut = run(node, *program, cwd=JS).splitlines()
    assert canvas == bytes_  # a canvas's pixels, without their alpha
    wanted = {
        "images/front": EVERYTHING["images"]["front"],  # type: ignore[index]
        "state": EVERYTHING["state"],
        "prompt": "grüß dich",
        "seed": 1 << 40,
        "solver_steps": 10,
        "delay": 0,
        "horizon": 200,
        "noise": np.array([[0.5, -0.5]], np.float32),
        "previous": np.array([[1, 2], [3, 4]], np.float32),
        "time": 12.0,
        "beta": 5.0,
        "rtc": "guided",
        "schedule": "exp",
        "subtask": True,
        "question": "what?",
        "text_only": False,
        "text_tokens": 70000,
        "adapter": "kitchen",
        "advantage": "",
        "guidance_scale": 1.5,
        "session_id": "arm",
        "deadline_ms": 100.0,
    }
    assert {*openpi.OPTIONS, "session_id", "deadline_ms"} - {"cfg_scale"} <= set(wanted)
    # The order of the options is JavaScript's own; each of them has the bytes that msgpack gives it.
    read = unpack(bytes.fromhex(bytes_))
    assert list(read)[:3] == list(wanted)[:3]
    assert set(read) == set(wanted)
    assert bytes.fromhex(bytes_) == pack({name: wanted[name] for name in read})
    written, same = kinds.split()
    assert same == "true"
    numbers = [-1, -33, -129, -32769, -(1 << 40), 127, 128, 65535, 65536, 1 << 40, 0.5]
    assert bytes.fromhex(written) == pack([None, True, *numbers, "x" * 300, [*("x" * 20)], bytes(70000)])
    assert "stat: expected one of images, state" in unknown
    assert "[bad_observation]" in unknown
    assert pixels == "images.front: expected 3 or 4 bytes a pixel, got 12 for 6 [bad_observation]"
    assert none == "images.front: expected { data, height, width } of bytes, got undefined [bad_observation]"
    assert cut == "true"


def test_javascript_refuses_what_no_server_says() -> None:
    node = tool("node", "the JavaScript client's tests")
    found = run(node, "--input-type=module", "-e", STRANGE_SERVERS, cwd=JS).splitlines()
    assert found[:7] == ["2", *["bad_reply"] * 5, "unsafe_chunk"]
    assert found[7:] == [
        "bad_reply 1",
        "bad_reply 1",
        "bad_reply 2 2",
        "2 1",
        "timeout 1",
        "bad_reply 0",  # longer than any reply
        "bad_reply 0",
        "bad_address 0",
        "the connection to ws://robot was lost [connection_lost]",
        NEVER.format("ws") + "it wants wss:// [connection_lost]",
        NEVER.format("wss")
        + "its certificate is not trusted (Node takes one more from NODE_EXTRA_CA_CERTS) [connection_lost]",
        "connection_lost connection_lost connection_lost 0",  # a client that was closed opens nothing
    ]


def test_the_types_of_javascript_are_those_it_exports(tmp_path: Path) -> None:
    declared = (JS / "sinew.d.ts").read_text()
    exported = [
        line.split()[2].split("(")[0]
        for line in (JS / "sinew.js").read_text().splitlines()
        if line.startswith("export ")
    ]
    assert exported
    assert all(f" {name}" in declared for name in exported)
    fields = declared[declared.index("interface RequestOptions") : declared.index("interface Observation")]
    assert all(
        f"  {name}?:" in fields for name in {*openpi.OPTIONS, "session_id", "deadline_ms"} - {"cfg_scale"}
    )
    compiler = tool("tsc", "types")
    (tmp_path / "use.ts").write_text(
        f'import {{ Client, SinewError }} from "{JS / "sinew"}";\n'
        'const robot = new Client("ws://host:8000", { timeoutMs: 500 });\n'
        "const front = { data: new Uint8Array(12), height: 2, width: 2 };\n"
        'robot.infer({ images: { front }, state: [0], prompt: "go", seed: 1 }).then((chunk) => chunk.rows + 1);\n'
        'new SinewError("timeout", "x").code.length;\n'
        "// @ts-expect-error\nrobot.infer({ stat: [0] });\n"
    )
    run(compiler, "--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", tmp_path / "use.ts")


# ----------------------------------------------------------------------------- a live server


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    folder = tmp_path_factory.mktemp("languages")
    records = record(folder / "records", {"arm": 3}, (4, 6))
    (folder / "key").write_text(KEY)
    native, web = processes.free_port(), processes.free_port()
    wires = ("--wire", f"native:{native}", "--wire", f"openpi:{web}", "--api-key-file", folder / "key")
    arguments = ("--replay", records, *wires, "--replay-latency", "none")
    with serving(folder, *arguments, command=("-c", WITHOUT_TORCH)):
        yield native, web


def rows(text: str) -> np.ndarray:
    return np.array([line.split() for line in text.splitlines()], np.float32)


@pytest.mark.parametrize("language", ["cpp", "rust", "javascript"])
def test_a_live_server_answers_other_languages(
    language: str,
    ports: tuple[int, int],
    tmp_path: Path,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native, web = ports
    asked = ["go", "--state", "0,0,0,0,0,0"]
    for name, picture in FRAMES.items():
        (tmp_path / name).write_bytes(b"P6\n%d %d\n255\n" % picture.shape[1::-1] + picture.tobytes())
        asked += ["--image", f"{name}={tmp_path / name}"]
    command: list[Any]
    if language != "javascript":
        source = CPP / "ask.cpp" if language == "cpp" else RUST / "examples" / "ask.rs"
        command = [programs.built(source), f"tcp://127.0.0.1:{native}"]
    else:
        node = tool("node", "the JavaScript client's tests")
        command = [node, "--experimental-websocket", JS / "ask.js", f"ws://127.0.0.1:{web}"]
    with Client(f"tcp://127.0.0.1:{native}", timeout=WAIT_S, api_key=KEY) as python:
        python.reset()
        chunks = [python.infer({"images": FRAMES, "state": np.zeros(6), "prompt": "go"}) for _ in range(3)]
    # Of a connection without a session the recording is played from its beginning, on either wire.
    answered = rows(run(*command, *asked, "--key", KEY, "--times", 3)).reshape(3, 4, 6)
    wanted = np.stack([chunk.actions for chunk in chunks])
    np.testing.assert_array_equal(sorted(answered.tolist()), sorted(wanted.tolist()))
    np.testing.assert_array_equal(wanted[0], chunk_of("arm", 0, (4, 6)))
    if language == "rust":
        with open("/dev/full", "wb") as full:
            said = subprocess.run(
                [*command, *asked, "--key", KEY], stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert (said.returncode, said.stderr[:6]) == (1, b"error:")
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    wrong = run(*command, *asked, "--state", 0, status=1)
    monkeypatch.delenv("SINEW_API_KEY")
    assert "state: expected 6 numbers" in wrong
    assert "[bad_observation]" in wrong
    missing = run(*command, *asked, status=1)
    assert "unauthorized" in missing if language != "javascript" else "the key is not its own" in missing
    nobody = [str(each).replace(str(native), "1").replace(f":{web}", ":1") for each in command]
    if language == "javascript":
        assert "[connection_lost]" in run(*nobody, *asked, status=1)
    usage = run(*command, status=1)
    assert "[usage]" in usage
    assert "--state" in usage
    nowhere = run(*command, "go", "--image", "front=nowhere.ppm", status=1)
    assert "nowhere.ppm" in nowhere
    assert "expected" in nowhere
    assert "[bad_observation]" in nowhere


@pytest.mark.parametrize("language", ["cpp", "rust", "javascript"])
def test_they_send_no_key_to_other_machines(
    language: str, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: list[Any]
    scheme = "tcp"
    if language == "javascript":
        node = tool("node", "the JavaScript client's tests")
        command, scheme = [node, "--experimental-websocket", JS / "ask.js"], "ws"
    else:
        command = [programs.built(CPP / "ask.cpp" if language == "cpp" else RUST / "examples" / "ask.rs")]
    (tmp_path / "front.ppm").write_bytes(b"P6\n1 1\n255\nabc")
    asked = ["go", "--state", "0,0,0,0,0,0", "--image", f"front={tmp_path / 'front.ppm'}"]
    for host in (
        "192.0.2.1",
        "robot.example.org",
        "127.0.0.1.example.org",
        "[2001:db8::1]",
        "[::ffff:192.0.2.1]",
    ):
        told = run(*command, f"{scheme}://{host}:5555", *asked, "--key", KEY, status=1)
        assert "for the API key, got a plain connection" in told
        assert "SINEW_ALLOW_UNENCRYPTED_KEY=1" in told
        assert "[bad_address]" in told
        assert KEY not in told
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]

        def leave() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=leave, daemon=True).start()
        port = (
            1 if language == "javascript" else port
        )  # Node waits for a server that has closed the connection
        for host in ("127.0.0.1", "127.0.0.2", "localhost", "[::ffff:127.0.0.1]"):
            told = run(*command, f"{scheme}://{host}:{port}", *asked, "--key", KEY, status=1)
            assert "[connection_lost]" in told, (host, told)
        monkeypatch.setenv("SINEW_ALLOW_UNENCRYPTED_KEY", "1")
        told = run(*command, f"{scheme}://0.0.0.0:{port}", *asked, "--key", KEY, status=1)
        assert "[connection_lost]" in told, told
        listening.shutdown(socket.SHUT_RDWR)


def test_rust_asks_for_several_and_reports(programs: Programs, tmp_path: Path) -> None:
    fields = programs.built(HERE / "fields.rs")
    front = EVERYTHING["images"]["front"].reshape(1, 4, 3)  # type: ignore[index]
    wrist = np.array([0, 0.25, 0.5, 1, 0.1, 0.9], np.float32).reshape(2, 1, 3)
    small = {"images": {"front": front, "wrist": wrist}, "state": [0.5], "tokens": [-1]}
    both = [{name: value for name, value in EVERYTHING.items() if name != "deadline_ms"}, small]
    run(fields, "several", tmp_path / "several")
    wanted = protocol.infer_all_parts(both, 1 << 40, None, "key", "policy")
    assert (tmp_path / "several").read_bytes() == b"".join(wanted)
    run(fields, "report", tmp_path / "report")
    assert (tmp_path / "report").read_bytes() == protocol.encode_control(
        "REPORT", 7, "arm", "key", "policy", REPORT
    )

    (unix,) = open_wires(parse([f"native:ipc://{tmp_path / 'socket'}"]), Listen())
    with desk(api_key=KEY) as at:
        unix.start(at.service)
        for address in (at.native, unix.address):
            about, health, *told = run(fields, "live", address, KEY).splitlines()
            assert json.loads(about)["policy"] == json.loads(json.dumps(at.puppet.spec.to_dict()))
            assert json.loads(health)["status"] == "ok"
            *_, row = at.service.robots.rows()
            said = {name: row[name] for name in ("session", "state", "held", "arm")}
            assert said == {"session": "arm", "state": "moves", "held": REPORT.held, "arm": REPORT.arm}
            assert told == LIVE
        unix.stop()


def test_rust_waits_no_longer_than_it_may_for_a_unix_socket(programs: Programs, tmp_path: Path) -> None:
    """Of a server that accepts nothing, whose queue is full, and which goes away."""
    fields = programs.built(HERE / "fields.rs")
    path = tmp_path / "socket"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen(0)
        waits = stack.enter_context(socket.socket(socket.AF_UNIX))
        waits.connect(str(path))
        said = run(fields, "reset", f"ipc://{path}", 3, 0.5).splitlines()
    assert said == [f"no server at {path}: the server accepts no connection [timeout]"] * 3


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root gives a socket to another user"
)
def test_rust_sends_nothing_to_the_socket_of_another_user(programs: Programs, tmp_path: Path) -> None:
    fields = programs.built(HERE / "fields.rs")
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        os.chown(path, 65534, 65534)
        (said,) = run(fields, "reset", f"ipc://{path}", 1, 5).splitlines()
        assert "expected a server of user 0 or of root, got one of user 65534; nothing was sent" in said
        peer, _ = stranger.accept()
        with peer:
            assert peer.recv(100) == b""


ASKED_BY_A_PAGE = """
(async () => {
  const { Client, SinewError } = await import("/sinew.js");
  const canvas = Object.assign(document.createElement("canvas"), { width: 48, height: 32 });
  const context = canvas.getContext("2d");
  context.fillRect(0, 0, 48, 32);
  const frame = context.getImageData(0, 0, 48, 32);
  const robot = new Client("ws://127.0.0.1:%d");
  const images = { camera1: frame, camera2: frame };
  const { actions, rows, dim } = await robot.infer({ images, state: [0, 0, 0, 0, 0, 0], prompt: "go" });
  let refused = "";
  try { await robot.infer({ images, state: [0], prompt: "go" }); } catch (error) { refused = error.message; }
  const again = await robot.infer({ images, state: [0, 0, 0, 0, 0, 0], prompt: "go" }); // over a new connection
  let key = "";
  try { await new Client("ws://127.0.0.1:1", { apiKey: "k" }).metadata(); } catch (error) { key = error.code; }
  robot.close();
  return { actions: [...actions], rows, dim, refused, again: again.rows, key };
})()
"""


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="needs Chromium or Chrome on the path")
def test_a_page_in_a_browser_asks(tmp_path: Path) -> None:
    records = record(tmp_path / "records", {"arm": 3}, (4, 6))
    pages = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=JS))
    origin = f"http://127.0.0.1:{pages.server_port}"
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    web = processes.free_port()
    arguments = ("--replay", records, "--wire", f"openpi:{web}", "--replay-latency", "none")
    try:
        with (
            serving(tmp_path, *arguments, "--allow-origin", origin, command=("-c", WITHOUT_TORCH)),
            browser.browsing(f"{origin}/package.json", tmp_path / "profile") as page,
        ):
            page.wait("location.pathname === '/package.json' && document.readyState === 'complete'")
            found = page.evaluate(ASKED_BY_A_PAGE % web)
    finally:
        pages.shutdown()
        pages.server_close()
    answered = np.array(found["actions"], np.float32).reshape(found["rows"], found["dim"])
    np.testing.assert_array_equal(answered, chunk_of("arm", 0, (4, 6)))
    assert "state: expected 6 numbers" in found["refused"]
    assert (found["again"], found["key"]) == (4, "unsupported")

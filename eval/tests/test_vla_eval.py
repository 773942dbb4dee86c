"""vla-eval on our side of an evaluation: its benchmarks as suites, and its model servers as policies."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the blocks task needs the sim extra")

import msgpack
from sinew.cli import main
from sinew.core import SinewError
from tests.serve.vla_eval_package import FOLDER, environment, installed, nursery

from sinew_eval import suites
from sinew_eval.episodes import campaign
from sinew_eval.episodes.adapters import Mapped
from sinew_eval.episodes.policies import identity
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.foreign.model_server import ModelServer
from sinew_eval.foreign.run import Foreign
from sinew_eval.foreign.server import serving
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
OWN = "vla-eval/tests.serve.vla_eval_blocks:Blocks"
OPTIONS = {"control_hz": 20, "params": {"seed": 0}}  # worlds as the seeds say

websockets = pytest.importorskip("websockets.asyncio.server", reason="the server's side needs websockets")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has vla-eval installed, as a user's has."""
    folder = tmp_path_factory.mktemp("interpreter")
    venv.create(folder, with_pip=False, symlinks=True)
    places = (sysconfig.get_path("purelib"), ROOT, ROOT / "packages" / "sinew-client" / "src", FOLDER)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "places.pth").write_text("\n".join(map(str, places)) + "\n")
    return folder / "bin" / "python"


def outcomes(episodes: list[Any]) -> list[tuple[Any, ...]]:
    return [(each.seed, each.success, each.steps, each.chunks) for each in episodes]


# ----------------------------------------------------------------------------- its benchmarks


@installed
@pytest.mark.usefixtures("forked")
def test_a_benchmark_is_played_as_the_task_that_it_wraps(interpreter: Path, tmp_path: Path) -> None:
    """Its class under its own base class, in its own interpreter: the episodes are those of the plain task, to the
    control step. Commands go out as the policy gives them, where the plain task cuts them to its space."""
    seeds, variant = range(5000, 5002), Variant(str(BLOCKS), 8, handover="freeze")
    (here,) = campaign.run(Task("sinew/Blocks-v0"), [variant], seeds)
    elsewhere = Foreign(interpreter, tmp_path / "serve.log")
    task = Task(OWN, env_options=OPTIONS)
    assert elsewhere.control_hz(task) == 20
    (there,) = campaign.run(task, [variant], seeds, elsewhere=elsewhere)
    assert outcomes(here) == outcomes(there)
    assert {each.task for each in there} == {"sinew/blocks"}
    assert all(each.success for each in there)


@installed
@pytest.mark.parametrize(
    ("env", "options", "told"),
    [
        (OWN, {}, "vla-eval does not state the control rate"),
        (OWN, {"control_hz": 20, "params": {"gravity": 1}}, "params: .*gravity"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # an interpreter each
            for case in (
                ("vla-eval/calvin", {}, "vla-eval/calvin: expected its control rate"),
                (OWN, {"control_hz": 20, "render": "paper"}, "render: .*does not support render: paper"),
                ("vla-eval/tests.serve.vla_eval_blocks:Bricks", {"control_hz": 20}, "has no 'Bricks'"),
                ("vla-eval/nowhere:Blocks", {"control_hz": 20}, "no module 'nowhere'"),
                ("vla-eval/libero", {}, "libero|EGL|robosuite|torch"),  # no simulator here
            )
        ),
    ],
)
def test_a_benchmark_that_cannot_be_made_says_why(
    interpreter: Path, env: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(SinewError, match=told):
        next(
            Foreign(interpreter).play(
                Task(env, env_options=options), [Variant("tcp://nowhere:1")], [(0, 0)], 1
            )
        )


def test_all_of_its_benchmarks_are_suites() -> None:
    found = [name for name in suites.SUITES if name.startswith(suites.VLA_EVAL_PREFIX)]
    assert len(found) == len(suites.VLA_EVAL) == 20
    assert suites.named("vla-eval/libero") == "vla-eval/libero"
    suite, tasks = suites.find("vla-eval/libero") or pytest.fail("no suite")
    assert (suite.control_hz, tasks) == (20.0, ("vla-eval/libero",))
    assert suites.find("vla-eval/nothing") is None
    suite, _ = suites.find("vla-eval/my.module:Mine") or pytest.fail("no suite")
    assert suite.control_hz == 0


@installed
def test_the_table_names_classes_of_the_wheel() -> None:
    for place, _ in suites.VLA_EVAL.values():
        module, _, kind = place.partition(":")
        text = (FOLDER / Path(*module.split("."))).with_suffix(".py").read_text()
        assert f"class {kind}(" in text
    there = {path.parent.name for path in (FOLDER / "vla_eval" / "benchmarks").glob("*/benchmark.py")}
    assert there == set(suites.VLA_EVAL)


def test_no_interpreter_is_made_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(BLOCKS), "--suite", "vla-eval/libero"]) == 1
    assert "pass the interpreter with --interpreter" in " ".join(capsys.readouterr().err.split())


def test_a_benchmark_holds_its_robot_as_it_says() -> None:
    held = np.array([1.0, 2.0], np.float32)
    env: Any = SimpleNamespace(
        control_hz=20, metadata={}, hold_action=lambda last: held if last is None else last
    )
    env.unwrapped = env
    adapter = Mapped(env, suites_mapping())
    assert adapter.hold(None) is held
    assert adapter.hold(2 * held).tolist() == [2, 4]


def suites_mapping() -> Any:
    from sinew_eval.suites.mapping import Mapping

    return Mapping(images={}, state=("state",))


# ----------------------------------------------------------------------------- its model servers


@contextlib.contextmanager
def bridge(address: str, chunk: int) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.serve.vla_eval_server", address, str(chunk)]
    with processes.Process(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, nursery=nursery()
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            port = server.stdout.readline().strip()
            assert port, server.stderr.read()[-2000:]
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield f"vla-eval://127.0.0.1:{port}"
        finally:
            server.kill()


@installed
@pytest.mark.usefixtures("forked")
def test_its_own_server_plays_the_episodes_of_the_bundle(tmp_path: Path) -> None:
    """A model server under vla-eval's base class and code, asked by our loop: every command is the bundle's."""
    seeds, task = range(5000, 5002), Task("sinew/Blocks-v0")
    (here,) = campaign.run(task, [Variant(str(BLOCKS), 8, handover="freeze")], seeds)
    with serving(BLOCKS, tmp_path / "serve.log", "--threads", "1") as native:
        with bridge(native, 8) as address:
            (there,) = campaign.run(task, [Variant(address, 8, handover="freeze")], seeds)
            assert identity(address)["kind"] == "server"
            assert identity(address)["name"] == "Bridge"
        assert [(e.seed, e.success, e.steps, e.digest) for e in here] == [
            (e.seed, e.success, e.steps, e.digest) for e in there
        ]
        assert [each.chunks for each in there] == [
            each.steps for each in there
        ]  # an action for each observation
        with (
            bridge(native, 0) as address,
            pytest.raises(SinewError, match=r"got float32 \[32, 4\]; start the server with a chunk"),
        ):
            campaign.run(task, [Variant(address, 8, handover="freeze")], [5000])


class Server:
    """A server of the protocol that says whatever a test wants."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes | None]):
        self._answer = answer
        self._ready = threading.Event()
        self.heard: list[str] = []
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        async def talk(socket: Any) -> None:
            async for data in socket:
                message = msgpack.unpackb(data)
                self.heard.append(message["type"])
                reply = HELLO if message["type"] == "hello" else self._answer(message)
                if callable(reply):
                    reply = reply(message)
                if reply is not None:
                    await socket.send(reply)

        async with websockets.serve(talk, "127.0.0.1", 0) as server:
            self.address = f"vla-eval://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await asyncio.Event().wait()


def HELLO(message: dict[str, Any]) -> bytes:  # noqa: N802 - an answer
    return reply(
        message, "hello", {"protocol_version": 1, "model_server": "Mine", "harness_version": "0.8.0"}
    )


def reply(message: dict[str, Any], kind: str, payload: Any, seq: int | None = None) -> bytes:
    seq = message["seq"] if seq is None else seq
    return msgpack.packb({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0})


def action(values: Any, **changes: Any) -> dict[str, Any]:
    array = np.asarray(values, np.float32)
    found = {
        "__ndarray__": True,
        "data": array.tobytes(),
        "dtype": array.dtype.str,
        "shape": list(array.shape),
    }
    return {"actions": {**found, **changes}}


SEEN = {"images": {"front": np.zeros((2, 2, 3), np.uint8)}, "state": np.zeros(2), "prompt": "go"}


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (action([[1.0, 2.0]]), r"got float32 \[1, 2\]; start the server with a chunk_size"),
        (action([float("nan")]), "expected finite actions"),
        (action([]), r"got float32 \[0\]"),
        ({}, "got object"),
        (action([1.0], dtype="|O"), "got"),
        (action([1.0], dtype="<f8"), "got"),
        (action([1.0], shape=[1 << 40]), "got"),
        ({"actions": ["a"]}, "got <U1"),
    ],
)
def test_actions_that_are_none_are_refused(payload: dict[str, Any], told: str) -> None:
    server = Server(
        lambda message: reply(message, "action", payload) if message["type"] == "observation" else None
    )
    policy = ModelServer(server.address)
    with pytest.raises(SinewError, match=told):
        policy.infer(SEEN, 1)
    policy.close()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda m: reply(m, "error", {"error": "observation_failed: dark"}), "observation_failed: dark"),
        (lambda m: reply(m, "action", action([1.0]), seq=99), "expected 'action' 2, got 'action' 99"),
        (lambda m: reply(m, "hello", {}), "expected 'action' 2, got 'hello'"),
        (lambda m: reply(m, "action", []), "expected a message with a payload"),
        (lambda m: b"\xc1", "the answer is not a msgpack message"),
        (lambda m: b"\x81", "the answer is not a msgpack message"),
        (lambda m: msgpack.packb(list(range(3))), "expected a message with a payload, got list"),
        (lambda m: b"\0" * (1 << 21), "the server closed the connection"),
    ],
)
def test_answers_that_are_none_are_named(made: Callable[[dict[str, Any]], bytes], told: str) -> None:
    server = Server(lambda message: made(message) if message["type"] == "observation" else None)
    policy = ModelServer(server.address)
    with pytest.raises(SinewError, match=told):
        policy.infer(SEEN, 1)
    policy.close()


def test_episodes_begin_and_end() -> None:
    answered = lambda m: reply(m, "action", action([1.0, 2.0])) if m["type"] == "observation" else None  # noqa: E731
    server = Server(answered)
    policy, env = ModelServer(server.address), SimpleNamespace(unwrapped=SimpleNamespace())
    for _ in range(2):
        policy.start(env)  # type: ignore[arg-type]
        actions, _ = policy.infer(SEEN, 1)
        assert actions.tolist() == [[1, 2]]
    policy.close()
    policy.close()
    wanted = [
        "hello",
        "episode_start",
        "observation",
        "episode_end",
        "episode_start",
        "observation",
        "episode_end",
    ]
    end = threading.Event()
    while server.heard != wanted and not end.wait(0.01):
        assert len(server.heard) <= len(wanted)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SinewError, match="vla-eval://127.0.0.1:1: cannot connect"):
        ModelServer("vla-eval://127.0.0.1:1")
    assert main(["eval", "vla-eval://127.0.0.1:1", "--env", "sinew/Blocks-v0", "--episodes", "1"]) == 1
    assert "cannot connect" in capsys.readouterr().err


def test_another_version_of_the_protocol_is_refused() -> None:
    global HELLO  # noqa: PLW0603
    before = HELLO
    HELLO = lambda m: reply(m, "hello", {"protocol_version": 2})  # noqa: E731
    try:
        with pytest.raises(SinewError, match="expected protocol_version 1, got 2"):
            ModelServer(Server(lambda _: None).address)
    finally:
        HELLO = before

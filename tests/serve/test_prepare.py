"""The default engine becomes the fastest one while a server serves: made, proved, measured, exchanged, and kept.

The policies are the embedded ``act``, whose graphs come with the package, and a golden case that has to be exported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client

from sinew import load
from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert.sources import ASSETS
from sinew.core import machine
from sinew.engine import prepared, proofs
from sinew.engine.backend import BACKENDS, EngineOptions, candidates, choose, unproved
from sinew.engine.cpu.kernels import build
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.plan.engine import PlannedEngine
from sinew.records.recorder import read_records
from sinew.serve.prepare import Preparation, Preparer, preparation
from tests import processes
from tests.covering import some
from tests.engine.test_choose import needs_kernels, stored_in_int8
from tests.golden import Golden, assert_parity
from tests.proofs import NAMES
from tests.serve.puppet import desk
from tests.serve.test_server import START_S, ServerProcess, serving
from tests.serve.test_swap import exchanging

CASE = "act-2cam"  # whose export takes half of another family's
WORK_S = 600.0  # an export of the lowest priority beside other tests, where nobody may raise it
PAUSE_S = 0.25  # of a robot between two chunks: each takes from what is exported beside it
pytestmark = pytest.mark.timeout(900)
ACT = ASSETS / "act.gguf"
ONE = ("--wire", "native:0", "--threads", 1)


@pytest.fixture(autouse=True)
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers prepare, and keep what they find in a folder of the test. It has the library already, which they would
    compile beside, or is none in which one would be kept."""
    library = build.kept()
    monkeypatch.setenv("SINEW_SERVE_PREPARE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if library is not None:
        shutil.copytree(library.parent, build.cache() / library.parent.name)
    else:
        build.cache().mkdir(parents=True)
        build.cache().chmod(0o777)


@pytest.fixture
def act(tmp_path: Path) -> Path:
    (tmp_path / "robot").mkdir()
    return Path(shutil.copy(ACT, tmp_path / "robot" / "act.gguf"))


@pytest.fixture
def golden_bundle(tmp_path: Path, case_bundle: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    (tmp_path / "robot").mkdir()
    case = getattr(request, "param", CASE)
    return Path(shutil.copy(case_bundle(case), tmp_path / "robot" / "policy.gguf"))


def until(found: Callable[[], Any], seconds: float = WORK_S) -> Any:
    """Return the first answer that is one."""
    end = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)
    return answer


def state(client: Client) -> dict[str, str]:
    return client.health(timeout=START_S)["prepare"]


def settled(client: Client) -> dict[str, str]:
    """Return what became of the preparation once nothing more will."""
    return until(lambda: (found := state(client))["state"] in ("taken", "refused", "failed") and found)


# A server whose preparing process is forked from the tests' nursery, five CPU seconds of imports less, and says which
# it is. How a server starts it by itself: test_a_server_changes_to_the_faster_engine_between_two_chunks.
FORKED = """
import os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from sinew.cli import main
from sinew.serve import prepare
from tests import processes

program, places = sys.argv[1:3]
def start(command, *, text, **options):
    words = command[command.index("sinew") + 1 :]
    child = processes.Process([sys.executable, "-c", program, *words], **options)
    Path(places, str(child.pid)).touch()
    return child

prepare.subprocess = SimpleNamespace(
    Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
)
sys.exit(main(["serve", *sys.argv[3:]]))
"""
SINEW = "import sys; from sinew.cli import main; sys.exit(main(sys.argv[1:]))"


@contextlib.contextmanager
def preparing(folder: Path, *arguments: object, program: str = SINEW) -> Iterator[ServerProcess]:
    """``serving`` as said there. program: of the process that prepares."""
    (folder / "children").mkdir(exist_ok=True)
    with serving(
        folder, *arguments, *ONE, command=("-c", FORKED, program, str(folder / "children"))
    ) as server:
        yield server


def children(server: ServerProcess) -> list[int]:
    """Return the processes that this server started."""
    if (place := server.log.parent / "children").exists():
        return [int(path.name) for path in place.iterdir() if Path("/proc", path.name).exists()]
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(each.read_text().rpartition(")")[2].split()[1]) == server.process.pid:
                found.append(int(each.parent.name))
    return found


def hurry(server: ServerProcess) -> int:
    """Return the process that prepares, once it has stepped back, and let it go as fast as the tests beside it, where
    that is allowed."""

    def stepped() -> int | None:
        found = [each for each in children(server) if os.getpriority(os.PRIO_PROCESS, each) == 19]
        return found[0] if found else None

    child = until(stepped)
    group = Path(f"/proc/{child}/autogroup")
    if group.exists():
        until(lambda: group.read_text().endswith("nice 19\n"), START_S)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child, 0)
        group.write_text("0")
    return child


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def exporting(folder: Path) -> Path:
    """Return the folder that an export has begun to fill."""
    return until(lambda: next(folder.glob(".policy.onnx-*.sinew"), None))


def grey(bundle: Path) -> dict[str, Any]:
    seen = load(bundle, engine="eager").dummy_observation()
    return {"images": seen.images, "state": seen.state, "prompt": seen.prompt, "seed": 3}


@contextlib.contextmanager
def asking(address: str, observation: dict[str, Any]) -> Iterator[list[np.ndarray]]:
    """Ask as a robot does, so that what is prepared beside it gets a processor; every answer stands in the list, in
    order. An error fails the test."""
    answers: list[Any] = []
    end = threading.Event()

    def ask() -> None:
        with Client(address, timeout=START_S) as client:
            while not end.wait(PAUSE_S):
                try:
                    answers.append(client.infer(observation).actions)
                except Exception as error:  # noqa: BLE001 - told by the test
                    answers.append(error)
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        end.set()
        thread.join(START_S)


def exchanged_once(answers: list[Any], before: np.ndarray, after: np.ndarray) -> None:
    """Assert that the answers are those of one engine, then those of the other, and nothing else."""
    assert not np.array_equal(before, after)  # else nothing would be shown
    kinds = [
        "before" if np.array_equal(each, before) else "after" if np.array_equal(each, after) else each
        for each in answers
    ]
    turn = kinds.index("after")
    assert turn > 0
    assert kinds == ["before"] * turn + ["after"] * (len(kinds) - turn)


# ----------------------------------------------------------------------------- the exchange


@pytest.mark.slow
def test_a_server_changes_to_the_faster_engine_between_two_chunks(act: Path, tmp_path: Path) -> None:
    observation = grey(act)
    plan, onnx = (load(act, engine=name, threads=1).infer(observation).actions for name in ("plan", "onnx"))
    np.testing.assert_allclose(plan, onnx, atol=1e-3 * np.abs(plan).max())
    arguments = (act, "--wire", "http:0", *ONE, "--record", tmp_path / "records")
    with serving(tmp_path, *arguments) as server, contextlib.ExitStack() as stack:
        address = next(word for word in server.line.split() if word.startswith("tcp:"))
        client = stack.enter_context(Client(address, timeout=START_S))
        assert client.metadata()["server"]["engine"] == "plan"
        hurry(server)
        with asking(address, observation) as answers, asking(address, observation) as others:
            found = settled(client)
            count = len(answers)
            until(lambda: len(answers) > count + 5)
        assert found["state"] == "taken", found
        for each in (answers, others):
            exchanged_once(each, plan, onnx)
        about, health = client.metadata()["server"], client.health()
        assert (about["engine"], health["engine"]) == ("onnx", "onnx")
        assert "measured on this machine: plan " in about["engine_reason"] == health["engine_reason"]
        assert (health["failed"], health["superseded"]) == (0, 0)
        assert health["served"] == len(answers) + len(others)
        page = next(word for word in server.line.split() if word.startswith("http:"))
        with urllib.request.urlopen(f"{page}/metrics", timeout=START_S) as reply:
            engines = [line for line in reply.read().decode().splitlines() if line.startswith("sinew_info{")]
        assert ['engine="onnx"' in line for line in engines] == [True]
        assert server.stop() == 0
    log = server.log.read_text()
    assert (
        "engine onnx has replaced engine plan: processor ms of a chunk, measured on this machine: plan "
        in log
    )
    assert "Traceback" not in log
    engines = [record.server["engine"] for record in read_records(tmp_path / "records")]
    given = [*answers, *others]
    for name, chunk in (
        ("plan", plan),
        ("onnx", onnx),
    ):  # the last of one may end beside the first of the other
        assert engines.count(name) == sum(np.array_equal(each, chunk) for each in given) > 0
    # The next start begins with it, and prepares nothing.
    with serving(tmp_path, act, *ONE) as server, Client(server.address, timeout=START_S) as client:
        about = client.metadata()["server"]
        assert about["engine"] == "onnx"
        assert "measured on this machine: plan " in about["engine_reason"]
        assert "prepare" not in client.health()
        np.testing.assert_array_equal(client.infer(observation).actions, onnx)
    # What was found is the servers': a program, and a server that is told so, have what they had.
    assert choose(Bundle(act), device="cpu").engine == "plan"
    with serving(tmp_path, act, *ONE, "--no-prepare") as server, Client(server.address) as client:
        assert client.metadata(timeout=START_S)["server"]["engine"] == "plan"
        assert "prepare" not in client.health()


@pytest.mark.slow  # an export; what ends one is below, and tests/engine/test_onnx.py has one's chunks
def test_a_bundle_is_exported_beside_its_server(golden_bundle: Path, tmp_path: Path, golden: Path) -> None:
    case = Golden(golden / CASE)
    with preparing(tmp_path, golden_bundle) as server, Client(server.address, timeout=START_S) as client:
        assert client.metadata()["server"]["engine"] == "plan"
        with asking(server.address, case.observation()) as answers:
            child = hurry(server)
            partial = exporting(golden_bundle.parent)
            assert Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000"
            # Another process waits for the first, and finds what it found.
            second = processes.Process(
                [sys.executable, "-m", "sinew", "prepare", golden_bundle, "--json", tmp_path / "second.json"]
            )
            assert settled(client)["state"] == "taken"
            count = len(answers)
            until(lambda: len(answers) > count + 5)
        assert second.wait(WORK_S) == 0
        told = json.loads((tmp_path / "second.json").read_text())
        found = prepared.kept(golden_bundle, "onnx")
        assert found is not None  # by the first, and nothing was measured again
        assert (told["engine"], told["taken"], told["seconds"]) == ("onnx", True, found.seconds)
        for actions in answers:
            assert_parity(actions, case.numpy("actions")[0])
        assert not partial.exists()
        (folder,) = (path for path in golden_bundle.parent.iterdir() if path.is_dir())
        assert "graphs.json" in names(folder)
        assert "policy.gguf" not in names(folder)
        plan, onnx = (
            load(golden_bundle, engine=name, threads=1).infer(case.observation()).actions
            for name in ("plan", "onnx")
        )
        exchanged_once(answers, plan, onnx)
    assert choose(Bundle(golden_bundle), device="cpu").engine == "onnx"  # its graphs are there, for everyone
    record = json.loads(next((tmp_path / "cache" / "sinew" / "proofs").iterdir()).read_text())
    assert record["passed"] is True
    assert not list((tmp_path / "cache" / "sinew" / "prepared").glob("*.lock"))


# ----------------------------------------------------------------------------- what ends on the way


@pytest.mark.parametrize("victim", some(["child", "server asked", "server killed"], "child"))
def test_nothing_is_left_of_an_export_that_ends(victim: str, golden_bundle: Path, tmp_path: Path) -> None:
    home, observation = golden_bundle.parent, grey(golden_bundle)
    with preparing(tmp_path, golden_bundle) as server, Client(server.address, timeout=START_S) as client:
        child = hurry(server)
        exporting(home)
        if victim == "child":
            os.kill(child, signal.SIGKILL)
            found = settled(client)
            assert found["state"] == "refused"
            assert "ended by signal 9 (SIGKILL), for example because memory was short" in found["text"]
            assert found["text"] in server.log.read_text()
            assert client.infer(observation).actions.shape[0] > 0
            assert client.health()["status"] == "ok"
            assert names(home) == {"policy.gguf"}
            assert server.stop() == 0
        else:
            server.process.send_signal(signal.SIGTERM if victim == "server asked" else signal.SIGKILL)
            server.process.wait(START_S)
            until(lambda: not Path(f"/proc/{child}").exists(), START_S)
            assert names(home) == {"policy.gguf"}
    log = server.log.read_text()
    assert "Traceback" not in log
    if victim == "child":  # what ended it would again
        with (
            preparing(tmp_path, golden_bundle) as server,
            Client(server.address, timeout=START_S) as client,
        ):
            assert client.metadata()["server"]["engine"] == "plan"
            assert "prepare" not in client.health()
            assert "(an earlier result; to measure again, run `sinew prepare" in server.log.read_text()
            assert children(server) == []


FULL = """
import resource, sys
from sinew.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow  # an export
def test_a_disk_that_is_full(golden_bundle: Path, tmp_path: Path) -> None:
    with (
        preparing(tmp_path, golden_bundle, program=FULL) as server,
        Client(server.address, timeout=START_S) as client,
    ):
        hurry(server)
        found = settled(client)
        assert found["state"] == "failed"
        assert (
            f"{golden_bundle.parent}: expected to write the form of engine onnx there, got " in found["text"]
        )
        assert client.infer(grey(golden_bundle)).actions.shape[0] > 0
        assert names(golden_bundle.parent) == {"policy.gguf"}
    assert prepared.kept(golden_bundle, "onnx") is None  # tomorrow there may be room


def test_memory_that_is_short(act: Path, tmp_path: Path) -> None:
    with (
        preparing(tmp_path, act, "--memory-gib", 0.05) as server,
        Client(server.address, timeout=START_S) as client,
    ):
        hurry(server)
        found = settled(client)
        assert found["state"] == "failed"
        assert (
            "memory: expected 0.09 GiB, because the old and the new policy are both loaded during a hot-swap, got"
            " 0.05 GiB" in found["text"]
        )
        assert client.metadata()["server"]["engine"] == "plan"
        assert "was not prepared: memory: expected" in server.log.read_text()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(act: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file in the place of the folder")
    with preparing(tmp_path, act) as server, Client(server.address, timeout=START_S) as client:
        found = settled(client)
        assert found["state"] == "failed"
        assert "prepared: expected to store the result there, got Not a directory" in found["text"]
        assert client.infer(grey(act)).actions.shape[0] > 0
    assert names(act.parent) == {"act.gguf"}


# ----------------------------------------------------------------------------- what is not taken


def test_an_engine_that_is_slower_is_not_taken(act: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The measurement is the real one; the engine really takes longer.

    Eager takes longer too. For so small a policy, it may otherwise look faster than plan on a busy machine.
    """

    def slowed(solve: Callable[..., np.ndarray], kind: type) -> Callable[..., np.ndarray]:
        def slow(engine: Any, *given: Any, **options: Any) -> np.ndarray:
            end = time.process_time() + 0.1
            while type(engine) is kind and time.process_time() < end:
                pass
            return solve(engine, *given, **options)

        return slow

    with monkeypatch.context() as patch:
        for kind in (OnnxEngine, EagerEngine):
            patch.setattr(kind, "solve", slowed(kind.solve, kind))
        assert main(["prepare", str(act), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["taken"], told["prepared"], told["against"]) == (False, True, "plan")
    assert told["seconds"]["onnx"] > told["seconds"]["plan"] > 0
    assert told["why"].startswith("engine onnx is not taken: it is not 5% faster; proved: ")
    assert (
        "; --engine auto keeps plan: processor ms of a chunk, measured on this machine: plan " in told["why"]
    )
    with serving(tmp_path, act, *ONE) as server, Client(server.address, timeout=START_S) as client:
        assert client.metadata()["server"]["engine"] == "plan"
        assert "engine onnx is not taken: it is not 5% faster" in client.metadata()["server"]["engine_reason"]
        assert "prepare" not in client.health()
        assert children(server) == []
        assert "(an earlier result; to measure again, run `sinew prepare" in server.log.read_text()
    assert main(["prepare", str(act), "--json"]) == 0  # found before: nothing is measured
    again = json.loads(capsys.readouterr().out)
    assert (again["prepared"], again["seconds"]) == (True, told["seconds"])
    with monkeypatch.context() as patch:  # now the others take longer, whatever this processor is good at
        for kind in (PlannedEngine, EagerEngine):
            patch.setattr(kind, "solve", slowed(kind.solve, kind))
        assert main(["prepare", str(act), "--again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["taken"] is True


def test_an_engine_that_computes_something_else_is_not_taken(act: Path, monkeypatch, capsys) -> None:
    solve = OnnxEngine.solve
    monkeypatch.setattr(
        OnnxEngine, "solve", lambda *given, **options: solve(*given, **options) * np.float32(1.01)
    )
    # Eager is timed too. On a busy machine it may look 15 % faster than plan, and the command would report that.
    monkeypatch.setattr("sinew.engine.backend.REFERENCE_MARGIN", 1e6)
    assert main(["prepare", str(act), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["taken"], told["seconds"]) == (False, {})
    assert "engine onnx is not taken: it differs: actions " in told["why"]
    assert choose(Bundle(act), device="cpu", prepared=True).engine == "plan"


@pytest.mark.slow  # an export
@pytest.mark.parametrize("golden_bundle", ["smolvla-2cam"], indirect=True)
def test_what_robots_asked_for_stays(golden_bundle: Path, tmp_path: Path) -> None:
    """Graphs follow no Jacobian; a robot that was guided with one shall not be refused behind the exchange."""
    observation = grey(golden_bundle)
    with serving(tmp_path, golden_bundle, *ONE) as server, Client(server.address, timeout=START_S) as client:
        chunk = client.infer(observation)
        guided = {**observation, "previous": chunk.actions[4:], "delay": 2, "rtc": "guided"}
        client.infer(guided)
        hurry(server)
        found = settled(client)
        assert found["state"] == "refused"
        words = "engine onnx is not used, because robots of this server have used real-time chunking with rtc guided"
        assert words in found["text"]
        assert client.metadata()["server"]["engine"] == "plan"
        client.infer(guided)
    with serving(tmp_path, golden_bundle, *ONE) as server, Client(server.address, timeout=START_S) as client:
        assert words in client.metadata()["server"]["engine_reason"]
        client.infer(guided)


def test_what_a_finding_holds_for(act: Path, monkeypatch) -> None:
    found = prepared.EngineFinding("onnx", "plan", True, "it is faster", {"onnx": 1.0, "plan": 2.0})
    path = found.keep(act)
    assert prepared.kept(act, "onnx") == found
    assert choose(Bundle(act), device="cpu", prepared=True).engine_reason.startswith(
        "the fastest verified engine for act on cpu; it is faster"
    )
    kept = json.loads(path.read_text())
    for other in (
        {"sinew": "0.0"},
        {"hardware": "another processor"},
        {"libraries": {**kept["libraries"], "onnxruntime": "0.1"}},
        {"seconds": {"onnx": -1}},
        {"seconds": {"onnx": float("nan")}},
        {"seconds": [1]},
        {"engine": "plan"},
    ):
        path.write_text(json.dumps({**kept, **other}))
        assert prepared.kept(act, "onnx") is None, other
    for text in ("", "[]", "{}", "\0", "null"):
        path.write_text(text)
        assert prepared.kept(act, "onnx") is None
    path.write_text(json.dumps(kept))
    # The same processor held to fewer instructions, and another of the same name: both measure again.
    for name, value in (("SINEW_CPU_KERNELS", "portable"), ("ATEN_CPU_CAPABILITY", "avx2")):
        with monkeypatch.context() as held:
            held.setenv(name, value)
            assert prepared.kept(act, "onnx") is None, name
    with monkeypatch.context() as other:
        flags = machine.cpu_flags() ^ {"avx2"}  # another set than this processor's, whatever it has
        other.setattr(machine, "cpu_flags", lambda: flags)
        assert prepared.kept(act, "onnx") is None
    assert prepared.kept(act, "onnx") == found
    act.write_bytes(act.read_bytes()[:-1] + b"x")  # other weights
    assert prepared.kept(act, "onnx") is None


def test_what_can_be_prepared(golden_bundle: Path) -> None:
    for bundle in (Bundle(ACT), Bundle(golden_bundle)):
        assert [each.engine for each in candidates(bundle, choose(bundle, device="cpu"))] == ["onnx"]
        assert candidates(bundle, choose(bundle, "onnx", device="cpu")) == []
        halved = candidates(bundle, choose(bundle, dtype="bf16", device="cpu"))
        # None is verified in bf16 yet, and the graphs are fp32. Engine cpu needs the instruction.
        expected = ["cpu", "plan"] if BACKENDS["cpu"].multiplies("bf16") else ["plan"]
        assert [each.engine for each in halved] == expected


def test_what_cannot_be_prepared(monkeypatch) -> None:
    for name in (
        "blocks-rtc",
        "egg",
    ):  # trained to continue rows, and with a time per row, which graphs have not
        bundle = Bundle(ASSETS / f"{name}.gguf")
        assert candidates(bundle, choose(bundle, device="cpu")) == []
    monkeypatch.setattr(type(BACKENDS["onnx"]), "packages", ("no_such_runtime",))
    bundle = Bundle(ACT)
    assert candidates(bundle, choose(bundle, device="cpu")) == []


@needs_kernels
def test_what_is_prepared_under_a_recipe(tmp_path: Path) -> None:
    """What a bundle's recipe rounds, only an engine that follows it is made for."""
    bundle = stored_in_int8(tmp_path / "small.gguf")
    (graphs,) = tmp_path.glob("small.onnx-*")
    shutil.rmtree(graphs)
    choice = choose(bundle, device="cpu", threads=1)
    (made,) = candidates(bundle, choice)
    assert (choice.engine, made.engine, dict(made.recipe)) == ("cpu", "onnx", dict(choice.recipe))
    # What computes in float32 on such weights does not turn into what rounds activations while robots act.
    assert candidates(bundle, choose(bundle, "plan", device="cpu", ignore_recipe=True)) == []
    assert candidates(bundle, choose(bundle, "plan", device="cpu")) == []


@pytest.mark.parametrize("architecture", sorted(NAMES))
def test_every_family_of_the_table_gets_the_faster_engine(architecture: str) -> None:
    """By the tests' own proofs alone: plan at once, and onnx once there are graphs."""
    manifest = SimpleNamespace(architecture=architecture, quantization=None)
    bundle = SimpleNamespace(path=ACT, manifest=manifest, lowbit={})
    for engine in ("plan", "onnx"):
        ternary = engine == "onnx" and "onnx" not in columns(architecture)
        assert bool(unproved(BACKENDS[engine], bundle, EngineOptions("cpu", "fp32"))) == ternary
    # BitVLA has no graphs.
    assert [name for name in sorted(NAMES) if "onnx" not in columns(name)] == ["bitvla"]


def columns(architecture: str) -> set[str]:
    return {row[1] for row in json.loads(proofs.RECORD.read_text()) if row[0] == architecture}


# ----------------------------------------------------------------------------- a process that says something else


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            'print(\'{"text": "none is faster"}\')',
            "the preparing process printed no valid result, but none is faster",
        ),
        ("print('no record')", "it ended with status 0"),
        ("raise SystemExit('error: the disk is away')", "was not prepared: the disk is away"),
        ("import os; os.kill(os.getpid(), 15)", "ended by signal 15 (SIGTERM)"),
        (
            "print('[1]'); print('{' * 100000); print('{\"engine\": \"onnx\"}')",
            "the preparing process printed no valid result",
        ),
    ],
)
def test_whatever_the_process_says(program: str, words: str, tmp_path: Path, act: Path) -> None:
    swept: list[int] = []
    with desk(()) as at:
        command = [sys.executable, "-c", program]
        work = Preparation(str(act), "onnx", "plan", command, act, lambda: swept.append(1))
        preparer = Preparer(at.service, work)
        preparer.start()
        assert preparer.join(START_S)
        found = preparer.describe()
    assert found["state"] in ("failed", "refused")
    assert words in found["text"]
    assert bool(swept) == ("SystemExit" in program or "kill" in program)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(golden_bundle: Path, monkeypatch, caplog) -> None:
    """A process is not begun for it: a container's models lie in such a folder, at each of its starts."""
    options = {"engine": "auto", "device": "cpu", "dtype": None, "providers": (), "ignore_recipe": False}
    work = preparation(golden_bundle, options, 1, 1 << 30)
    assert work is not None
    words = [
        "prepare",
        str(golden_bundle),
        "--background",
        "--json",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--memory-gib",
        "1.000000",
    ]
    assert list(work.command[-len(words) :]) == words
    for no in ({"engine": "plan"}, {"engine": "onnx"}, {"providers": ("cpu",)}):
        assert preparation(golden_bundle, {**options, **no}, 1, None) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    with caplog.at_level("INFO"):
        assert preparation(golden_bundle, options, 1, None) is None
    assert f"is not prepared, because the folder {golden_bundle.parent} cannot be written" in caplog.text


def test_memory_that_went_meanwhile(tmp_path: Path, act: Path, monkeypatch) -> None:
    found = {
        "engine": "onnx",
        "against": "plan",
        "taken": True,
        "why": "it is faster",
        "seconds": {},
        "need": 1 << 20,
    }
    monkeypatch.setattr(machine, "memory", lambda: (1 << 30, 1 << 19))
    with exchanging(tmp_path) as at:
        command = [sys.executable, "-c", f"print({json.dumps(found)!r})"]
        preparer = Preparer(at.service, Preparation(str(act), "onnx", "plan", command, act, lambda: None))
        preparer.start()
        assert preparer.join(START_S)
        assert (
            "memory: the new engine needs 1 MiB of weights in addition, and 0 MiB are free"
            in preparer.describe()["text"]
        )
        assert at.service.scheduler is at.scheduler


def test_a_policy_that_was_exchanged_meanwhile_stays(tmp_path: Path, act: Path) -> None:
    found = {
        "engine": "onnx",
        "against": "plan",
        "taken": True,
        "why": "it is faster",
        "seconds": {},
        "need": 1,
    }
    wait = tmp_path / "go"
    program = f"import os, time\nwhile not os.path.exists({str(wait)!r}): time.sleep(0.01)\n"
    program += f"print({json.dumps(found)!r})"
    with exchanging(tmp_path) as at:
        work = Preparation(str(act), "onnx", "plan", [sys.executable, "-c", program], act, lambda: None)
        preparer = Preparer(at.service, work)
        preparer.start()
        at.swap("other")
        wait.touch()
        assert preparer.join(START_S)
        assert preparer.describe()["state"] == "refused"
        assert preparer.describe()["text"] == "another policy has replaced this policy in the meantime"
        assert at.service.about()["name"] == "other"


def test_a_process_that_hears_no_signal_is_ended_all_the_same(act: Path) -> None:
    program = (
        'import signal, time; signal.signal(15, signal.SIG_IGN); print(\'{"progress": "on"}\', flush=True)'
    )
    program += "; time.sleep(600)"
    with desk(()) as at:
        work = Preparation(str(act), "onnx", "plan", [sys.executable, "-c", program], act, lambda: None)
        preparer = Preparer(at.service, work)
        preparer.start()
        until(lambda: preparer.describe()["text"].endswith(": on"), START_S)
        preparer.stop()
        assert preparer.join(START_S)


REAL_TIME = """
import contextlib, os, threading
from sinew.core.machine import step_back

with contextlib.suppress(PermissionError):  # where that is not allowed, no server is in real time either
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
step_back()
threads = []
thread = threading.Thread(target=lambda: threads.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0), *threads, os.getpriority(os.PRIO_PROCESS, 0), flush=True)
"""


def test_what_a_server_in_real_time_prepares_is_not() -> None:
    """It inherits the scheduling of `chrt -r 1 sinew serve`, which beside inferences would be their equal."""
    pipe = subprocess.PIPE
    with processes.Process(  # in a session of its own, whose weight it changes
        [sys.executable, "-c", REAL_TIME], stdin=pipe, stdout=pipe, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(os.SCHED_OTHER), str(os.SCHED_OTHER), "19"]

"""Fixtures: the golden cases (tests/cases.py), and the bundles converted from them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from sinew_client.control import Stopped
from sinew_client.control.pace import Pace
from sinew_client.control.robots import Dry

from sinew.convert import convert
from sinew.core.providers import PACKAGES, entry_points_of
from sinew.policy import load
from tests import processes
from tests.adapters import Adapters, make_adapters
from tests.cases import cases, golden_cases
from tests.proofs import Recorder
from tests.shape_rounding import VARIABLE, RoundedByShape, begin_if_asked
from tools.workers import Workers

# Triton compiles or interprets from its first import on, and torch imports it where it is installed.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Servers of tests stay with the engine that they start with, and leave the machine to the others. What prepares another
# has tests of its own (tests/serve/test_prepare.py).
os.environ["SINEW_SERVE_PREPARE"] = "0"

os.environ.pop(
    "COLUMNS", None
)  # of the terminal that the suite runs in: texts are compared at their own width

with contextlib.suppress(ImportError):  # which not every test needs
    import hypothesis

    hypothesis.settings.register_profile("sinew", deadline=None)  # 200 ms of a busy machine say nothing
    hypothesis.settings.load_profile("sinew")

with contextlib.suppress(ImportError):
    from websockets.sync.client import connect

    connect.__kwdefaults__["open_timeout"] = 60.0  # a machine that stood still for 10 s says nothing either,
    connect.__kwdefaults__["ping_timeout"] = 300.0  # nor for 20 s later


@pytest.fixture(scope="session")
def golden() -> Path:
    """The directory of golden fixtures (reference implementations' inputs and outputs)."""
    return golden_cases()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of this machine, signed by itself, and its key, as files (PEM)."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    names += ["-addext", "basicConstraints=critical,CA:FALSE"]  # Zenoh's TLS rejects an authority as a server
    made = subprocess.run([*command, *names, "-keyout", key, "-out", cert], capture_output=True)
    if made.returncode:
        pytest.skip("openssl is needed to make a certificate")
    return cert, key


@pytest.fixture(scope="session")
def case_bundle(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a golden checkpoint once per run, for all of its workers, with what its case.json says:
    ``case_bundle("evo1-mint")``."""
    directory = of_all_workers(tmp_path_factory) / "bundles"
    directory.mkdir(exist_ok=True)

    def make(name: str) -> Path:
        case, out = cases()[name], directory / f"{name}.gguf"
        with (directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                home = golden / case.home
                convert(home / case.checkpoint, out, name=name, **case.options(home))
        return out

    return make


@pytest.fixture(scope="session")
def adapters(
    case_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Adapters]:
    """Two adapters of a golden case, apart from their base and merged: ``adapters("smolvla-2cam")``."""
    return cache(lambda case: make_adapters(case, case_bundle(case), tmp_path_factory.mktemp(case)))


@pytest.fixture(scope="session")
def smolvla_bundle(case_bundle: Callable[[str], Path]) -> Callable[..., Path]:
    """The same, of one family where a test asks for none in particular."""
    return lambda case="smolvla-2cam": case_bundle(case)


@pytest.fixture(scope="session")
def rolling_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose head takes a time per row, with random weights (tests/stream/rolling.py)."""
    from tests.stream.rolling import write_bundle

    return write_bundle(tmp_path_factory.mktemp("rolls"))


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share; what they make in it they lock."""
    return of_all_workers(tmp_path_factory)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Copies the first SmolVLA bundle with its ONNX graphs beside it into an empty folder: ``exported(folder)`` returns
    the bundle's path. An export takes longer than most tests, so it happens once per run, for all of its workers."""
    home = home_of_export(tmp_path_factory)

    def copy(folder: Path) -> Path:
        export_to(home)
        shutil.copytree(home, folder, dirs_exist_ok=True)
        return folder / "policy.gguf"

    return copy


def home_of_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_all_workers(tmp_path_factory) / "exported"


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run of the suite."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def export_to(home: Path) -> None:
    """Make a folder with that bundle and its graphs, unless it is there; wait for a process that is about it."""
    with (home.parent / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            case, made = golden_cases() / "smolvla-2cam", home.with_name("exporting")
            shutil.rmtree(made, ignore_errors=True)  # of one that was ended
            made.mkdir()
            convert(case / "checkpoint", made / "policy.gguf", vlm=case / "vlm", name=case.name)
            load(made / "policy.gguf", engine="onnx")
            made.rename(home)


@pytest.fixture(scope="module")
def rounded_by_shape() -> Iterator[None]:
    """Products round by the shape of their batch, here and in the processes that the module's tests fork."""
    with pytest.MonkeyPatch.context() as patch, RoundedByShape():
        patch.setenv(VARIABLE, "1")
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers and shards that evaluation starts begin with torch imported (tests/processes.py)."""

    for module in processes.STARTING:
        monkeypatch.setattr(f"{module}.subprocess", processes.FORKED)


@pytest.fixture
def dry_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The robot without hardware ends a run itself, after ten commands, however long the first chunk takes here."""
    act = Dry.act

    def last(self: Dry, row: object) -> None:
        act(self, row)  # type: ignore[arg-type]
        if self.commands >= 10:
            raise Stopped("enough commands")

    monkeypatch.setattr(Dry, "act", last)


class Unhurried(Pace):
    """Puts the next ticks off by what it is late for, so that none is skipped."""

    def _wait(self) -> float:
        wait = super()._wait()
        self._start -= min(wait, 0.0)  # type: ignore[operator]
        return max(wait, 0.0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops run as on a machine that is never late: each control step follows the one before."""
    monkeypatch.setattr("sinew_client.control.loop.Pace", Unhurried)


@pytest.fixture(scope="session")
def pi_bundle(case_bundle: Callable[[str], Path]) -> Callable[[str], Path]:
    return case_bundle


@pytest.fixture(scope="session")
def groot_bundle(case_bundle: Callable[[str], Path]) -> Callable[[str], Path]:
    return case_bundle


@pytest.fixture(scope="session")
def openvla_bundle(case_bundle: Callable[[str], Path]) -> Callable[[str], Path]:
    return case_bundle


@pytest.fixture(scope="session")
def jepa_bundle(case_bundle: Callable[[str], Path]) -> Path:
    return case_bundle("vla-jepa")


@pytest.fixture(scope="session")
def evo1_bundle(case_bundle: Callable[[str], Path]) -> Callable[..., Path]:
    return lambda case="evo1": case_bundle(case)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-rounds", type=int, default=0, help="of tests/serve/test_faults.py, in random order"
    )
    parser.addoption(
        "--order",
        type=int,
        default=0,
        help="seed of a random order: of files, and of the tests in each; 0: as written",
    )
    parser.addoption(
        "--workers", type=int, default=0, help="processes that share the files: tools/workers.py"
    )
    parser.addoption("--proofs", type=Path, help="JSON file for what the passed tests prove: tests/proofs.py")


def pytest_configure(config: pytest.Config) -> None:
    here = Path(__file__).parent
    for package, (_, folder) in PACKAGES.items():
        if (here / folder).is_dir() and entry_points_of(package) is None:
            raise pytest.UsageError(
                f"{package} is not installed in this environment: run make env, or without the network"
                f" {sys.executable} -m uv pip install --offline --no-deps --no-build-isolation -e . -e ./{folder}"
            )
    if path := config.getoption("--proofs"):
        config.pluginmanager.register(Recorder(path))
    if count := config.getoption("--workers"):
        config.pluginmanager.register(Workers(count), "workers")
    gc.disable()  # until the tests begin: collecting makes half a million objects and hardly any garbage


@pytest.hookimpl(tryfirst=True)  # before -k is asked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle by ``--order``; the tests of a file stay together, as what they share is made once. Those that ask for
    exported graphs answer to ``-k onnx``, whatever they are called.

    Workers take the folders' files in turn: those of some compute and those of others wait for servers, which
    costs least where the workers do both at once.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if "exported" in getattr(item, "fixturenames", ()):
            item.extra_keyword_matches.add("onnx")
        files.setdefault(item.path, []).append(item)
    paths = sorted(files)
    if seed := config.getoption("--order"):
        rng = random.Random(seed)
        rng.shuffle(paths)
        for path in paths:
            rng.shuffle(files[path])
    elif config.getoption("--workers"):
        folders: dict[Path, list[Path]] = {}
        for path in paths:
            folders.setdefault(path.parent, []).append(path)
        paths.sort(key=lambda path: folders[path.parent].index(path) / len(folders[path.parent]))
    items[:] = [item for path in paths for item in files[path]]


def pytest_collection_finish(session: pytest.Session) -> None:
    workers = session.config.pluginmanager.get_plugin("workers")
    if workers:  # what the first trace of a policy imports, a CPU second: once here, or else in each worker
        with contextlib.suppress(ImportError):
            import torch._dynamo
            import torch.distributed.tensor  # noqa: F401
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # of 10: whole searches, as there is one behind each file
    gc.enable()
    # Two workers would meet at the export, and one of them wait for the other: a third process is about it meanwhile.
    needed = any("exported" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and workers:
        workers.begins.append(begin_export)


def begin_export(config: pytest.Config, number: int) -> None:
    """Have the first worker begin the export that many tests ask for."""
    if number == 0:
        home = home_of_export(config._tmp_path_factory)  # type: ignore[attr-defined]
        program = f"import pathlib; from conftest import export_to; export_to(pathlib.Path({str(home)!r}))"
        command = [sys.executable, "-c", program]
        config.stash[EXPORT] = processes.Process(
            command, cwd=processes.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begin_if_asked()  # in the worker: before it is forked, no thread may run


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Have no later search for garbage look through what a file of tests leaves: libraries, caches of the session."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


EXPORT = pytest.StashKey[processes.Process]()

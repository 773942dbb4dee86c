"""Fixtures and options for all tests of this repository.

The most used fixtures are the golden cases (tests/cases.py) and the bundles that are converted from them. A golden
case is a checkpoint with stored inputs and with the outputs of the reference implementation.
"""

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

# Triton decides at its first import whether it compiles or interprets kernels. torch imports Triton if it is
# installed, so this variable must be set before the import of torch.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A server of a test keeps the engine with which it starts. Without this variable the server would prepare a faster
# engine in the background, which takes CPU time from other tests. tests/serve/test_prepare.py tests the preparation.
os.environ["SINEW_SERVE_PREPARE"] = "0"

os.environ.pop("COLUMNS", None)  # the width of the user's terminal would change the texts that tests compare

with contextlib.suppress(ImportError):  # hypothesis is missing in some environments; only few tests need it
    import hypothesis

    # On a busy machine, an example can take longer than the default deadline of 200 ms. The examples are the same in
    # every run, so that no run fails by chance. With --order they are random, as the order of the tests.
    hypothesis.settings.register_profile("sinew", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("sinew-random", deadline=None)
    hypothesis.settings.load_profile("sinew")

with contextlib.suppress(ImportError):
    from websockets.sync.client import connect

    # a busy machine can pause for more than the default 10 s during the opening
    connect.__kwdefaults__["open_timeout"] = 60.0
    # and for more than the default 20 s between a ping and its answer
    connect.__kwdefaults__["ping_timeout"] = 300.0


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the golden cases, which contain inputs and outputs of the reference implementations."""
    return golden_cases()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed TLS certificate for this machine and its key, as the paths of two PEM files."""
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
    # Zenoh's TLS rejects a server whose certificate is the certificate of an authority
    names += ["-addext", "basicConstraints=critical,CA:FALSE"]
    made = subprocess.run([*command, *names, "-keyout", key, "-out", cert], capture_output=True)
    if made.returncode:
        pytest.skip("this test needs the program openssl, which makes a certificate; install openssl")
    return cert, key


@pytest.fixture(scope="session")
def case_bundle(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that converts the checkpoint of a golden case and returns the path of its bundle.

    For example ``case_bundle("evo1-mint")``. The conversion uses the options in the case's case.json. All workers of
    a test run share the bundle, so each case is converted once.
    """
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
    """A function that makes two LoRA adapters for a golden case: as separate files, and merged into the weights of
    their base.

    For example ``adapters("smolvla-2cam")``.
    """
    return cache(lambda case: make_adapters(case, case_bundle(case), tmp_path_factory.mktemp(case)))


@pytest.fixture(scope="session")
def smolvla_bundle(case_bundle: Callable[[str], Path]) -> Callable[..., Path]:
    """Same as ``case_bundle``, with a SmolVLA case as the default for tests that work with any family."""
    return lambda case="smolvla-2cam": case_bundle(case)


@pytest.fixture(scope="session")
def rolling_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with random weights, whose action head has one solver time for each row of a chunk
    (tests/stream/rolling.py)."""
    from tests.stream.rolling import write_bundle

    return write_bundle(tmp_path_factory.mktemp("rolls"))


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run share. A test must lock each file that it writes there."""
    return of_all_workers(tmp_path_factory)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A function that copies a SmolVLA bundle and its exported ONNX graphs into an empty folder.

    ``exported(folder)`` returns the path of the bundle. An export takes longer than most tests, so it runs once in a
    test run, for all workers.
    """
    home = home_of_export(tmp_path_factory)

    def copy(folder: Path) -> Path:
        export_to(home)
        shutil.copytree(home, folder, dirs_exist_ok=True)
        return folder / "policy.gguf"

    return copy


def home_of_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_all_workers(tmp_path_factory) / "exported"


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def export_to(home: Path) -> None:
    """Make the folder ``home`` with the SmolVLA bundle and its ONNX graphs, unless it exists.

    If another process makes the folder at the same time, wait for that process.
    """
    with (home.parent / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            case, made = golden_cases() / "smolvla-2cam", home.with_name("exporting")
            # a process that was killed during its export leaves this folder
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            convert(case / "checkpoint", made / "policy.gguf", vlm=case / "vlm", name=case.name)
            load(made / "policy.gguf", engine="onnx")
            made.rename(home)


@pytest.fixture(scope="module")
def rounded_by_shape() -> Iterator[None]:
    """Matrix products round by the shape of their batch, in this process and in the processes that the module's tests
    fork (tests/shape_rounding.py)."""
    with pytest.MonkeyPatch.context() as patch, RoundedByShape():
        patch.setenv(VARIABLE, "1")
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers and shards that an evaluation starts are forked from a process that has imported torch
    (tests/processes.py)."""

    for module in processes.STARTING:
        monkeypatch.setattr(f"{module}.subprocess", processes.FORKED)


@pytest.fixture
def dry_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The robot without hardware ends each run after ten commands.

    The length of the run then does not depend on how long the first chunk takes on this machine.
    """
    act = Dry.act

    def last(self: Dry, row: object) -> None:
        act(self, row)  # type: ignore[arg-type]
        if self.commands >= 10:
            raise Stopped("the robot got ten commands")

    monkeypatch.setattr(Dry, "act", last)


class Unhurried(Pace):
    """A pace that delays all next control steps by its lateness, so it skips no step."""

    def _wait(self) -> float:
        wait = super()._wait()
        self._start -= min(wait, 0.0)  # type: ignore[operator]
        return max(wait, 0.0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control loops run as on a machine that is never late: no control step is skipped."""
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
        "--faults-rounds",
        type=int,
        default=0,
        help="number of rounds of tests/serve/test_faults.py, each in a random order",
    )
    parser.addoption(
        "--order",
        type=int,
        default=0,
        help="seed of a random order of the files and of the tests in each file; 0: the written order",
    )
    parser.addoption(
        "--workers", type=int, default=0, help="number of processes that run the tests (tools/workers.py)"
    )
    parser.addoption(
        "--proofs", type=Path, help="JSON file for the claims that the passed tests prove (tests/proofs.py)"
    )


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
    if config.getoption("--order"):
        with contextlib.suppress(NameError):  # without hypothesis
            hypothesis.settings.load_profile("sinew-random")
    # off until the tests begin: the collection of tests makes half a million objects and almost no garbage
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -k, which uses the keywords that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests. Tests of one file stay together, because they share fixtures that are made once per file.

    With ``--order``, the order is random. With ``--workers``, files of the folders alternate: some folders have tests
    that compute, other folders have tests that wait for servers, and the two kinds run well at the same time. Tests
    that need the fixture ``exported`` get the keyword ``onnx``, so ``-k onnx`` selects them.
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
    # The first trace of a policy imports these modules, which takes one CPU second. Import them once here, not in
    # each worker.
    if workers:
        with contextlib.suppress(ImportError):
            import torch._dynamo
            import torch.distributed.tensor  # noqa: F401
    gc.collect()
    gc.freeze()
    # The last number is the count of collections of generation 1 before a full collection. The teardown below already
    # collects after each file, so full collections can be rare.
    gc.set_threshold(700, 10, 50)
    gc.enable()
    # If two workers need the export at the same time, one of them waits. So a separate process exports while the
    # workers begin.
    needed = any("exported" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and workers:
        workers.begins.append(begin_export)


def begin_export(config: pytest.Config, number: int) -> None:
    """Start the export of the ONNX graphs in a separate process, from the first worker."""
    if number == 0:
        home = home_of_export(config._tmp_path_factory)  # type: ignore[attr-defined]
        program = f"import pathlib; from conftest import export_to; export_to(pathlib.Path({str(home)!r}))"
        command = [sys.executable, "-c", program]
        config.stash[EXPORT] = processes.Process(
            command, cwd=processes.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begin_if_asked()  # in each worker: the process that collects the tests must have only one thread when it forks


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude the objects that remain after a file of tests from later garbage collections.

    Such objects are imported libraries and the caches of session fixtures.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


EXPORT = pytest.StashKey[processes.Process]()

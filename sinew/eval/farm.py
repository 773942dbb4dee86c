"""A queue of episodes in a folder, and the processes that play them: shards of this machine, and of others that see it.

    plan.json       what is to be played: task, variants, groups of seeds; written by the run (the head)
    leases/NAME     who plays a group; its time of change is moved on for as long as the process lives
    played/NAME     the episodes of a group, whole: a rename puts it there

What counts is ``played``: a group's name follows from what determines its episodes, so a group that was played twice is
there once. A lease only saves work. It is over when its process is seen to be dead, or when nobody has moved it on for
LEASE_S of the clock of whoever waits for it (no two machines compare their clocks). Then the group is played again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sinew.core import SinewError
from sinew.eval.player import EpisodePlayer, groups, key, one_thread
from sinew.eval.runner import Episode
from sinew.eval.settings import Task, Variant

if TYPE_CHECKING:
    from sinew.eval.hosts import RemoteQueue

logger = logging.getLogger(__name__)

FOLDER = "episodes.farm"  # within the folder of a run, beside the log
PLAN, LEASES, PLAYED, LOGS = "plan.json", "leases", "played", "logs"
FORMAT = 1
LEASE_S = 15.0  # of a plan
BEATS = 5  # signs of life in that time
LOOK_S = 0.05  # between two looks at the queue
DEATHS = 5  # of shards in the same group, or before their first one, until the run gives up
MAX_BYTES = 64 << 20  # of a file that is read here
REFUSED, FAULT = 65, 70  # exit status of a shard that ends with an error for people, and with one of Python's
LINES = 15  # of a shard's last words
HEAD = "head"  # how the names of a run's own shards begin
# Modules that play, here and on the hosts of a cluster
SHARD, CLUSTER = "sinew.eval.farm", "sinew.eval.foreign.cluster"
SAID = "said: "  # how a line of a shard's log begins that is for people
NOTHING = (
    "nothing is played here; expected the folder of a running `sinew eval --shards N --out FOLDER`, or the http://"
    " address of one with --listen"
)


@dataclass(frozen=True, slots=True)
class Job:
    """Seeds of a variant that are played together. name: of its files, the same in every run that plays them."""

    name: str
    variant: int
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, key: str, variant: int, seeds: tuple[int, ...]) -> Job:
        digest = hashlib.sha256(json.dumps([key, seeds]).encode()).hexdigest()[:16]
        return cls(f"{seeds[0]}-{digest}", variant, seeds)


@dataclass(frozen=True)
class FarmPlan:
    """What is to be played. keys: of the variants (:func:`sinew.eval.player.key`). lease_s: seconds without a sign of
    life until a group is played by somebody else."""

    task: Task
    variants: tuple[Variant, ...]
    keys: tuple[str, ...]
    jobs: tuple[Job, ...] = field(repr=False)
    lease_s: float

    @classmethod
    def of(cls, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]]) -> FarmPlan:
        """todo: index of a variant, seed."""
        keys = [key(task, variant) for variant in variants]
        jobs = tuple(
            Job.of(keys[index], index, seeds)
            for index, variant in enumerate(variants)
            for seeds in groups(variant, [seed for which, seed in todo if which == index])
        )
        return cls(task, tuple(variants), tuple(keys), jobs, LEASE_S)

    def write(self, folder: Path) -> None:
        variants = [variant.to_dict() for variant in self.variants]
        jobs = [[job.variant, *job.seeds] for job in self.jobs]
        said = {
            "format": FORMAT,
            "lease_s": self.lease_s,
            "task": self.task.to_dict(),
            "variants": variants,
            "keys": self.keys,
            "jobs": jobs,
        }
        write_whole(folder / PLAN, json.dumps(said).encode())

    @classmethod
    def read(cls, folder: Path) -> FarmPlan:
        """Raises :class:`SinewError` for what is no plan, and FileNotFoundError where there is none."""
        path = folder / PLAN
        try:
            said = json.loads(_bounded(path))
            if said["format"] != FORMAT:
                raise SinewError(
                    f"{path}: expected format {FORMAT}, got {said['format']!r}; use one release of Sinew"
                )
            variants = tuple(map(Variant.from_dict, said["variants"]))
            keys = tuple(map(str, said["keys"]))
            jobs = tuple(Job.of(keys[index], index, tuple(seeds)) for index, *seeds in said["jobs"])
            return cls(Task(**said["task"]), variants, keys, jobs, float(said["lease_s"]))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise SinewError(f"{path}: not a plan of episodes: {error}") from error

    def check(self, index: int) -> None:
        """Raise :class:`SinewError` where a variant's policy is another one in this place."""
        variant = self.variants[index]
        if key(self.task, variant) != self.keys[index]:
            raise SinewError(
                f"{variant.target}: expected the bundle that the run was begun with, got another one here"
            )


class EpisodeQueue:
    """The files of a farm, as one process sees them. worker: its name in leases."""

    def __init__(self, folder: Path, worker: str, lease_s: float = LEASE_S):
        self.folder, self.worker, self.lease_s = folder, worker, lease_s
        self._held: set[str] = set()
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}  # lease -> its state, since when here
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the folders."""
        for name in (LEASES, PLAYED, LOGS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def played(self, job: Job) -> bool:
        return (self.folder / PLAYED / job.name).exists()

    def claim(self, job: Job) -> bool:
        """Take a group that nobody has played or plays; say whether that was so."""
        if self.played(job):
            return False
        lease = self.folder / LEASES / job.name
        try:
            descriptor = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self.worker)
        with self._lock:
            self._held.add(job.name)
        if self.played(job):  # by somebody who gave the lease back in between
            self.give_back(job)
            return False
        return True

    @property
    def goes_on(self) -> bool:
        """Return True until the run has ended."""
        return (self.folder / PLAN).exists()

    @property
    def held(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def adopt(self) -> None:
        """Hold the leases that have this worker's name."""
        for path in (self.folder / LEASES).iterdir():
            with contextlib.suppress(OSError):
                if path.read_text() == self.worker:
                    self._held.add(path.name)

    def take(self, left: list[Job]) -> Job | None:
        """Claim the first group that nobody has played or plays; take it, and those that were played, out of ``left``.
        None where others play all of them: they may die."""
        for job in list(left):
            if self.claim(job):
                left.remove(job)
                return job
            if self.played(job):
                left.remove(job)
        for job in left:
            self.expire(job)
        return None

    def expire(self, job: Job) -> None:
        """End the lease of a group on which nobody has given a sign of life for long enough."""
        state = _state(self.folder / LEASES / job.name)
        if state is None:
            self._seen.pop(job.name, None)
            return
        known = self._seen.get(job.name)
        if known is None or known[0] != state:
            self._seen[job.name] = (state, time.monotonic())
        elif time.monotonic() - known[1] > self.lease_s:
            # Another one may have renewed it just now: then the group is played twice, and is there once.
            (self.folder / LEASES / job.name).unlink(missing_ok=True)
            del self._seen[job.name]

    def store(self, job: Job, key: str, episodes: Sequence[Episode]) -> None:
        """Put the episodes of a group where they count, and give it back."""
        self.put(job, b"".join(line(key, episode) for episode in episodes))

    def put(self, job: Job, lines: bytes) -> None:
        """Do that with episodes that are lines of JSON already."""
        write_whole(self.folder / PLAYED / job.name, lines)
        self.give_back(job)

    def read(self, job: Job, key: str) -> list[Episode] | None:
        """Return the episodes of a group; None where it has not been played. What is not whole (a power cut) is
        removed, and the group is open again."""
        path = self.folder / PLAYED / job.name
        try:
            found = dict(episodes_of(_bounded(path)))
            return [found[key, seed] for seed in job.seeds]
        except FileNotFoundError:
            return None
        except (KeyError, SinewError):
            path.unlink(missing_ok=True)
            return None

    def give_back(self, job: Job) -> None:
        with self._lock:
            self._held.discard(job.name)
        (self.folder / LEASES / job.name).unlink(missing_ok=True)

    def beat(self) -> None:
        """Give a sign of life on every lease that is held."""
        for name in self.held:
            with contextlib.suppress(FileNotFoundError):  # somebody thought that this process was dead
                os.utime(self.folder / LEASES / name)

    def release(self, worker: str) -> list[str]:
        """End the leases of processes that are known to be dead, by the beginning of their names; return the groups."""
        found: list[str] = []
        if not (self.folder / LEASES).is_dir():
            return found
        for path in (self.folder / LEASES).iterdir():
            with contextlib.suppress(OSError):
                if path.read_text().startswith(worker):
                    path.unlink()
                    found.append(path.name)
        return found


def line(key: str, episode: Episode) -> bytes:
    """Return an episode as a line of JSON, as logs and queues have it."""
    return json.dumps({"key": key, **episode.to_dict()}).encode() + b"\n"


def episodes_of(text: str) -> Iterator[tuple[tuple[str, int], Episode]]:
    """Yield (key, seed) and the episode of each line. A line that a kill cut short is left out."""
    for line in text.splitlines():
        try:
            values = json.loads(line)
            key = values.pop("key")
            yield (key, values["seed"]), Episode(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes with every sign of life. A file that is opened is looked up anew on a network file system."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # which a write does not say
        raise


def append(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered log. Raises OSError that names it, also where a full disk takes a part."""
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = file.name
        raise


def _bounded(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise SinewError(f"{path}: expected at most {MAX_BYTES} bytes, got more")
    return data.decode("utf-8", "replace")


# ----------------------------------------------------------------------------- the run


@contextlib.contextmanager
def sole(out: Path, hint: str = "`sinew eval --join {}` helps it") -> Iterator[None]:
    """Hold the folder of a run: one head writes there. Raises :class:`SinewError` while another one does, with a hint.

    A disk that cannot hold anything (some network file systems) is taken at its word.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    held = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SinewError(f"{out}: another run plays here; {hint.format(out)}") from None
        except OSError as error:
            logger.warning("%s: %s, so nothing keeps a second run from this folder", out, error.strerror)
        yield
    finally:
        os.close(held)


def left_over(folder: Path) -> dict[tuple[str, int], Episode]:
    """Return what was played in a queue whose head has died, whole groups and others."""
    found: dict[tuple[str, int], Episode] = {}
    if (folder / PLAYED).is_dir():
        for path in sorted((folder / PLAYED).iterdir()):
            if not path.name.startswith("."):
                found |= dict(episodes_of(_bounded(path)))
    return found


def remove(folder: Path) -> None:
    """Remove a queue with all that is in it; the plan first, which others who play there look for."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def play(
    folder: Path, plan: FarmPlan, shards: int, listen: str | None = None, hosts: str | None = None
) -> Iterator[tuple[int, list[Episode]]]:
    """Play a plan with so many processes, and whoever joins; yield a variant's index and episodes of a group as they
    come.

    folder: of the queue, which stays until it is removed. listen: HOST:PORT where others may ask for a part
    (:mod:`sinew.eval.hosts`). hosts: a Ray cluster that plays instead of this machine
    (:mod:`sinew.eval.foreign.cluster`). Raises :class:`SinewError` with what a shard could not do,
    and where shards die again and again in one group.
    """
    queue = EpisodeQueue(folder, HEAD)
    queue.make()
    queue.release(HEAD)  # of an earlier head, whose shards have ended with it
    plan.write(folder)
    left: dict[str, list[Job]] = {}
    for job in plan.jobs:
        left.setdefault(job.name, []).append(job)
    from sinew.eval.hosts import QueueServer

    server = None if listen is None else QueueServer(folder, plan, listen)
    if server is not None:
        logger.warning("others help with `sinew eval --join %s`", server.address)
    shards = min(shards, len(left))
    if hosts is None:
        crew = Crew(folder, shards, HEAD, folder / LOGS)
    else:
        crew = Crew(folder, 1, HEAD, folder / LOGS, (CLUSTER, hosts, str(shards)))
    try:
        while left:
            alive, begun = crew.tend(), time.monotonic()
            for name in sorted(left.keys() & {path.name for path in os.scandir(folder / PLAYED)}):
                found = queue.read(left[name][0], plan.keys[left[name][0].variant])
                if found is not None:
                    for job in left.pop(name):
                        yield job.variant, found
            if left and not alive:  # what was played could not be read
                crew.start()
            time.sleep(max(LOOK_S, 10 * (time.monotonic() - begun)) if left else 0.0)
    finally:
        crew.close()
        if server is not None:
            server.close()


def join(run: str, shards: int) -> int:
    """Help a run until everything is played; return the episodes that were played here.

    run: its folder, on a disk that both see, or the address that it listens on (http://HOST:PORT), from which the
    bundles come that are not here. Raises :class:`SinewError` where nothing is played, where the plan's
    bundles are others here, and what :func:`play` raises of shards.
    """
    from sinew.eval import hosts

    address = run if run.startswith(hosts.SCHEME) else ""
    folder = Path(run)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    if not address and not (folder / PLAN).is_file():
        raise SinewError(f"{folder}: {NOTHING}")
    with tempfile.TemporaryDirectory(
        prefix="sinew-eval-"
    ) as logs:  # the run may end, and remove its own, at any time
        if address:
            folder = Path(logs) / FOLDER
            EpisodeQueue(folder, "").make()
            hosts.fetch(address, folder)
        name = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', socket.gethostname())[:60]}-{secrets.token_hex(4)}"
        crew = Crew(folder, shards, name, Path(logs), (SHARD, address))
        try:
            while crew.tend():
                time.sleep(LOOK_S)
        except (SinewError, FileNotFoundError):
            if (folder / PLAN).exists():
                raise
        finally:
            crew.close()
    return crew.episodes


class Crew:
    """Processes of this machine that play, each started anew when it dies. how: the module that they run, and its
    arguments behind the folder and a name; SHARD takes the address of the run, where its folder is elsewhere.

    Raises :class:`SinewError` from ``tend`` for what one of them has found to be wrong, and for DEATHS in one group, or
    before the first.
    """

    def __init__(self, folder: Path, count: int, name: str, logs: Path, how: Sequence[str] = (SHARD, "")):
        self.folder, self.name, self._logs, self._how = folder, name, logs, how
        self.episodes = 0  # by processes that have come to their end
        self._queue = EpisodeQueue(folder, name)
        self._begun = 0
        self._deaths = Deaths(folder)
        self._heard: Counter[str] = Counter()  # bytes of each log
        self._shards: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(count):
                self.start()
        except BaseException:
            self.close()
            raise

    def tend(self) -> bool:
        """Look after the processes; say whether any is left. Those that have nothing more to play end."""
        for name, process in list(self._shards.items()):
            code = process.poll()
            self._hear(name)
            if code is None:
                continue
            del self._shards[name]
            _shut(process)
            said = _lines(self._log(name))
            released = self._queue.release(name)
            if code == 0:
                self.episodes += int(said[-1])
            elif code == REFUSED:
                raise SinewError(said[-1])
            elif (
                code == FAULT
            ):  # it would come again; 1 is also how Ray ends a process whose cluster has gone
                raise SinewError("\n".join(["a shard ended with an error:", *said[-LINES:]]))
            else:
                self._died(code, released, said)
        return bool(self._shards)

    def _died(self, code: int, released: Sequence[str], said: Sequence[str]) -> None:
        self._deaths.count(released, f"with exit code {code}", said)
        logger.warning("a shard ended with exit code %d; another one takes over", code)
        self.start()

    def _hear(self, name: str) -> None:
        """Hand on what a shard has said to people since the last look."""
        with self._log(name).open("rb") as log:
            log.seek(self._heard[name])
            whole, end, _ = log.read().rpartition(b"\n")
        self._heard[name] += len(whole + end)
        for text in whole.decode(errors="replace").splitlines():
            if text.startswith(SAID):
                logger.warning("%s", text.removeprefix(SAID))

    def close(self) -> None:
        """End all, also in the middle of an episode."""
        for process in self._shards.values():
            process.kill()
        for name, process in self._shards.items():
            process.wait()
            _shut(process)
            self._queue.release(name)
        self._shards.clear()

    def start(self) -> None:
        """Start one more."""
        self._begun += 1
        name = f"{self.name}-{os.getpid()}-{self._begun}."
        places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
        with self._log(name).open("wb") as log:
            self._shards[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", self._how[0], str(self.folder), name, *self._how[1:]],
                stdin=subprocess.PIPE,  # its end is the end of this process, whatever ended it
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
            )

    def _log(self, name: str) -> Path:
        return self._logs / name


class Deaths:
    """Counts what dies while it plays in ``folder``, by group, and before the first one ("")."""

    def __init__(self, folder: Path):
        self._played, self._deaths = folder / PLAYED, Counter[str]()
        self._progress = 0  # when something had been played last

    def count(self, released: Sequence[str], how: str, said: Sequence[str] = ()) -> None:
        """Count a death. Raises :class:`SinewError` for DEATHS in one group, or DEATHS before a group while nobody
        plays anything; released: the names of groups that it had. said: its last words."""
        progress = self._played.stat().st_mtime_ns
        if progress != self._progress:  # others begin without harm
            self._progress, self._deaths[""] = progress, 0
        self._deaths.update(released or [""])
        worst = max(released or [""], key=self._deaths.__getitem__)
        if self._deaths[worst] >= DEATHS:
            where = f"at seed {worst.partition('-')[0]}" if worst else "before an episode"
            raise SinewError("\n".join([f"a shard died {DEATHS} times {where}, {how}", *said[-LINES:]]))


def _shut(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


# ----------------------------------------------------------------------------- a shard


def work(folder: Path, worker: str, address: str = "") -> int:
    """Play what is open in a queue until nothing is; return how many episodes were played here.

    Whoever has nothing to take waits for those who have: they may die. address: of the run, where ``folder`` has but
    its plan. Raises :class:`SinewError` where there is no plan, and what an episode raises.
    """
    from sinew.eval.hosts import RemoteQueue

    try:
        plan = FarmPlan.read(folder)
    except FileNotFoundError:
        raise SinewError(f"{folder}: {NOTHING}") from None
    queue = (
        RemoteQueue(address, worker, plan.lease_s) if address else EpisodeQueue(folder, worker, plan.lease_s)
    )
    count, checked = 0, set[int]()
    ended = threading.Event()
    beats = threading.Thread(target=beat, args=(queue, ended), daemon=True)
    beats.start()
    player: EpisodePlayer | None = None
    try:
        left = list(plan.jobs)
        while left and queue.goes_on:
            job = queue.take(left)
            if job is None:
                time.sleep(LOOK_S if left and queue.goes_on else 0.0)
                continue
            variant = plan.variants[job.variant]
            if job.variant not in checked and not worker.startswith(HEAD):
                plan.check(job.variant)
                checked.add(job.variant)
            player = player or EpisodePlayer(plan.task)
            with one_thread([variant]):
                episodes = player.play_group(variant, job.seeds)
            queue.store(job, plan.keys[job.variant], episodes)
            count += len(episodes)
    except FileNotFoundError:
        if queue.goes_on:
            raise  # else the run has ended, and its queue is gone
    finally:
        ended.set()
        if player is not None:
            player.close()
    return count


def beat(queue: EpisodeQueue | RemoteQueue, ended: threading.Event) -> None:
    while not ended.wait(queue.lease_s / BEATS):
        queue.beat()


def _end_with_parent() -> None:
    """A killed parent closes nothing but its end of the pipe."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(play: Callable[[], int]) -> int:
    """Play as a shard of the process that started this one; its standard input tells that the parent lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the shards; Ctrl-C reaches them too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sys.stdout.write(f"\n{play()}\n")
    except SinewError as error:
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return REFUSED
    except Exception:  # noqa: BLE001 - the run ends with it
        traceback.print_exc()
        return FAULT
    return 0


if __name__ == "__main__":
    place, *named = sys.argv[1:4]
    sys.exit(main(lambda: work(Path(place), *named)))

"""A queue of episodes in a folder, for the processes that play them: of this machine, and of others that see it.

    plan.json       what is to be played: task, variants, groups of seeds; written by the run (the head)
    leases/NAME     who plays a group; its time of change is moved on for as long as the process lives
    played/NAME     the episodes of a group, whole: a rename puts it there

What counts is ``played``: a group's name follows from what determines its episodes, so a group that was played twice is
there once. A lease only saves work. It is over when its process is seen to be dead, or when nobody has moved it on for
LEASE_S of the clock of whoever waits for it (no two machines compare their clocks). Then the group is played again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinew.core import SinewError
from sinew_client.target import EXPERT, LOCAL, Target
from sinew_client.untrusted import named, open_regular, parse_json, read_bytes, read_text, shown

from sinew_eval.episodes.episode_log import episodes_of, line, write_whole
from sinew_eval.episodes.outside import PolicyFacts, TypedNames, allowed
from sinew_eval.episodes.player import groups, key
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant

FOLDER = "episodes.farm"  # folder of the queue inside the run's folder
PLAN, LEASES, PLAYED, LOGS = "plan.json", "leases", "played", "logs"
FORMAT = 1
LEASE_S = 15.0  # a lease expires after this many seconds without a sign of life
MAX_BYTES = 64 << 20  # largest file that this module reads, in bytes
MAX_VALUES = 1 << 23  # largest number of JSON values in a plan
MAX_SEED = 1 << 63
MAX_LEASE_S = 3600.0
MAX_WORKER = 1024  # longest name of a worker, in bytes
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SeedBatch:
    """Seeds of a variant that are played together. name: of its files, the same in every run that plays them."""

    name: str
    variant: int
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, key: str, variant: int, seeds: tuple[int, ...]) -> SeedBatch:
        digest = hashlib.sha256(json.dumps([key, seeds]).encode()).hexdigest()[:16]
        return cls(f"{seeds[0]}-{digest}", variant, seeds)


@dataclass(frozen=True)
class FarmPlan:
    """What is to be played. keys: of the variants (:func:`sinew_eval.episodes.player.key`). lease_s: seconds without
    a sign of life until a group is played by somebody else."""

    task: Task
    variants: tuple[Variant, ...]
    keys: tuple[str, ...]
    jobs: tuple[SeedBatch, ...] = field(repr=False)
    lease_s: float

    @classmethod
    def of(cls, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]]) -> FarmPlan:
        """todo: index of a variant, seed."""
        keys = [key(task, variant) for variant in variants]
        jobs = tuple(
            SeedBatch.of(keys[index], index, seeds)
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
        """Return the plan in a folder. It opens nothing else.

        Raises:
            SinewError: the file is no plan.
            FileNotFoundError: there is none.
        """
        return cls.parse(read_file(folder / PLAN), folder / PLAN)

    @classmethod
    def parse(cls, data: bytes, source: object) -> FarmPlan:
        """Return the plan in the bytes of its file. source: for messages. Raises :class:`SinewError`."""
        try:
            values = parse_json(data, max_values=MAX_VALUES)
        except ValueError as error:
            raise SinewError(f"{source}: not a plan of episodes: {error}") from error
        with SinewError.at(f"{source}: not a plan of episodes", SinewError):
            return cls._of(values)

    @classmethod
    def _of(cls, values: Any) -> FarmPlan:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            got = values.get("format") if isinstance(values, dict) else values
            raise SinewError(f"expected format {FORMAT}, got {shown(got)}; use one release of Sinew")
        records, keys, jobs, lease_s = (values.get(name) for name in ("variants", "keys", "jobs", "lease_s"))
        if not (isinstance(records, list) and isinstance(keys, list) and len(records) == len(keys)):
            raise SinewError(f"variants, keys: expected two lists of one length, got {shown(keys)}")
        if not all(isinstance(each, str) for each in keys):
            raise SinewError(f"keys: expected texts, got {shown(keys)}")
        if (
            isinstance(lease_s, bool)
            or not isinstance(lease_s, (int, float))
            or not 0 < lease_s <= MAX_LEASE_S
        ):
            raise SinewError(
                f"lease_s: expected more than 0 and at most {MAX_LEASE_S:g}, got {shown(lease_s)}"
            )
        if not isinstance(jobs, list):
            raise SinewError(f"jobs: expected a list, got {shown(jobs)}")
        groups_ = []
        for job in jobs:
            if not (isinstance(job, list) and len(job) > 1 and all(type(each) is int for each in job)):
                raise SinewError(f"jobs: expected a variant and seeds, got {shown(job)}")
            index, *seeds = job
            if not 0 <= index < len(keys) or not all(0 <= seed < MAX_SEED for seed in seeds):
                raise SinewError(f"jobs: expected a variant and seeds from 0, got {shown(job)}")
            groups_.append(SeedBatch.of(keys[index], index, tuple(seeds)))
        variants = tuple(map(Variant.from_dict, records))
        return cls(Task.from_dict(values.get("task")), variants, tuple(keys), tuple(groups_), float(lease_s))

    def local(self, source: object, typed: TypedNames) -> tuple[Task, tuple[Variant, ...]]:
        """Return the task and the variants with the names that were typed here
        (:func:`sinew_eval.episodes.outside.allowed`).

        Raises:
            UntypedNameError: the plan uses a name that is not built in and was not typed.
            SinewError: a key is not one that a run writes.
        """
        task, variants = allowed(source, self.task, self.variants, self.facts(), typed)
        return task, tuple(variants)

    def facts(self) -> list[PolicyFacts]:
        """Return the facts about each variant's policy, from the keys. Raises :class:`SinewError`."""
        return [_facts(variant, text) for variant, text in zip(self.variants, self.keys, strict=True)]

    def check(self, index: int, variant: Variant | None = None) -> None:
        """Raise :class:`SinewError` where the policy here is another one than the run's.

        Args:
            index: of a variant.
            variant: as it is played here; the plan's own if absent.
        """
        recorded = self.variants[index]
        here = variant or recorded
        if key(self.task, here) != self.keys[index]:
            raise SinewError(
                f"{named(here.target)}: this bundle differs from the one that the run began with"
            )


def _facts(variant: Variant, text: str) -> PolicyFacts:
    try:
        about = parse_json(text)
    except ValueError as error:
        raise SinewError(f"keys: {error}") from None
    edge = about.get("edge_adapter", "") if isinstance(about, dict) else None
    target = about.get("target") if isinstance(about, dict) else None
    if edge is None or (edge and not (isinstance(edge, str) and SHA256.fullmatch(edge))):
        raise SinewError(f"keys: expected an object with the SHA-256 of its files, got {shown(text)}")
    if Target.parse(variant.target).kind != LOCAL:
        return PolicyFacts("expert" if variant.target == EXPERT else "server", "", edge)
    if not isinstance(target, str) or not SHA256.fullmatch(target):
        raise SinewError(f"keys: expected the SHA-256 of {named(variant.target)}, got {shown(target)}")
    return PolicyFacts("bundle", target, edge)


class EpisodeQueue:
    """The files of a farm, as one process sees them. worker: its name in leases."""

    def __init__(self, folder: Path, worker: str, lease_s: float = LEASE_S):
        self.folder, self.worker, self.lease_s = folder, worker, lease_s
        self._held: set[str] = set()
        # Lease -> (state of its file, local time in seconds since when the state is unchanged).
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the folders."""
        for name in (LEASES, PLAYED, LOGS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def played(self, job: SeedBatch) -> bool:
        return (self.folder / PLAYED / job.name).exists()

    def claim(self, job: SeedBatch) -> bool:
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
        # Check again: another worker may have stored the group and returned its lease in the meantime.
        if self.played(job):
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
            with contextlib.suppress(OSError, ValueError):
                if read_text(path, MAX_WORKER) == self.worker:
                    self._held.add(path.name)

    def take(self, left: list[SeedBatch]) -> SeedBatch | None:
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

    def expire(self, job: SeedBatch) -> None:
        """End the lease of a group on which nobody has given a sign of life for long enough."""
        state = _state(self.folder / LEASES / job.name)
        if state is None:
            self._seen.pop(job.name, None)
            return
        known = self._seen.get(job.name)
        if known is None or known[0] != state:
            self._seen[job.name] = (state, time.monotonic())
        elif time.monotonic() - known[1] > self.lease_s:
            # The owner may have renewed the lease just now. Then two workers play the group, and one result is stored.
            (self.folder / LEASES / job.name).unlink(missing_ok=True)
            del self._seen[job.name]

    def store(self, job: SeedBatch, key: str, episodes: Sequence[Episode]) -> None:
        """Put the episodes of a group where they count, and give it back."""
        self.put(job, b"".join(line(key, episode) for episode in episodes))

    def put(self, job: SeedBatch, lines: bytes) -> None:
        """Do that with episodes that are lines of JSON already."""
        write_whole(self.folder / PLAYED / job.name, lines)
        self.give_back(job)

    def read(self, job: SeedBatch, key: str) -> list[Episode] | None:
        """Return the episodes of a group; None where it has not been played. What is not whole (a power cut) is
        removed, and the group is open again."""
        path = self.folder / PLAYED / job.name
        try:
            found = dict(episodes_of(read_file(path)))
            return [found[key, seed] for seed in job.seeds]
        except FileNotFoundError:
            return None
        except (KeyError, OSError, SinewError):
            path.unlink(missing_ok=True)
            return None

    def give_back(self, job: SeedBatch) -> None:
        with self._lock:
            self._held.discard(job.name)
        (self.folder / LEASES / job.name).unlink(missing_ok=True)

    def beat(self) -> None:
        """Give a sign of life on every lease that is held."""
        for name in self.held:
            # The lease is missing if another process assumed that this process was dead.
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / LEASES / name)

    def release(self, worker: str) -> list[str]:
        """End the leases of processes that are known to be dead, by the beginning of their names; return the groups."""
        found: list[str] = []
        if not (self.folder / LEASES).is_dir():
            return found
        for path in (self.folder / LEASES).iterdir():
            with contextlib.suppress(OSError, ValueError):
                if read_text(path, MAX_WORKER).startswith(worker):
                    path.unlink()
                    found.append(path.name)
        return found


def _state(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with every sign of life. Opening a file refreshes its state on a network file
    system.
    """
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
    # OSError is also raised if the path is not a regular file.
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_file(path: Path) -> bytes:
    """Return the bytes of a file of a run. Raises :class:`SinewError` for a file that is too large, and OSError."""
    with SinewError.at(path, ValueError):
        return read_bytes(path, MAX_BYTES)

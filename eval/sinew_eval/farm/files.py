"""A queue of episodes in a folder, for worker processes on this machine and on machines that share the folder.

The run that started the queue is called its head. A worker plays groups of episodes from the queue. Files:

    plan.json       task, variants and groups of seeds, written by the head
    leases/NAME     name of the worker that plays a group; the worker renews the file's time while it lives
    played/NAME     the finished episodes of a group, written atomically

Only ``played`` counts. The name of a group follows from everything that determines its episodes, so a group that was
played twice is counted once. A lease only saves work. It ends when its worker is known to be dead, or when nobody has
renewed it for LEASE_S seconds on the clock of a waiting worker. Clocks of two machines are never compared. Then
another worker plays the group.
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
    """A group of episodes: seeds of one variant that are played together.

    Attributes:
        name: Name of the group's files, which is equal in every run that plays the group.
        variant: Index of the variant.
        seeds: Seeds of the episodes.
    """

    name: str
    variant: int
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, key: str, variant: int, seeds: tuple[int, ...]) -> SeedBatch:
        digest = hashlib.sha256(json.dumps([key, seeds]).encode()).hexdigest()[:16]
        return cls(f"{seeds[0]}-{digest}", variant, seeds)


@dataclass(frozen=True)
class FarmPlan:
    """The task, the variants and the groups of a distributed run.

    Attributes:
        task: The task.
        variants: The variants.
        keys: Key of each variant (:func:`sinew_eval.episodes.player.key`).
        jobs: The groups.
        lease_s: A lease expires after this many seconds without a sign of life.
    """

    task: Task
    variants: tuple[Variant, ...]
    keys: tuple[str, ...]
    jobs: tuple[SeedBatch, ...] = field(repr=False)
    lease_s: float

    @classmethod
    def of(cls, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]]) -> FarmPlan:
        """Build a plan.

        Args:
            task: The task.
            variants: The variants.
            todo: Pairs of the index of a variant and a seed.
        """
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
        record = {
            "format": FORMAT,
            "lease_s": self.lease_s,
            "task": self.task.to_dict(),
            "variants": variants,
            "keys": self.keys,
            "jobs": jobs,
        }
        write_whole(folder / PLAN, json.dumps(record).encode())

    @classmethod
    def read(cls, folder: Path) -> FarmPlan:
        """Read the plan in a folder. No other file is opened.

        Args:
            folder: The folder.

        Returns:
            The plan.

        Raises:
            SinewError: The file is not a plan.
            FileNotFoundError: There is no file.
        """
        return cls.parse(read_file(folder / PLAN), folder / PLAN)

    @classmethod
    def parse(cls, data: bytes, source: object) -> FarmPlan:
        """Read a plan from the content of its file.

        Args:
            data: The content.
            source: Name of the file or address, for messages.

        Returns:
            The plan.

        Raises:
            SinewError: The content is not a plan.
        """
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
            raise SinewError(
                f"expected format {FORMAT}, got {shown(got)}; use the same release of Sinew on all machines"
            )
        records, keys, jobs, lease_s = (values.get(name) for name in ("variants", "keys", "jobs", "lease_s"))
        if not (isinstance(records, list) and isinstance(keys, list) and len(records) == len(keys)):
            raise SinewError(f"variants, keys: expected two lists with the same length, got {shown(keys)}")
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
                raise SinewError(f"jobs: expected the index of a variant and seeds, got {shown(job)}")
            index, *seeds = job
            if not 0 <= index < len(keys) or not all(0 <= seed < MAX_SEED for seed in seeds):
                raise SinewError(f"jobs: expected the index of a variant and seeds from 0, got {shown(job)}")
            groups_.append(SeedBatch.of(keys[index], index, tuple(seeds)))
        variants = tuple(map(Variant.from_dict, records))
        return cls(Task.from_dict(values.get("task")), variants, tuple(keys), tuple(groups_), float(lease_s))

    def local(self, source: object, typed: TypedNames) -> tuple[Task, tuple[Variant, ...]]:
        """Return the task and the variants with the names that were typed on this machine
        (:func:`sinew_eval.episodes.outside.allowed`).

        Args:
            source: Name of the file or address, for messages.
            typed: The typed names.

        Returns:
            The task and the variants to play.

        Raises:
            UntypedNameError: The plan uses a name that is neither built in nor typed.
            SinewError: A key does not have the form that a run writes.
        """
        task, variants = allowed(source, self.task, self.variants, self.facts(), typed)
        return task, tuple(variants)

    def facts(self) -> list[PolicyFacts]:
        """Read the facts about each variant's policy from the keys in the plan.

        Raises:
            SinewError: A key is invalid.
        """
        return [_facts(variant, text) for variant, text in zip(self.variants, self.keys, strict=True)]

    def check(self, index: int, variant: Variant | None = None) -> None:
        """Check that a policy on this machine is equal to the policy of the run.

        Args:
            index: Index of the variant.
            variant: Variant with the bundle of this machine. None for the variant in the plan.

        Raises:
            SinewError: The policies differ.
        """
        recorded = self.variants[index]
        here = variant or recorded
        if key(self.task, here) != self.keys[index]:
            raise SinewError(
                f"{named(here.target)}: this bundle differs from the run's bundle; pass the same file as the run"
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
    """The queue in a folder, as one worker uses it.

    Args:
        folder: Folder of the queue.
        worker: Name of the worker in its leases.
        lease_s: A lease expires after this many seconds without a sign of life.
    """

    def __init__(self, folder: Path, worker: str, lease_s: float = LEASE_S):
        self.folder, self.worker, self.lease_s = folder, worker, lease_s
        self._held: set[str] = set()
        # Key: a lease. Value: (state of its file, local time in seconds at which this state was first seen).
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Create the folders of the episode queue."""
        for name in (LEASES, PLAYED, LOGS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def played(self, job: SeedBatch) -> bool:
        return (self.folder / PLAYED / job.name).exists()

    def claim(self, job: SeedBatch) -> bool:
        """Take the lease of a group of episodes that no worker has played or is playing. Returns True on success."""
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
        """Return True until the evaluation run has ended."""
        return (self.folder / PLAN).exists()

    @property
    def held(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def adopt(self) -> None:
        """Take over the lease files that already contain this worker's name."""
        for path in (self.folder / LEASES).iterdir():
            with contextlib.suppress(OSError, ValueError):
                if read_text(path, MAX_WORKER) == self.worker:
                    self._held.add(path.name)

    def take(self, open_groups: list[SeedBatch]) -> SeedBatch | None:
        """Take the lease of the first free group.

        Args:
            open_groups: Groups that may be open. The claimed group and all played groups are removed from this list.

        Returns:
            The group. None if other workers are playing all open groups. Their leases may expire.
        """
        for job in list(open_groups):
            if self.claim(job):
                open_groups.remove(job)
                return job
            if self.played(job):
                open_groups.remove(job)
        for job in open_groups:
            self.expire(job)
        return None

    def expire(self, job: SeedBatch) -> None:
        """End the lease of a group of episodes if its worker has given no sign of life for ``lease_s`` seconds."""
        state = _state(self.folder / LEASES / job.name)
        if state is None:
            self._seen.pop(job.name, None)
            return
        last_state = self._seen.get(job.name)
        if last_state is None or last_state[0] != state:
            self._seen[job.name] = (state, time.monotonic())
        elif time.monotonic() - last_state[1] > self.lease_s:
            # The owner may have renewed the lease just now. Then two workers play the group, and one result is stored.
            (self.folder / LEASES / job.name).unlink(missing_ok=True)
            del self._seen[job.name]

    def store(self, job: SeedBatch, key: str, episodes: Sequence[Episode]) -> None:
        """Store the episodes of a group, and return its lease.

        Args:
            job: The group.
            key: Key of the variant.
            episodes: The episodes of the group.
        """
        self.put(job, b"".join(line(key, episode) for episode in episodes))

    def put(self, job: SeedBatch, lines: bytes) -> None:
        """Store the episodes of a group, and return its lease.

        Args:
            job: The group.
            lines: The episodes as lines of JSON.
        """
        write_whole(self.folder / PLAYED / job.name, lines)
        self.give_back(job)

    def read(self, job: SeedBatch, key: str) -> list[Episode] | None:
        """Read the episodes of a group. An incomplete file, for example after a power cut, is removed, and the group
        is open again.

        Args:
            job: The group.
            key: Key of the variant.

        Returns:
            The episodes. None if the group has not been played.
        """
        path = self.folder / PLAYED / job.name
        try:
            episodes = dict(episodes_of(read_file(path)))
            return [episodes[key, seed] for seed in job.seeds]
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
        """Renew all lease files of this worker, as a sign of life."""
        for name in self.held:
            # The lease is missing if another process assumed that this process was dead.
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / LEASES / name)

    def release(self, worker: str) -> list[str]:
        """End the leases of dead processes.

        Args:
            worker: Beginning of the workers' names.

        Returns:
            Names of the groups that are open again.
        """
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
    """Return a value that changes whenever a worker renews its lease file. Opening the file refreshes the value on
    network disks.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
    # OSError is also raised if the path is not a regular file.
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def read_file(path: Path) -> bytes:
    """Read a file of a run.

    Raises:
        SinewError: The file is too large.
        OSError: The file cannot be read.
    """
    with SinewError.at(path, ValueError):
        return read_bytes(path, MAX_BYTES)

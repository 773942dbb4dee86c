"""Start and supervise the worker processes (shards) that play a queue of episodes (``files.py``)."""

from __future__ import annotations

import contextlib
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
from pathlib import Path

from sinew.core import SinewError
from sinew_client.addresses import split_scheme
from sinew_client.auth import KEY_VARIABLE
from sinew_client.untrusted import open_regular, read_bytes

from sinew_eval.episodes.episode_log import episodes_of
from sinew_eval.episodes.outside import TypedNames, say_names
from sinew_eval.episodes.player import EpisodePlayer, one_thread
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.farm.files import FOLDER, LOGS, PLAN, PLAYED, EpisodeQueue, FarmPlan, SeedBatch, read_file
from sinew_eval.farm.hosts import QueueServer, RemoteQueue, fetch

logger = logging.getLogger(__name__)

MAX_LOG = 1 << 28  # largest log of a shard that is read, in bytes
BEATS = 5  # number of heartbeats that a shard sends during one lease
LOOK_S = 0.05  # seconds between two checks of the queue
# The run ends when this many shards died in the same group of episodes, or before their first group.
DEATHS = 5
# Exit status of a shard that ends with a SinewError, and with any other exception.
REFUSED, FAULT = 65, 70
LINES = 15  # log lines shown when a shard fails
HEAD = "head"  # prefix of the names of the run's own shards
# SHARD is the module that plays episodes on this machine. CLUSTER is the module that plays them on the hosts of a
# cluster.
SHARD, CLUSTER = "sinew_eval.farm.shards", "sinew_eval.foreign.cluster"
LOG_PREFIX = "said: "  # prefix of the lines in a shard's log that the run prints for the user
NOTHING = (
    "no run is active here; pass the folder of a running `sinew eval --shards N --out FOLDER`, or the http:// address"
    " of a run with --listen"
)


def left_over(folder: Path) -> dict[tuple[str, int], Episode]:
    """Return the played episodes in a queue whose main process (head) has died."""
    found: dict[tuple[str, int], Episode] = {}
    if (folder / PLAYED).is_dir():
        for path in sorted((folder / PLAYED).iterdir()):
            if not path.name.startswith(".") and path.is_file():
                found |= dict(episodes_of(read_file(path)))
    return found


def remove(folder: Path) -> None:
    """Remove a queue. The plan is removed first, because other workers stop when it is missing."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def play(
    folder: Path,
    task: Task,
    variants: Sequence[Variant],
    todo: Sequence[tuple[int, int]],
    shards: int,
    listen: str | None = None,
    hosts: str | None = None,
) -> Iterator[tuple[int, list[Episode]]]:
    """Play episodes with worker processes, and with other processes that join.

    Args:
        folder: Folder of the queue, which stays until :func:`remove`.
        task: The task.
        variants: The variants.
        todo: Pairs of the index of a variant and a seed.
        shards: Number of worker processes.
        listen: HOST:PORT where other hosts can join (:mod:`sinew_eval.farm.hosts`). None for none.
        hosts: Address of a Ray cluster that plays instead of this machine (:mod:`sinew_eval.foreign.cluster`).

    Yields:
        The index of a variant and the episodes of a group, as soon as they are finished.

    Raises:
        SinewError: A worker failed with an error, or workers died repeatedly in the same group.
    """
    queue, plan = EpisodeQueue(folder, HEAD), FarmPlan.of(task, variants, todo)
    queue.make()
    # Release the leases of an earlier process of the run. Its shards have ended with it.
    queue.release(HEAD)
    plan.write(folder)
    left: dict[str, list[SeedBatch]] = {}
    for job in plan.jobs:
        left.setdefault(job.name, []).append(job)
    server = None if listen is None else QueueServer(folder, plan, listen)
    if server is not None:
        key = f"{KEY_VARIABLE}={server.drawn} " if server.drawn else ""
        logger.warning("to help from another machine, run `%ssinew eval --join %s`", key, server.address)
    shards = min(shards, len(left))
    names = TypedNames.of(task, variants).to_json()
    if hosts is None:
        crew = WorkerPool(folder, shards, HEAD, folder / LOGS, (SHARD, names, ""))
    else:
        crew = WorkerPool(folder, 1, HEAD, folder / LOGS, (CLUSTER, names, hosts, str(shards)))
    try:
        while left:
            alive, begun = crew.tend(), time.monotonic()
            for name in sorted(left.keys() & {path.name for path in os.scandir(folder / PLAYED)}):
                episodes = queue.read(left[name][0], plan.keys[left[name][0].variant])
                if episodes is not None:
                    for job in left.pop(name):
                        yield job.variant, episodes
            # If a played group could not be read, it must be played again.
            if left and not alive:
                crew.start()
            time.sleep(max(LOOK_S, 10 * (time.monotonic() - begun)) if left else 0.0)
    finally:
        crew.close()
        if server is not None:
            server.close()


def join(run: str, shards: int, typed: TypedNames | None = None) -> int:
    """Help a run until everything is played.

    Args:
        run: Folder of the run on a disk that both machines share, or the http:// address on which it listens. An
            address also sends bundles.
        shards: Number of worker processes.
        typed: Names that were typed on this machine. The plan comes from another machine and may use no others.

    Returns:
        Number of episodes that were played here.

    Raises:
        UntypedNameError: The plan uses a name that is neither built in nor typed.
        SinewError: No run is active there, a bundle differs from the run's bundle, or a worker failed as in
            :func:`play`.
    """
    typed = typed or TypedNames()
    address = run if split_scheme(run)[0] == "http" else ""
    folder = Path(run)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    if not address and not (folder / PLAN).is_file():
        raise SinewError(f"{folder}: {NOTHING}")
    # The logs need a folder of their own, because the run may end and remove its folder at any time.
    with tempfile.TemporaryDirectory(prefix="sinew-eval-") as logs:
        if address:
            folder = Path(logs) / FOLDER
            EpisodeQueue(folder, "").make()
            typed = fetch(address, folder, typed)
        plan = FarmPlan.read(folder)
        task, variants = plan.local(run, typed)
        say_names(run, task, variants, sum(len(job.seeds) for job in plan.jobs))
        name = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', socket.gethostname())[:60]}-{secrets.token_hex(4)}"
        crew = WorkerPool(folder, shards, name, Path(logs), (SHARD, typed.to_json(), address))
        try:
            while crew.tend():
                time.sleep(LOOK_S)
        except (SinewError, FileNotFoundError):
            if (folder / PLAN).exists():
                raise
        finally:
            crew.close()
    return crew.episodes


class WorkerPool:
    """Worker processes on this machine. A process that dies is replaced.

    Args:
        folder: Folder of the queue.
        count: Number of processes.
        name: Beginning of the processes' names.
        logs: Folder for the logs of the processes.
        how: Module that the processes run, and its further arguments: the typed names, and for SHARD the address of
            the run or "".

    Attributes:
        episodes: Episodes that were played by processes that have ended.
    """

    def __init__(self, folder: Path, count: int, name: str, logs: Path, how: Sequence[str]):
        self.folder, self.name, self._logs, self._how = folder, name, logs, how
        # Number of episodes that were played by processes which have ended.
        self.episodes = 0
        self._queue = EpisodeQueue(folder, name)
        self._begun = 0
        self._deaths = Deaths(folder)
        # Key: name of a log. Value: number of bytes that were read so far.
        self._heard: Counter[str] = Counter()
        self._shards: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(count):
                self.start()
        except BaseException:
            self.close()
            raise

    def tend(self) -> bool:
        """Supervise the processes once. A process ends when it finds no more episodes to play.

        Returns:
            True while a process is running.

        Raises:
            SinewError: A process reported an error, or DEATHS processes died in the same group or before their first
                group.
        """
        for name, process in list(self._shards.items()):
            code = process.poll()
            self._hear(name)
            if code is None:
                continue
            del self._shards[name]
            _shut(process)
            log_lines = _lines(self._log(name))
            released = self._queue.release(name)
            if code == 0:
                self.episodes += int(log_lines[-1])
            elif code == REFUSED:
                raise SinewError(log_lines[-1])
            elif code == FAULT:
                # Do not start the shard again: the same error would occur. FAULT differs from 1, because Ray ends a
                # process with status 1 when its cluster has gone.
                raise SinewError("\n".join(["a shard ended with an error:", *log_lines[-LINES:]]))
            else:
                self._died(code, released, log_lines)
        return bool(self._shards)

    def _died(self, code: int, released: Sequence[str], log_lines: Sequence[str]) -> None:
        self._deaths.count(released, f"with exit code {code}", log_lines)
        logger.warning("a shard ended with exit code %d; a new shard continues", code)
        self.start()

    def _hear(self, name: str) -> None:
        """Print the messages for the user that a worker has written to its log since the last call."""
        with open_regular(self._log(name)) as log:
            log.seek(self._heard[name])
            whole, end, _ = log.read().rpartition(b"\n")
        self._heard[name] += len(whole + end)
        for text in whole.decode(errors="replace").splitlines():
            if text.startswith(LOG_PREFIX):
                logger.warning("%s", text.removeprefix(LOG_PREFIX))

    def close(self) -> None:
        """Kill all worker processes, also in the middle of an episode."""
        for process in self._shards.values():
            process.kill()
        for name, process in self._shards.items():
            process.wait()
            _shut(process)
            self._queue.release(name)
        self._shards.clear()

    def start(self) -> None:
        """Start one more worker process, which takes groups of episodes from the queue."""
        self._begun += 1
        name = f"{self.name}-{os.getpid()}-{self._begun}."
        places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
        with self._log(name).open("wb") as log:
            self._shards[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", self._how[0], str(self.folder), name, *self._how[1:]],
                # The pipe closes when this process ends for any reason, which ends the shard.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
            )

    def _log(self, name: str) -> Path:
        return self._logs / name


class Deaths:
    """Counts how many worker processes died, for each group of episodes that they were playing. Deaths before the first
    group of a process are counted under the name "".

    Args:
        folder: Folder of the queue.
    """

    def __init__(self, folder: Path):
        self._played, self._deaths = folder / PLAYED, Counter[str]()
        # The time at which the folder of played groups last changed, in nanoseconds.
        self._progress = 0

    def count(self, released: Sequence[str], how: str, log_lines: Sequence[str] = ()) -> None:
        """Count a death.

        Args:
            released: Names of the groups that the worker was playing.
            how: How the worker died, for the message.
            log_lines: Last lines of the worker's log.

        Raises:
            SinewError: DEATHS workers died in the same group, or before a first group without any progress in
                between.
        """
        progress = self._played.stat().st_mtime_ns
        # Some shard has finished a group since the last death, so earlier deaths before a first group do not count.
        if progress != self._progress:
            self._progress, self._deaths[""] = progress, 0
        self._deaths.update(released or [""])
        worst = max(released or [""], key=self._deaths.__getitem__)
        if self._deaths[worst] >= DEATHS:
            where = f"at seed {worst.partition('-')[0]}" if worst else "before an episode"
            raise SinewError("\n".join([f"a shard died {DEATHS} times {where}, {how}", *log_lines[-LINES:]]))


def _shut(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _lines(log: Path) -> list[str]:
    return read_bytes(log, MAX_LOG).decode(errors="replace").splitlines()


def work(folder: Path, worker: str, typed: TypedNames, address: str = "") -> int:
    """Play groups of a queue until all are played. A worker without a free group waits, because another worker may
    die.

    Args:
        folder: Folder of the queue.
        worker: Name of this process in the queue.
        typed: Names that were typed on this machine's command line. The plan may use no others.
        address: Address of the run if ``folder`` contains only its plan. "" for a local queue.

    Returns:
        Number of episodes that were played here.

    Raises:
        SinewError: There is no plan, the plan uses a name that was not typed, or an episode failed.
    """
    try:
        plan = FarmPlan.read(folder)
    except FileNotFoundError:
        raise SinewError(f"{folder}: {NOTHING}") from None
    task, variants = plan.local(folder / PLAN, typed)
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
            variant = variants[job.variant]
            if job.variant not in checked and not worker.startswith(HEAD):
                plan.check(job.variant, variant)
                checked.add(job.variant)
            player = player or EpisodePlayer(task)
            with one_thread([variant]):
                episodes = player.play_group(variant, job.seeds)
            queue.store(job, plan.keys[job.variant], episodes)
            count += len(episodes)
    except FileNotFoundError:
        # If the run has ended, its queue is gone, and a missing file is not an error.
        if queue.goes_on:
            raise
    finally:
        ended.set()
        if player is not None:
            player.close()
    return count


def beat(queue: EpisodeQueue | RemoteQueue, ended: threading.Event) -> None:
    while not ended.wait(queue.lease_s / BEATS):
        queue.beat()


def _end_with_parent() -> None:
    """End this process when its parent has ended, which closes the other end of the pipe."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(play: Callable[[], int]) -> int:
    """Play episodes as the worker of a parent process. The worker ends when its standard input is closed.

    Args:
        play: Plays the episodes, and returns their number.

    Returns:
        The exit status.
    """
    # Ignore Ctrl-C, which reaches the shards too. The parent process stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sys.stdout.write(f"\n{play()}\n")
    except SinewError as error:
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return REFUSED
    except Exception:  # noqa: BLE001 - the run gets the error, and ends
        traceback.print_exc()
        return FAULT
    return 0


if __name__ == "__main__":
    place, name, names, where = sys.argv[1:5]
    sys.exit(main(lambda: work(Path(place), name, TypedNames.from_json(names), where)))

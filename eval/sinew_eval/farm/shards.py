"""The processes that play a queue of episodes (``files.py``), and whoever looks after them."""

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
from sinew_client.auth import KEY_VARIABLE
from sinew_client.untrusted import open_regular, read_bytes

from sinew_eval.episodes.episode_log import episodes_of
from sinew_eval.episodes.outside import TypedNames, say_names
from sinew_eval.episodes.player import EpisodePlayer, one_thread
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.farm.files import FOLDER, LOGS, PLAN, PLAYED, EpisodeQueue, FarmPlan, SeedBatch, read_file
from sinew_eval.farm.hosts import SCHEME, QueueServer, RemoteQueue, fetch

logger = logging.getLogger(__name__)

MAX_LOG = 1 << 28  # largest log of a shard that is read, in bytes
BEATS = 5  # heartbeats in the time of one lease
LOOK_S = 0.05  # seconds between two checks of the queue
# The run ends when this many shards died in the same group, or before their first group.
DEATHS = 5
# Exit status of a shard that ends with a SinewError, and with any other exception.
REFUSED, FAULT = 65, 70
LINES = 15  # log lines shown when a shard fails
HEAD = "head"  # prefix of the names of the run's own shards
# Modules that play episodes, on this machine and on the hosts of a cluster.
SHARD, CLUSTER = "sinew_eval.farm.shards", "sinew_eval.foreign.cluster"
SAID = "said: "  # prefix of the lines in a shard's log that the run prints for the user
NOTHING = (
    "nothing is played here; expected the folder of a running `sinew eval --shards N --out FOLDER`, or the http://"
    " address of one with --listen"
)


def left_over(folder: Path) -> dict[tuple[str, int], Episode]:
    """Return the played episodes of a queue whose head has died, from whole groups and others."""
    found: dict[tuple[str, int], Episode] = {}
    if (folder / PLAYED).is_dir():
        for path in sorted((folder / PLAYED).iterdir()):
            if not path.name.startswith(".") and path.is_file():
                found |= dict(episodes_of(read_file(path)))
    return found


def remove(folder: Path) -> None:
    """Remove a queue with all that is in it; the plan first, which others who play there look for."""
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
    """Play ``todo``, indices of variants and seeds, with so many processes, and whoever joins; yield a variant's index
    and episodes of a group as they come.

    folder: of the queue, which stays until it is removed. listen: HOST:PORT where others may ask for a part
    (:mod:`sinew_eval.farm.hosts`). hosts: a Ray cluster that plays instead of this machine
    (:mod:`sinew_eval.foreign.cluster`). Raises :class:`SinewError` with what a shard could not do,
    and where shards die again and again in one group.
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
        logger.warning("others help with `%ssinew eval --join %s`", key, server.address)
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
                found = queue.read(left[name][0], plan.keys[left[name][0].variant])
                if found is not None:
                    for job in left.pop(name):
                        yield job.variant, found
            # A played group could not be read, so it has to be played again.
            if left and not alive:
                crew.start()
            time.sleep(max(LOOK_S, 10 * (time.monotonic() - begun)) if left else 0.0)
    finally:
        crew.close()
        if server is not None:
            server.close()


def join(run: str, shards: int, typed: TypedNames | None = None) -> int:
    """Help a run until everything is played; return the episodes that were played here.

    Args:
        run: its folder, on a disk that both machines have, or the address that it listens on (http://HOST:PORT), which
            also sends bundles.
        shards: processes.
        typed: the names that were typed here; the plan is data from another machine.

    Raises:
        UntypedNameError: the plan names something that is not built in and was not typed.
        SinewError: nothing is played there, the bundles here are others, or what :func:`play` raises of shards.
    """
    typed = typed or TypedNames()
    address = run if run.startswith(SCHEME) else ""
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
    """Processes of this machine that play, each started anew when it dies. how: the module that they run, and its
    arguments behind the folder and a name: the typed names, and for SHARD the address of a run elsewhere.

    Raises :class:`SinewError` from ``tend`` for what one of them has found to be wrong, and for DEATHS in one group, or
    before the first.
    """

    def __init__(self, folder: Path, count: int, name: str, logs: Path, how: Sequence[str]):
        self.folder, self.name, self._logs, self._how = folder, name, logs, how
        # Episodes that were played by processes that have ended.
        self.episodes = 0
        self._queue = EpisodeQueue(folder, name)
        self._begun = 0
        self._deaths = Deaths(folder)
        # Name of a log -> number of bytes that were read so far.
        self._heard: Counter[str] = Counter()
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
            elif code == FAULT:
                # Do not start the shard again: the same error would occur. FAULT differs from 1, because Ray ends a
                # process with status 1 when its cluster has gone.
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
        with open_regular(self._log(name)) as log:
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
                # The pipe closes when this process ends for any reason, which ends the shard.
                stdin=subprocess.PIPE,
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
        # Time of the last change in the folder of played groups, in nanoseconds.
        self._progress = 0

    def count(self, released: Sequence[str], how: str, said: Sequence[str] = ()) -> None:
        """Count a death. Raises :class:`SinewError` for DEATHS in one group, or DEATHS before a group while nobody
        plays anything; released: the names of groups that it had. said: its last words."""
        progress = self._played.stat().st_mtime_ns
        # Some shard has finished a group since the last death, so earlier deaths before a first group do not count.
        if progress != self._progress:
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
    return read_bytes(log, MAX_LOG).decode(errors="replace").splitlines()


def work(folder: Path, worker: str, typed: TypedNames, address: str = "") -> int:
    """Play what is open in a queue until nothing is; return how many episodes were played here.

    Whoever has nothing to take waits for those who have: they may die.

    Args:
        folder: of the queue.
        worker: the name of this process in it.
        typed: the names that were typed on this machine's command line; the plan may use no others.
        address: of the run, where ``folder`` has only its plan.

    Raises:
        SinewError: there is no plan, it names what was not typed, or an episode cannot be played.
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
    """A killed parent closes nothing but its end of the pipe."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(play: Callable[[], int]) -> int:
    """Play as a shard of the process that started this one; its standard input tells that the parent lives."""
    # Ignore Ctrl-C, which reaches the shards too. The parent process stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    place, name, names, where = sys.argv[1:5]
    sys.exit(main(lambda: work(Path(place), name, TypedNames.from_json(names), where)))

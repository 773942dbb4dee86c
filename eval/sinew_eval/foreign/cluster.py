"""Play episodes on the hosts of a Ray cluster. One worker of the run passes its groups on to Ray actors. Needs ray.

The queue stays in its folder (:mod:`sinew_eval.farm.files`). This process has the leases of all groups on the
cluster, and stores the results. Therefore a group is open again if an actor, a host, the cluster or this process is
lost. Ray itself starts the actors, chooses their hosts and reports their deaths.

A host uses a bundle at the same path if it has the same content. Otherwise it uses the bundle in its store, whose
name is the SHA-256. A host without the bundle gets it once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.core import SinewError, machine
from sinew.core.extras import MissingPackageError
from sinew_client.addresses import host_and_port, split_scheme
from sinew_client.target import Target
from sinew_client.untrusted import open_regular

from sinew_eval.episodes import episode_log
from sinew_eval.episodes.outside import TypedNames
from sinew_eval.episodes.player import EpisodePlayer, one_thread
from sinew_eval.farm import files, shards
from sinew_eval.farm.files import EpisodeQueue, FarmPlan, SeedBatch

logger = logging.getLogger("sinew_eval.cluster")

# HERE means the cluster of this machine or of RAY_ADDRESS. CLIENT is the prefix of the address of another cluster.
HERE = "ray"  # the cluster of this machine; the address of another cluster has this scheme
# A run that has played some episodes waits AWAY_S seconds for its cluster, and tries again every AGAIN_S seconds.
AWAY_S, AGAIN_S = 60.0, 2.0
ANSWER_S = 5.0  # an address without an answer after this many seconds counts as dead
PLACE_S = 15.0  # a warning is logged if actors wait this many seconds for free CPUs
# Exit status if the cluster has gone. The next process waits for the cluster.
GONE = 75
# An actor has this many groups at the same time, so that the next group is sent while the actor plays the present one.
AHEAD = 2
BLOCK = 16 << 20  # bytes of a bundle in one message


def check(hosts: str) -> None:
    """Check that a text is the address of a Ray cluster.

    Raises:
        SinewError: The text is not such an address.
    """
    scheme, place = split_scheme(hosts)
    if hosts != HERE and not (scheme == HERE and host_and_port(place)[1]):
        raise SinewError(
            f"--hosts: expected {HERE} (the cluster of this machine, or of RAY_ADDRESS) or {HERE}://HOST:PORT,"
            f" got {hosts!r}"
        )


def connected(hosts: str, patience_s: float) -> Any:
    """Connect to a Ray cluster.

    Args:
        hosts: Address of the cluster.
        patience_s: How long to wait for the cluster, in seconds.

    Returns:
        The module ray, connected.

    Raises:
        SinewError: No cluster answered in time.
    """
    check(hosts)
    # Turn off Ray's usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackageError("--hosts", "ray", f" ({error})") from None
    begun, warned = time.monotonic(), False
    ray_address = os.environ.get("RAY_ADDRESS", "") if hosts == HERE else hosts
    where = f"--hosts {hosts}" + (f" (RAY_ADDRESS={ray_address})" if ray_address and hosts == HERE else "")
    while True:
        try:
            # Try the address first, because Ray itself waits for minutes if nothing listens at the address.
            if ":" in ray_address:
                place = host_and_port(split_scheme(ray_address)[1])
                socket.create_connection(place, ANSWER_S).close()
            ray.init(
                address="auto" if hosts == HERE else hosts, log_to_driver=False, logging_level=logging.ERROR
            )
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            if time.monotonic() - begun >= patience_s:
                raise SinewError(
                    f"{where}: no Ray cluster answers ({why}); start one with `ray start --head`"
                ) from None
            if not warned:
                logger.warning("%s: no cluster answers; waiting up to %g s (%s)", hosts, patience_s, why)
            warned = True
            with suppress(Exception):
                ray.shutdown()
            time.sleep(AGAIN_S)
        else:
            return ray


class RemoteWorker:
    """Plays groups on a host of the cluster. A received bundle stays in the cache for the next run.

    Args:
        plan: Content of the plan's file.

    Raises:
        SinewError: This host lacks something that the task needs.
    """

    def __init__(self, plan: bytes):
        with tempfile.TemporaryDirectory(prefix="sinew-eval-") as place:
            (Path(place) / files.PLAN).write_bytes(plan)
            self.plan = FarmPlan.read(Path(place))
        # Check the facts now, because they give the names of files in the store.
        self.plan.facts()
        self.variants = list(self.plan.variants)
        self.player = EpisodePlayer(self.plan.task)

    def missing(self) -> list[int]:
        """Find the bundles that this host lacks. If it lacks none, open the first policy.

        Returns:
            Index of one variant for each missing bundle.
        """
        found: dict[Path, int] = {}
        for index, variant in enumerate(self.plan.variants):
            try:
                self.plan.check(index)
            except (SinewError, OSError):
                if Target.parse(variant.target).remote:
                    raise
                if not (stored := self._kept(index)).is_file():
                    found.setdefault(stored, index)
                    continue
                self.variants[index] = replace(variant, target=str(stored))
                replace(self.plan, variants=tuple(self.variants)).check(index)
        if not found:
            with one_thread(self.variants[:1]):
                self.player.ready(self.variants[0])
        return [*found.values()]

    def receive(self, index: int, block: bytes, place: int, last: bool) -> None:
        """Append a block to a bundle.

        Args:
            index: Index of the variant.
            block: The block.
            place: Position of the block in the bundle, in bytes.
            last: True for the last block.

        Raises:
            SinewError: The complete bundle has another SHA-256.
        """
        target_file = self._kept(index)
        part = target_file.with_name(f".{target_file.name}.{os.getpid()}")
        target_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("ab" if place else "wb") as file:
                file.write(block)
            if not last:
                return
            with open_regular(part) as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
            if got != target_file.stem:
                target = self.plan.variants[index].target
                raise SinewError(f"{target}: expected SHA-256 {target_file.stem}, got {got}")
            part.replace(target_file)
        # Remove the incomplete file. The cause can be a full disk, for example.
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def play(self, index: int, seeds: tuple[int, ...]) -> bytes:
        """Play a group.

        Args:
            index: Index of the variant.
            seeds: Seeds of the group.

        Returns:
            The episodes, one line of JSON each.
        """
        variant = self.variants[index]
        with one_thread([variant]):
            episodes = self.player.play_group(variant, seeds)
        return b"".join(episode_log.line(self.plan.keys[index], episode) for episode in episodes)

    def _kept(self, index: int) -> Path:
        return machine.cache_folder("bundles") / f"{self.plan.facts()[index].sha256}.gguf"


def _actor() -> Any:
    """Return the class of an actor. Ray sends the class itself, so that a host without Sinew can report that it is
    missing.
    """

    class Episodes:
        def open(self, plan: bytes, release: str) -> dict[str, Any]:
            import ray

            place = ray.get_runtime_context().get_node_id()
            host = {"node": place, "name": f"{ray.util.get_node_ip_address()} ({socket.gethostname()})"}
            try:
                import sinew
            except ImportError as error:
                return {**host, "problem": f"expected Sinew {release} on this host, got {error}"}
            if sinew.__version__ != release:
                return {**host, "problem": f"expected Sinew {release} on this host, got {sinew.__version__}"}
            try:
                from sinew_eval.foreign.cluster import RemoteWorker as Player

                self.guest = getattr(self, "guest", None) or Player(plan)
                return {**host, "missing": self.guest.missing()}
            except Exception as error:  # noqa: BLE001 - after any error, this host plays no episodes
                return {**host, "problem": str(error) or type(error).__name__}

        def receive(self, *block: Any) -> str:
            try:
                self.guest.receive(*block)
            except Exception as error:  # noqa: BLE001 - the run gets the error, and ends
                return f"{type(error).__name__}: {error}"
            return ""

        def play(self, index: int, seeds: tuple[int, ...]) -> tuple[bytes, str]:
            from sinew.core import SinewError as Told

            try:
                return self.guest.play(index, seeds), ""
            except Told as error:
                return b"", str(error)
            except Exception:  # noqa: BLE001 - the run gets the error, and ends
                import traceback

                return b"", "\n".join(
                    ["a shard ended with an error:", *traceback.format_exc().splitlines()[-15:]]
                )

    return Episodes


class RefusedError(Exception):
    """A host of the Ray cluster cannot play episodes. The message states the reason."""


Life = Generator[Any, Any, None]


class RemoteWorkerSlot:
    """A Ray actor with its pending request, and the groups of episodes that it plays. This process has the leases of
    these groups.
    """

    def __init__(self, actor: Any):
        self.actor, self.node, self.name = actor, "", ""
        self.life: Life
        # Reference (in Ray) to the next answer. It is None while there is no request.
        self.ref: Any = None
        self.jobs: deque[tuple[SeedBatch, Any]] = deque()


class Hosts:
    """The actors of a run on a cluster.

    Args:
        ray: The module ray, connected.
        folder: Folder of the queue.
        queue: The queue.
        count: Number of actors.
        typed: Names that were typed on this machine's command line.
    """

    def __init__(self, ray: Any, folder: Path, queue: EpisodeQueue, count: int, typed: TypedNames):
        import sinew

        self._ray, self._queue, self._release = ray, queue, sinew.__version__
        self._text, self._plan = files.read_file(folder / files.PLAN), FarmPlan.read(folder)
        self._plan.local(folder / files.PLAN, typed)
        self._left = list(self._plan.jobs)
        self._deaths = shards.Deaths(folder)
        self._refused: dict[str, str] = {}  # key: node id; value: the reason why the node cannot play
        # Key: node id. Value: the actor that receives the bundles for the whole node.
        self._fed: dict[str, RemoteWorkerSlot] = {}
        self._class, self._begun, self._told = _actor(), time.monotonic(), False
        self.episodes = 0
        self._seats = [self._seat() for _ in range(count)]

    def play(self) -> None:
        """Play until all groups are played, or until the run has ended.

        Raises:
            SinewError: An episode failed, actors died repeatedly in the same group, or no host can play the task.
        """
        for seat in self._seats:
            self._step(seat, None)
        while self._queue.goes_on and (self._left or any(seat.jobs for seat in self._seats)):
            refs = {seat.ref: seat for seat in self._seats if seat.ref is not None}
            ready = self._ray.wait(list(refs), timeout=shards.LOOK_S)[0] if refs else []
            if not refs:
                time.sleep(shards.LOOK_S)
            for seat in [seat for seat in self._seats if seat.ref is None]:
                self._step(seat, None)
            for ref in ready:
                self._step(refs[ref], ref)
            self._look()

    def _seat(self) -> RemoteWorkerSlot:
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        if any(variant.device.startswith("cuda") for variant in self._plan.variants):
            options["num_gpus"] = 1
        if self._refused:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(self._refused)})"}
        seat = RemoteWorkerSlot(self._ray.remote(self._class).options(**options).remote())
        seat.life = self._live(seat)
        return seat

    def _step(self, seat: RemoteWorkerSlot, ref: Any) -> None:
        """Pass the answer of a Ray actor to the generator of its requests (:meth:`_live`), and send the next request.

        Args:
            seat: The actor.
            ref: Ray's reference to the answer.
        """
        try:
            answer = None if ref is None else self._ray.get(ref)
            seat.ref = next(seat.life) if ref is None else seat.life.send(answer)
        except RefusedError as error:
            if seat.node not in self._refused:
                self._refused[seat.node] = f"{seat.name}: {error}"
                logger.warning("%s cannot play: %s", seat.name, " ".join(str(error).split()))
            self._again(seat)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            why = " ".join(str(error).split())
            where = f"on {seat.name or 'the cluster'} ({why[:200]})"
            self._deaths.count([seat.jobs[0][0].name] if seat.jobs else [], where)
            logger.warning(
                "a worker process (shard) on %s died; a new one continues", seat.name or "the cluster"
            )
            self._again(seat)

    def _again(self, seat: RemoteWorkerSlot) -> None:
        """Release the groups of episodes of a Ray actor, and replace the actor."""
        for job, _ in reversed(seat.jobs):
            self._queue.give_back(job)
            self._left.insert(0, job)
        if self._fed.get(seat.node) is seat:
            del self._fed[seat.node]
        # The actor may be dead, or alive but out of reach.
        with suppress(Exception):
            self._ray.kill(seat.actor)
        if self._refused:
            there = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            if there and not set(there) - set(self._refused):
                raise SinewError("--hosts: no host can play: " + "; ".join(self._refused.values()))
        self._seats[self._seats.index(seat)] = self._seat()
        self._begun = time.monotonic()

    def _live(self, seat: RemoteWorkerSlot) -> Life:
        """Yield the requests to a Ray actor, one after the other, and receive the answers."""
        while True:
            answer = yield seat.actor.open.remote(self._text, self._release)
            seat.node, seat.name = answer["node"], answer["name"]
            if "problem" in answer:
                raise RefusedError(answer["problem"])
            if not answer["missing"]:
                break
            if seat.node in self._fed:
                while seat.node in self._fed:
                    yield None
                continue
            self._fed[seat.node] = seat
            for index in answer["missing"]:
                yield from self._send(seat, index)
            del self._fed[seat.node]
        while True:
            while len(seat.jobs) < (AHEAD if len(self._left) > len(self._seats) else 1):
                if (job := self._queue.take(self._left)) is None:
                    break
                seat.jobs.append((job, seat.actor.play.remote(job.variant, job.seeds)))
            if not seat.jobs:
                yield None
                continue
            job, ref = seat.jobs[0]
            lines, problem = yield ref
            if problem:
                raise SinewError(f"{seat.name}: {problem}")
            self._queue.put(job, lines)
            seat.jobs.popleft()
            self.episodes += len(job.seeds)

    def _send(self, seat: RemoteWorkerSlot, index: int) -> Life:
        path = Path(self._plan.variants[index].target)
        if not path.is_file():
            raise RefusedError(
                f"{path}: expected this folder on the host too, because only bundles of one file are sent; copy it"
                " there"
            )
        size, place = path.stat().st_size, 0
        logger.warning("%s: receives %s, %.1f MB", seat.name, path.name, size / 1e6)
        with open_regular(path) as file:
            while block := file.read(BLOCK):
                last = place + len(block) >= size
                if problem := (yield seat.actor.receive.remote(index, block, place, last)):
                    raise RefusedError(problem)
                place += len(block)

    def _look(self) -> None:
        """Print once that Ray actors wait for free CPUs."""
        waiting = sum(not seat.node for seat in self._seats)
        if waiting and not self._told and time.monotonic() - self._begun > PLACE_S:
            there = self._ray.cluster_resources().get("CPU", 0)
            text = "%s of %s shards wait for a free CPU; the cluster has %g CPUs"
            logger.warning(text, waiting, len(self._seats), there)
            self._told = True


def work(folder: Path, worker: str, typed: TypedNames, hosts: str, count: int) -> int:
    """Play groups of a queue on a cluster until all are played.

    Args:
        folder: Folder of the queue.
        worker: Name of this process in the queue.
        typed: Names of policies, environments and adapters that were typed on the command line of the run. The plan may
            use no others.
        hosts: Address of the cluster.
        count: Number of actors.

    Returns:
        Number of episodes that were played.
    """
    played = any((folder / files.PLAYED).iterdir())
    ray = connected(hosts, AWAY_S if played else 0.0)
    queue = EpisodeQueue(folder, worker)
    ended = threading.Event()
    threading.Thread(target=shards.beat, args=(queue, ended), daemon=True).start()
    try:
        there = Hosts(ray, folder, queue, count, typed)
        there.play()
    except (ConnectionError, ray.exceptions.RayError) as error:
        logger.warning(
            "%s: the connection to the cluster is lost (%s); run the same command to continue",
            hosts,
            " ".join(str(error).split())[:200],
        )
        raise SystemExit(GONE) from None
    finally:
        ended.set()
        with suppress(Exception):
            ray.shutdown()
    return there.episodes


if __name__ == "__main__":
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{shards.LOG_PREFIX}%(message)s"))
    logging.getLogger("sinew").addHandler(handler)
    place, name, names, where, number = sys.argv[1:6]
    typed = TypedNames.from_json(names)
    sys.exit(shards.main(lambda: work(Path(place), name, typed, where, int(number))))

"""Starts a server: finds the policy or the recording, opens the ports, loads the policy, and answers requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import sinew
from sinew.core import machine
from sinew.serve.batching import LARGEST
from sinew.serve.limits import ServingLimits
from sinew.serve.process import GRACE_S, Process
from sinew.serve.renewed import Keys

if TYPE_CHECKING:
    from sinew.policy import Policy
    from sinew.records.background_writer import BackgroundWriter
    from sinew.serve.deploy import PolicyHost
    from sinew.serve.prepare import Preparation
    from sinew.serve.replay import Replay
    from sinew.serve.scheduler import Scheduler
    from sinew.serve.service import Service
    from sinew.serve.swap import Swapper

logger = logging.getLogger(__name__)

# Bytes of memory of the interpreter and torch, the same number as in `sinew perf fit`.
RUNTIME_BYTES = 250_000_000


def loader(
    bundle: Path,
    options: dict[str, Any],
    threads: int | None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[], Policy]:
    """Check the flags and the bundle before ports are opened and torch is imported, and prepare the loading of the
    policy.

    Args:
        bundle: The bundle.
        options: Options of ``sinew.load``.
        threads: Number of threads; None chooses it.
        adapters: Name of an adapter -> its file.

    Returns:
        A function that loads the policy.
    """
    from sinew.assemble import open_adapters, shown_source
    from sinew.bundle.rename import rename_cameras
    from sinew.engine.backend import choose, chosen_by, exported_graphs
    from sinew.policy import open_bundle

    opened = open_bundle(bundle)
    rename_cameras(opened.manifest.spec, options["rename"])
    beside = open_adapters(opened, adapters)
    choose(opened, threads=threads, adapters=beside, **chosen_by(options))
    # Keep only the path. A reference to the open bundle would keep its memory map after the policy is replaced.
    path = exported_graphs(opened) or opened.path

    def load() -> Policy:
        logger.info("loading %s", path)
        policy = sinew.load(path, threads=threads, adapters=adapters, **options)
        policy.identity["source"] = shown_source(str(bundle))
        return policy

    return load


def swapper(
    service: Service,
    host: PolicyHost,
    bundle: Path,
    options: dict[str, Any],
    threads: int | None,
    bounds: ServingLimits,
    memory_gib: float | None,
    need: Callable[[str, dict[str, Any], int | None, int], tuple[int, int]],
) -> Swapper:
    """Create the object that loads, replaces and unloads policies of a running server, with the server's flags.

    Args:
        service: The service of the server.
        host: The resources that all policies of the server share.
        bundle: The bundle of the first policy.
        options: Options of ``sinew.load``.
        threads: Number of compute threads; None for the default.
        bounds: Limits of each policy's scheduler.
        memory_gib: Memory for all policies, GiB; None for the default of ``memory_budget``.
        need: Function that computes the bytes of a policy's weights and of its activations. Its arguments are the
            source of the policy, ``options``, ``threads`` and the number of requests in a batch.
    """
    from sinew.engine.backend import BACKENDS, choose, chosen_by
    from sinew.policy import open_bundle
    from sinew.serve.deploy import deploy
    from sinew.serve.swap import MemoryNeed, Swapper

    def opened(source: str) -> Policy:
        load = loader(Path(source), options, threads)
        choice = choose(open_bundle(source), threads=threads, **chosen_by(options))
        # Load the other engines at normal priority: they start their own threads during loading, and these threads
        # would keep the low priority.
        if BACKENDS[choice.engine].starts_threads or choice.options.device != "cpu":
            return load()

        def tried() -> Policy:
            policy = load()
            # Read the weights and compile at low priority now, so that the warm-up is short.
            policy.infer(policy.dummy_observation())
            return policy

        return machine.beside_others(tried)

    batch = LARGEST if bounds.max_batch == "auto" else bounds.max_batch
    return Swapper(
        service,
        lambda source: deploy(opened(source), bounds, host),
        lambda source: machine.beside_others(lambda: MemoryNeed(*need(source, options, threads, batch))),
        str(bundle),
        *memory_budget(memory_gib, options),
    )


def memory_budget(gib: float | None, options: dict[str, Any]) -> tuple[int | None, str]:
    """Return the memory budget of all policies in bytes, and its origin. None means that there is no limit.

    Without ``gib``, the budget is the memory of the machine or the cgroup without the memory of the runtime. A GPU
    has no budget, because its allocator limits the memory.
    """
    if gib is not None:
        return int(gib * 2**30), f"--memory-gib {gib:g}"
    if str(options["device"]).startswith("cuda") or (options["device"] == "auto" and machine.may_have_cuda()):
        return None, "a GPU"
    return machine.memory()[0] - RUNTIME_BYTES, "this machine's memory"


def recorders(record: Path | None, viewer: Path | str | None) -> dict[str, BackgroundWriter]:
    """Create the objects that write requests and answers to files or to a viewer.

    Args:
        record: Folder for records; None writes no records.
        viewer: File or address of a Rerun viewer; None sends nothing to Rerun.

    Returns:
        Name of the writer in the service ("recorder" or "rerun") -> writer.
    """
    from sinew.records.recorder import Recorder
    from sinew.records.viewers.rerun_records import RerunRecorder

    writers: dict[str, BackgroundWriter] = {}
    if viewer is not None:
        writers["rerun"] = RerunRecorder(viewer)
    if record is not None:
        writers["recorder"] = Recorder(record)
    return writers


@dataclass(frozen=True)
class ServerLaunch:
    """The start and the life of one server, from loading its first policy to its end.

    Attributes:
        make: Loads the policy, or opens the recording.
        bounds: Limits of the policies and their requests.
        stuck_s: Time limit of a request, seconds (:class:`Supervisor`).
        api_key: The server's keys.
        deadline_ms: Deadline of requests that state none.
        recorders: Writers of requests and answers (:func:`recorders`).
        change: Creates the object that loads, replaces and unloads policies; None if policies cannot change.
        policies: Name -> source of further policies.
        contexts: Forms of the contexts (inputs of the action head) that the server also answers with, for split
            inference (``serve/contexts.py``).
        faster: Returns the preparation of a faster engine that is possible within a number of bytes.
        answering: Returns a context manager that is entered while requests are answered.
    """

    make: Callable[[], Policy | Replay]
    bounds: ServingLimits
    stuck_s: float
    api_key: Keys = ""
    deadline_ms: float | None = None
    recorders: Mapping[str, BackgroundWriter] = field(default_factory=dict)
    change: Callable[[Service, PolicyHost], Swapper] | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    contexts: Sequence[str] = ()
    faster: Callable[[int | None], Preparation | None] | None = None
    answering: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, process: Process, ready: Callable[[Policy | Replay], Callable[[], None]]) -> bool:
        """Load the policy, answer requests until the process gets a signal to stop, and close the recorders.

        Args:
            process: The process, with its signals.
            ready: Function that is called with the warm policy. Its result is a function that is called when the
                protocols accept requests.

        Returns:
            False if a thread still computes.
        """
        try:
            return self._run(process, ready)
        finally:
            for recorder in self.recorders.values():
                recorder.close()

    def _run(self, process: Process, ready: Callable[[Policy | Replay], Callable[[], None]]) -> bool:
        # Weak references, so that this set does not keep a replaced policy in memory.
        begun: WeakSet[Scheduler] = WeakSet()
        try:
            from sinew.serve.deploy import PolicyHost, deploy
            from sinew.serve.service import Service

            host = PolicyHost(self.stuck_s, begun)
            logger.info("listening on %s", ", ".join(wire.address for wire in process.wires))
            policy = self.make()
            for recorder in self.recorders.values():
                recorder.describe(policy.spec)
            deployment = deploy(policy, self.bounds, host)
            service = Service(
                deployment, api_key=self.api_key, deadline_ms=self.deadline_ms, **self.recorders
            )
            if self.change is not None:
                service.swapper = self.change(service, host)
                for name, source in self.policies.items():
                    service.swapper.load(name, source)
            if self.contexts:
                from sinew.serve.contexts import add

                add(service, self.contexts, host)
            compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
            if self.faster is not None and service.swapper is not None:
                from sinew.serve.prepare import Preparer, compiling_frames

                compiling = compiling_frames
                if (work := self.faster(service.swapper.budget)) is not None:
                    service.preparing = Preparer(service, work)
            then = ready(policy)
            # From here on only the service refers to the policy, so that a hot-swap frees its memory.
            del policy, deployment
            with self.answering(), compiling():
                return process.run(service, then)
        except KeyboardInterrupt:
            logger.info("stopped before the server was ready")
            for scheduler in begun:
                scheduler.stop()
            return all(scheduler.join(GRACE_S) for scheduler in begun)

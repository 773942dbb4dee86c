"""Open what ``sinew serve`` runs: a policy or a recording, found before ports are taken, loaded after."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sinew import __version__, machine
from sinew.cli.infer import running
from sinew.cli.options import RUNS, Cameras, Runs
from sinew.core import SinewError
from sinew.serve.supervise import Supervisor
from sinew.sources import resolve

if TYPE_CHECKING:
    from sinew.policy import Policy
    from sinew.serve.replay import Replay
    from sinew.serve.scheduler import Scheduler
    from sinew.serve.service import Service
    from sinew.serve.swap import Standing, Swapper

logger = logging.getLogger(__name__)

CHOSEN = ("engine", "device", "dtype", "providers", "ignore_recipe")  # what decides how a bundle is run
Change = (
    Callable[["Service", Supervisor], "Swapper"] | None
)  # makes what exchanges the policy; None: nothing does


class Limits(Protocol):
    """The flags of ``sinew serve`` that a policy's scheduler and safety take."""

    @property
    def queue(self) -> int: ...
    @property
    def max_batch(self) -> int | Literal["auto"]: ...
    @property
    def action_limits(self) -> str: ...
    @property
    def action_margin(self) -> float: ...
    @property
    def state_margin(self) -> float: ...
    @property
    def max_age(self) -> float | None: ...
    @property
    def memory_gib(self) -> float | None: ...


def loader(bundle: Path | None, options: dict[str, Any], threads: int | None) -> Callable[[], Policy]:
    """Find mistakes in flags and file before ports are taken and torch is imported; what is returned loads the policy.
    ``options``: of ``sinew.load``."""
    from sinew.bundle.rename import rename_cameras
    from sinew.engine.choose import choose
    from sinew.policy import open_bundle

    if bundle is None:
        raise SinewError("expected a bundle, or --replay RECORDS")
    found = resolve(bundle)
    opened = open_bundle(found)
    rename_cameras(opened.manifest.spec, options["rename"])
    choose(opened, **{name: options[name] for name in CHOSEN})

    def load() -> Policy:
        import sinew

        logger.info("loading %s", found)
        return sinew.load(found, threads=threads, **options)

    return load


def replayer(
    records: Path, bundle: Path | None, cameras: Cameras, runs: Runs, latency: bool
) -> Callable[[], Replay]:
    """Read the recording; imports no torch."""
    from sinew.bundle.rename import rename_cameras
    from sinew.policy import open_bundle
    from sinew.serve.replay import Replay

    if runs != RUNS:
        raise SinewError(
            "--replay: engine, provider, device and dtype compute, and a replay computes nothing"
        )
    if bundle is None and cameras.rename:
        raise SinewError("--rename: expected the bundle beside --replay, which knows its cameras")
    manifest = None
    if bundle is not None:
        manifest = open_bundle(bundle).manifest
        manifest = replaced(manifest, spec=rename_cameras(manifest.spec, cameras.keywords()["rename"]))
    made = Replay(records, manifest, latency=latency, allow_missing_cameras=cameras.allow_missing_cameras)
    return lambda: made


def stand(
    policy: Policy | Replay, bounds: Limits, supervisor: Supervisor, begun: list[Scheduler] | None = None
) -> Standing:
    """Return the policy behind a scheduler, warm, with what a server says of it.

    begun: gets the scheduler before it is started, for whoever interrupts that.
    """
    from sinew.policy import Policy
    from sinew.serve.safety import Safety
    from sinew.serve.scheduler import Scheduler
    from sinew.serve.swap import Standing

    scheduler = Scheduler(
        policy,
        queue_size=bounds.queue,
        supervisor=supervisor,
        max_batch=None if bounds.max_batch == "auto" else bounds.max_batch,
    )
    if begun is not None:
        begun.append(scheduler)
    supervisor.watch(policy.problem)  # of the files whose weights are mapped
    try:
        scheduler.start()
    except BaseException:
        scheduler.stop()
        scheduler.unwatch()
        raise
    logger.info("%s", running(policy))
    about = describe(policy)
    if scheduler.batcher is not None:
        about["server"] |= scheduler.batcher.describe()
        logger.info("batches of up to %d (%s)", scheduler.batcher.limit, scheduler.batcher.reason)
    safety = None  # what a recording holds was sent to a robot before
    if isinstance(policy, Policy):
        logger.info("computing with %d threads (%s)", policy.threads, policy.threads_reason)
        limits = bounds.action_limits, bounds.action_margin, bounds.state_margin, bounds.max_age
        safety = Safety(policy.processor, *limits)
        about["policy"]["action"]["limits"] = safety.limits()
    return Standing(scheduler, about, safety)


def changer(
    bundle: Path, options: dict[str, Any], threads: int | None, bounds: Limits
) -> Callable[[Service, Supervisor], Swapper]:
    """Return what lets a server exchange its policy for another, run with the same flags."""

    def make(service: Service, supervisor: Supervisor) -> Swapper:
        from sinew.serve.swap import Swapper

        def open_source(source: str) -> Standing:
            return stand(loader(Path(source), options, threads)(), bounds, supervisor)

        budget = None if bounds.memory_gib is None else int(bounds.memory_gib * 2**30)
        return Swapper(service, open_source, resolve, str(bundle), budget)

    return make


def describe(policy: Policy | Replay) -> dict[str, Any]:
    """Return the server's metadata: itself and the policy, ready for JSON."""
    return {
        "server": {
            "name": "sinew",
            "version": __version__,
            **policy.describe(),
            "threads": policy.threads,
            "threads_reason": policy.threads_reason,
            "hardware": machine.cpu_model(),
        },
        "policy": policy.spec.to_dict(),
        "padded_state_dim": policy.padded_state_dim,
        "padded_action_dim": policy.padded_action_dim,
    }

"""Start a scheduler for a policy, warm the policy up, and describe it for clients."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from sinew_client.control.defaults import unlike_chunking

from sinew import __version__
from sinew.bundle import statistics
from sinew.core import machine
from sinew.policy import Policy
from sinew.processing import Processor
from sinew.processing.limits import unit_sizes
from sinew.processing.safety import Safety
from sinew.serve.device_lock import DeviceLock
from sinew.serve.limits import ServingLimits
from sinew.serve.policies import Deployment
from sinew.serve.replay import Replay
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from sinew.serve.supervise import STUCK_S, Supervisor

logger = logging.getLogger(__name__)


class PolicyHost:
    """The resources that all policies of a server share: the supervisor, which restarts failed threads, and the lock
    of the device.

    Attributes:
        begun: Schedulers that are not started yet, so that an interrupt can stop them.
    """

    def __init__(self, stuck_s: float = STUCK_S, begun: WeakSet[Scheduler] | None = None):
        self.supervisor, self.device_lock = Supervisor(stuck_s), DeviceLock()
        self.begun = WeakSet() if begun is None else begun

    def start(
        self,
        policy: ServedPolicy,
        queue: int = 64,
        max_batch: int | None = 1,
        keep_warm_s: float | None = None,
    ) -> Scheduler:
        """Start a policy's scheduler, run the policy once to warm it up, and return the scheduler. Errors of the
        warm-up are raised.

        Args:
            policy: The policy.
            queue: Number of places in the queue.
            max_batch: Largest number of observations in an inference; None measures the best number.
            keep_warm_s: Seconds without requests after which an inference keeps the device warm; None disables this.
        """
        scheduler = Scheduler(
            policy,
            queue_size=queue,
            supervisor=self.supervisor,
            max_batch=max_batch,
            device_lock=self.device_lock,
            keep_warm_s=keep_warm_s,
        )
        self.begun.add(scheduler)
        scheduler.start()
        return scheduler


def deploy(policy: Policy | Replay, bounds: ServingLimits, host: PolicyHost | None = None) -> Deployment:
    """Start a scheduler for a policy, and describe the policy for clients.

    Args:
        policy: The policy, or a recording.
        bounds: Limits of the policy and its requests.
        host: The shared resources of the server; None creates them for this policy.
    """
    host = host or PolicyHost()
    # The policy reports a change of its memory-mapped weight files as a problem.
    host.supervisor.watch(policy.problem)
    batch = None if bounds.max_batch == "auto" else bounds.max_batch
    scheduler = host.start(policy, bounds.queue, batch, bounds.keep_warm_s)
    about = describe(policy)
    runs = about["server"]
    logger.info(
        "engine %s, %s (%s), device %s (%s)",  # transport/greeting.py prints the reason for the engine
        *(runs[name] for name in ("engine", "dtype", "dtype_reason", "device", "device_reason")),
    )
    if scheduler.batcher is not None:
        about["server"] |= scheduler.batcher.describe()
        level = logging.WARNING if scheduler.batcher.busy else logging.INFO
        logger.log(level, "batches of up to %d (%s)", scheduler.batcher.limit, scheduler.batcher.reason)
    # A recording needs no limits, because its actions were sent to a robot before.
    safety = None
    adapters: dict[str, Safety | None] = {}
    if isinstance(policy, Policy):
        logger.info("computing with %d threads (%s)", policy.threads, policy.threads_reason)
        limits = bounds.action_limits, bounds.action_margin, bounds.state_margin, bounds.max_age
        safety = Safety(policy.processor, *limits)
        about["policy"]["action"] |= _bounds(policy.processor, safety)
        for name, processor in policy.processors.items():
            if name:
                adapters[name] = own = Safety(processor, *limits)
                runs["adapters"][name]["action"] = _bounds(processor, own)
    return Deployment(
        scheduler,
        policy.spec,
        about,
        safety,
        policy.padded_state_dim,
        policy.padded_action_dim,
        None if bounds.max_megapixels is None else int(bounds.max_megapixels * 1e6),
        manifest=policy.manifest,
        adapters=adapters,
    )


# Clients that do not request real-time chunking merge chunks by this method, without latency compensation.
NO_COMPENSATION = "naive"


def _bounds(processor: Processor, safety: Safety) -> dict[str, Any]:
    """Return the limits and the scale of a policy's actions for clients. Both come from the statistics of the training
    data.

    Args:
        processor: Converts observations and actions of the policy. It has the statistics.
        safety: Limits of the policy's actions.
    """
    # The notes of the base policy are logged when the policy is loaded, so log only the notes of adapters here.
    if processor.adapter:
        for note in statistics.notes(processor.spec, processor.recipe):
            logger.warning("adapter %s: %s", processor.adapter, note)
    if (blend := processor.spec.temporal_ensemble) is not None:
        logger.warning(
            "the checkpoint was trained for temporal ensembling (coefficient %g): `sinew run`, `sinew eval` and the"
            " protocol vla-eval average the chunks of all steps; other clients do not average them",
            blend,
        )
    if chunking := unlike_chunking(NO_COMPENSATION, processor.spec.to_dict()):
        logger.warning(
            "%s. Clients of other projects do not use real-time chunking unless they request it",
            chunking,
        )
    scale = unit_sizes(processor.action_normalizer, processor.recipe.action_steps, processor.spec)
    return {"limits": safety.limits(), "scale": scale}


def describe(policy: Policy | Replay) -> dict[str, Any]:
    """Return the description of the server and the policy that clients get, ready for JSON."""
    return {
        "server": {
            "name": "sinew",
            "version": __version__,
            **policy.describe(),
            "threads_reason": policy.threads_reason,
            **machine.arithmetic(policy.threads),
        },
        "policy": policy.spec.to_dict(),
        "padded_state_dim": policy.padded_state_dim,
        "padded_action_dim": policy.padded_action_dim,
    }

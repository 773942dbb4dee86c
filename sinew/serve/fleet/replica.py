"""A replica: a process with a policy. The replica handles requests like a server, but receives them through Ray."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from sinew.core import ActionChunk, Observation, ObservationError, PolicySpec, SinewError
from sinew.serve.deploy import deploy
from sinew.serve.fleet.config import PolicyConfig
from sinew.serve.fleet.scaling import INFERENCE, TARGET
from sinew.serve.limits import ServingLimits
from sinew.serve.request import Request
from sinew.serve.service import Service

MIX = 0.1  # weight of the newest inference in the mean duration that replicas report


@dataclass(frozen=True, slots=True)
class About:
    """A replica's description of its policy. The fields have the meaning of the same fields in
    :class:`sinew.serve.policies.Deployment`.
    """

    spec: PolicySpec
    metadata: dict[str, Any]
    padded_state_dim: int
    padded_action_dim: int


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error in the form in which a replica sends it. ``field``, ``expected`` and ``got`` are the attributes of an
    ObservationError.
    """

    code: str
    message: str
    field: str = ""
    expected: str = ""
    got: str = ""

    @classmethod
    def of(cls, error: SinewError) -> ErrorRecord:
        """Return the parts of an error that a replica sends to the gateway."""
        if isinstance(error, ObservationError):
            return cls(error.code, str(error), error.field, error.expected, error.got)
        return cls(error.code, str(error))

    def error(self) -> SinewError:
        """Convert the record back to the original error, with the same code."""
        if self.field:
            return ObservationError(self.field, self.expected, self.got)
        error = SinewError(self.message)
        error.code = self.code
        return error


class Replica:
    """One process with a policy, for Ray Serve's deployment.

    Args:
        config: A :class:`PolicyConfig` as plain data.
    """

    def __init__(self, config: dict[str, Any]):
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        # The gateway writes the access log, if the user has enabled it.
        logging.getLogger("sinew.access").setLevel(logging.WARNING)
        self._config = policy_config = msgspec.convert(config, PolicyConfig)
        import sinew

        policy = sinew.load(
            policy_config.source,
            engine=policy_config.engine,
            device=policy_config.device,
            dtype=policy_config.dtype,
            threads=policy_config.threads,
        )
        limits = ServingLimits(
            queue=2 * policy_config.ongoing,
            max_batch=policy_config.max_batch,
            action_limits=policy_config.action_limits,
        )
        deployment = deploy(policy, limits)
        self._about = About(
            deployment.spec, deployment.metadata, deployment.padded_state_dim, deployment.padded_action_dim
        )
        self._service = Service(deployment)
        self._inference_ms = 0.0

    async def about(self) -> About:
        """Return the description of the replica's policy: specification, engine and precision."""
        return self._about

    async def infer(self, observation: Observation) -> ActionChunk | ErrorRecord:
        """Compute an observation. Return the chunk, or the error as a record. Cancelling the call abandons the
        request.
        """
        begun = time.perf_counter()
        try:
            # The gateway has already ordered the requests of the robots fairly, so each request counts as its
            # own connection here.
            chunk = await self._service.infer(
                Request("ray", lambda _budget: observation, connection=object(), arrived=begun)
            )
        except SinewError as error:
            return ErrorRecord.of(error)
        took = chunk.timing.total_ms / max(1, chunk.timing.batch)
        self._inference_ms += (took - self._inference_ms) * (MIX if self._inference_ms else 1.0)
        return chunk

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the measurements for :mod:`sinew.serve.fleet.scaling`."""
        bounds = self._config.replicas
        target = 0.0 if isinstance(bounds, int) else bounds.queue_ms
        return {INFERENCE: self._inference_ms, TARGET: target}

    def check_health(self) -> None:
        """Raise an error if this replica cannot answer. Ray Serve then starts another replica in its place."""
        if problems := self._service.problems():
            raise RuntimeError("; ".join(problems))

"""A policy whose chunks are computed by replicas (copies of the policy in other processes). The scheduler of this
process uses it like a local policy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from sinew.core import ActionChunk, CancelledError, Observation, PolicySpec
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.fleet.replica import About, ErrorRecord
from sinew.serve.served import ServedPolicy
from sinew.serve.service import UnhealthyError

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # seconds between two checks whether the client has disconnected
TRIES = 4  # largest number of attempts for one request
PAUSE_S = 0.05  # seconds before the next attempt
# Error codes after which another replica may answer the request.
_AGAIN = (
    "unhealthy",
    "shutting_down",
    "busy",
)


class Response(Protocol):
    """Interface of a call of a replica that is not answered yet (Ray Serve's ``DeploymentResponse``)."""

    def result(self, *, timeout_s: float | None = None) -> Any: ...
    def cancel(self) -> None: ...


Ask = Callable[[Observation], Response]


class RemotePolicy(ServedPolicy):
    """A policy that sends each observation to one of its replicas, which computes the chunk. An inference changes
    nothing on a replica. So if a replica dies, its request is sent to another replica.

    Args:
        about: The description of the policy.
        ask: Sends an observation to a replica.
        lost: Errors of a call whose replica has ended or cannot be reached.
        name: The policy's name.

    Attributes:
        replicas: The number of running replicas that the cluster reported last.
        retried: The number of requests that were sent again.
    """

    def __init__(self, about: About, ask: Ask, lost: tuple[type[BaseException], ...], name: str = ""):
        self.about, self.name = about, name
        self._ask, self._lost = ask, lost
        self._lock = threading.Lock()
        self._quiet = RateLimitedLog(logger)
        self.replicas, self.retried = 1, 0

    @property
    def spec(self) -> PolicySpec:
        """The policy's specification."""
        return self.about.spec

    def describe(self) -> dict[str, Any]:
        """Return the engine and the precision of the policy, ready for JSON."""
        return dict(self.about.metadata["server"])

    def state(self) -> dict[str, int]:
        """Return the number of running replicas and the number of requests that were sent again, ready for JSON."""
        return {"replicas": self.replicas, "retried": self.retried}

    def problem(self) -> str | None:
        """Return the problem as a sentence while there is no replica; None otherwise."""
        return None if self.replicas else f"the policy {self.name} has no running replica"

    def warm_up(self) -> None:
        """Do nothing, because replicas are warm before they receive requests."""

    def prepare(self, observation: Observation) -> Observation:
        """Return the observation unchanged, because a replica checks and prepares it."""
        return observation

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Send an observation to a replica, and return the chunk that the replica computes.

        Raises:
            SinewError: The replica has answered with an error, or no replica answers.
            CancelledError: The event ``cancel`` was set before the answer came.
        """
        for attempt in range(1, TRIES + 1):
            try:
                reply = self._wait(self._ask(observation), cancel)
            except self._lost as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            else:
                if not isinstance(reply, ErrorRecord):
                    return self._checked(reply, observation)
                if reply.code not in _AGAIN:
                    raise reply.error()
                why = reply.message
            with self._lock:
                self.retried += 1
            self._quiet.warning("a request of %s is sent again: %s", self.name, why)
            if attempt < TRIES:
                time.sleep(PAUSE_S)
        raise UnhealthyError(f"{TRIES} attempts on replicas failed; the last error was: {why}")

    def _checked(self, answer: Any, observation: Observation) -> ActionChunk:
        """Check that the chunk of a replica has the shape of the policy's specification, and return the chunk.

        Raises:
            UnhealthyError: The chunk has another shape, because another user of the cluster has replaced the
                replicas.
        """
        form = (self.spec.chunk_size if observation.acts else 0, self.spec.action.dim)
        shape = np.shape(answer.actions) if isinstance(answer, ActionChunk) else type(answer).__name__
        if shape != form:
            raise UnhealthyError(
                f"a replica of {self.name} answers with the shape {shape} instead of {form}, because its policy was"
                " changed; restart the fleet"
            )
        return answer

    def _wait(self, response: Response, cancel: threading.Event | None) -> Any:
        while True:
            try:
                return response.result(timeout_s=LOOK_S)
            except TimeoutError:
                if cancel is not None and cancel.is_set():
                    response.cancel()
                    raise CancelledError("the request was cancelled") from None

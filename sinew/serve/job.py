"""A job is a request in progress. This module defines the data that the service and the scheduler store for a job,
from its arrival to its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sinew.bundle.schema import Manifest
from sinew.core import Observation, PolicySpec
from sinew.processing.safety import Safety
from sinew.serve.decode.frames import MIN_BUDGET, PixelBudget
from sinew.serve.request import Outcome, Request

Check = Callable[[], None]  # a function that raises an error if no client waits for the result any more


class Answering(Protocol):
    """Interface of the object that answers a job: a policy with its scheduler.
    :class:`sinew.serve.policies.Deployment` implements it.
    """

    @property
    def number(self) -> int: ...
    @property
    def spec(self) -> PolicySpec: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def changed(self) -> tuple[str, ...]: ...
    @property
    def pixels(self) -> int: ...
    @property
    def safety(self) -> Safety | None: ...
    @property
    def adapters(self) -> Mapping[str, Safety | None]: ...


class Home(Protocol):
    """Interface of the scheduler to which a job was submitted. :class:`sinew.serve.scheduler.Scheduler` implements
    it.
    """

    def cancel(self, job: ServingJob) -> None:
        """End a job, because no client waits for its result any more."""

    def ready(self, decoded: list[ServingJob]) -> None:
        """Put decoded jobs of one client into the queue for inference."""


class RequestGroup:
    """The jobs of one message with several observations. One inference computes the jobs that fit together, in order,
    and no jobs of other messages.

    The group is ready to be computed when every job is decoded or has ended. Thread-safe.
    """

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._left, self._decoded = count, list[ServingJob]()
        self._counted: set[int] = set()

    def arrived(self, job: ServingJob) -> list[ServingJob]:
        """Record that a job is decoded. Return the jobs that may be computed now."""
        return self._count(job, [job])

    def ended(self, job: ServingJob) -> list[ServingJob]:
        """Record that a job has ended, possibly after it was decoded. Return the jobs that may be computed now."""
        return self._count(job, [])

    def decoded(self) -> list[ServingJob]:
        """Return the decoded jobs that were not returned before, in the order of their arrival."""
        with self._lock:
            decoded, self._decoded = self._decoded, []
        return sorted(decoded, key=lambda job: job.accepted)

    def _count(self, job: ServingJob, decoded: list[ServingJob]) -> list[ServingJob]:
        with self._lock:
            if id(job) in self._counted:
                return []
            self._counted.add(id(job))
            self._left -= 1
            self._decoded += decoded
        return [] if self._left else self.decoded()


@dataclass(slots=True, eq=False)
class Decoded:
    """The parts of a request after decoding.

    Attributes:
        observation: The observation.
        safety: Limits of the answer; None without limits.
        warnings: Warnings that are sent with the answer.
        borrowed: Raises if frames in shared memory have changed; None if no client can change the frames.
    """

    observation: Observation
    safety: Safety | None
    warnings: tuple[str, ...]
    borrowed: Check | None


@dataclass(slots=True, eq=False)
class PreparedInputs:
    """An observation that the policy has prepared.

    Attributes:
        inputs: The inputs of the inference.
        kind: Key of the jobs that may be computed together; None for a job that is computed alone.
        alike: Key of the jobs with the same cost.
        seconds: Duration of decoding and preparing.
    """

    inputs: Any = None
    kind: Hashable | None = None
    alike: Hashable | None = None
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class ServingJob:
    """One request in progress.

    Threads:
        The service writes ``deadline``, ``together`` and ``deployment`` before it submits the job. Only the scheduler
            writes the attributes after them.

    Attributes:
        request: The request.
        deadline: Deadline on the clock ``time.perf_counter()``; None without a deadline.
        together: The group of the message's jobs; None for a message with one observation. Jobs of a group do not
            replace each other.
        deployment: The policy that answers the job.
        home: The scheduler to which the job was submitted.
        on_done: Function that takes the outcome; called once.
        accepted: Time at which the job was submitted.
        begun: Time at which decoding or inference began last.
        decoded: The decoded parts of the request.
        prepared: The policy's inputs.
        size: Bytes of the decoded frames, while the job is not answered.
        waiting: True while the job waits for its turn.
        answered: True after the job has its outcome.
        cancel: Event that is set when no client waits for the result any more.
    """

    request: Request
    deadline: float | None = None
    together: RequestGroup | None = None
    deployment: Answering | None = None

    home: Home | None = field(default=None, init=False)
    on_done: Callable[[Outcome], None] | None = field(default=None, init=False)
    accepted: float = field(default=0.0, init=False)
    begun: float | None = field(default=None, init=False)
    decoded: Decoded | None = field(default=None, init=False)
    prepared: PreparedInputs | None = None
    size: int = field(default=0, init=False)
    waiting: bool = field(default=True, init=False)
    answered: bool = field(default=False, init=False)
    cancel: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def connection(self) -> Hashable | None:
        return self.request.connection

    @property
    def episode(self) -> Hashable | None:
        """Key of the jobs that replace each other while they wait; None for a job that replaces no other."""
        return None if self.together is not None else self.request.episode

    @property
    def session(self) -> str:
        """The name that the client has given to its episode. In a message with several observations, each observation
        may contain its own name.
        """
        if self.together is not None and self.decoded is not None:
            return self.decoded.observation.session
        return self.request.session

    @property
    def observation(self) -> Observation | None:
        """The decoded observation; None before decoding."""
        return None if self.decoded is None else self.decoded.observation

    @property
    def kind(self) -> Hashable | None:
        return None if self.prepared is None else self.prepared.kind

    @property
    def alike(self) -> Hashable | None:
        return None if self.prepared is None else self.prepared.alike

    def abandon(self) -> None:
        """Cancel the job, because no client waits for its answer any more."""
        if self.home is not None:
            self.home.cancel(self)

    def read(self, check: Check) -> Observation:
        """Decode the observation of the request. Its frames must be within the pixel limit of the policy, and its state
        within the policy's limits.

        Args:
            check: Function that raises an error if no client waits for the result any more.
        """
        deployment = self.deployment
        budget = PixelBudget(MIN_BUDGET if deployment is None else deployment.pixels, check)
        observation = self.request.decode(budget)
        if deployment is None:
            self.decoded = Decoded(observation, None, (), budget.borrowed)
            return observation
        # An unknown adapter is rejected later. Until then, the limits of the base policy apply.
        safety = deployment.adapters.get(observation.adapter, deployment.safety)
        self.decoded = Decoded(observation, safety, deployment.changed, budget.borrowed)
        # Check the state after `decoded` is set. The check raises an error for a state outside its limits, and then
        # the log needs the observation.
        if safety is not None:
            self.decoded.warnings += tuple(safety.check(observation))
        return observation


def release(decoded: list[ServingJob]) -> None:
    """Queue decoded jobs of one client for inference, at the schedulers to which they were submitted."""
    for home in dict.fromkeys(each.home for each in decoded):
        if home is not None:
            home.ready([each for each in decoded if each.home is home])

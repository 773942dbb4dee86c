"""The policies of a server by name, each with its own scheduler. Requests without a name get the first policy."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinew.bundle.schema import Manifest
from sinew.core import PolicySpec, RequestError, SinewError, did_you_mean
from sinew.processing.safety import Safety
from sinew.serve.decode.frames import pixel_limit
from sinew.serve.scheduler import Scheduler

DEFAULT = "default"  # name of the first policy, which answers requests without a policy name
MAX_NAME = 64  # characters
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class UnknownPolicyError(SinewError):
    """Error for a request that names a policy that this server does not have."""

    code = "unknown_policy"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A policy that is ready to answer, together with its started scheduler.

    Attributes:
        scheduler: The scheduler.
        spec: The policy's specification.
        metadata: The server's description of itself and the policy, ready for JSON.
        safety: Limits of states and actions; None without limits.
        padded_state_dim: The model's own width of the state, which vla.cpp's clients use.
        padded_action_dim: The model's own width of an action, which vla.cpp's clients use.
        max_pixels: Largest number of pixels of one request, all frames together; None computes it from the policy's
            cameras.
        changed: Differences from the replaced policy, one sentence each. Robots get them with each answer.
        manifest: Manifest of the bundle, for displays of preprocessed frames and of the training record; None if
            unknown.
        state: Returns the policy's own counters; None if it has no counters.
        adapters: Name of an adapter -> limits of its answers. Each adapter has its own statistics.
        pixels: Largest number of pixels to which one request may be decoded.
        number: Number that is sent with each answer, so that robots notice a hot-swap. It is random, because a client
            may use several servers.
    """

    scheduler: Scheduler
    spec: PolicySpec
    metadata: dict[str, Any]
    safety: Safety | None = None
    padded_state_dim: int = 0
    padded_action_dim: int = 0
    max_pixels: int | None = None
    changed: tuple[str, ...] = ()
    manifest: Manifest | None = None
    state: Callable[[], dict[str, int]] | None = None
    adapters: Mapping[str, Safety | None] = field(default_factory=dict)
    pixels: int = field(init=False)
    number: int = field(default_factory=lambda: secrets.randbits(63) or 1, init=False)

    @property
    def identity(self) -> dict[str, str]:
        """Facts that identify the policy's bundle, such as its hash (:attr:`sinew.policy.Policy.identity`); {} without
        a bundle.
        """
        return self.metadata.get("server", {}).get("identity", {})

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels", self.max_pixels or pixel_limit(self.spec))


class Policies:
    """The policies of a server by name. Every method may be called from any thread.

    A policy that is replaced or removed still answers its requests. Its scheduler stays in ``schedulers`` until
    ``retired`` is called.
    """

    def __init__(self, first: Deployment):
        self._lock = threading.Lock()
        self._deployed = {DEFAULT: first}
        self._leaving: list[Scheduler] = []
        self._past: dict[str, int] = {}  # counter -> its sum over the schedulers that have ended
        self._watching: list[Callable[[Scheduler], None]] = []

    def watch(self, left: Callable[[Scheduler], None]) -> None:
        """Register the function ``left``, which is called with each scheduler that gets no more requests.

        The thread that changes the policy calls ``left`` before ``put`` and ``take`` return.
        """
        self._watching.append(left)

    def get(self, name: str = "") -> Deployment:
        """Return the policy with a name; "" is the first policy.

        Raises:
            UnknownPolicyError: The server has no policy with this name.
        """
        deployment = self._deployed.get(name or DEFAULT)
        if deployment is None:
            name, names = name[:MAX_NAME], ", ".join(self._deployed)
            hint = did_you_mean(name, self._deployed)
            raise UnknownPolicyError(f"policy: expected one of {names}, got {name!r}{hint}")
        return deployment

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all policies, beginning with the first policy."""
        return tuple(self._deployed)

    @property
    def several(self) -> bool:
        """True if a description of the first policy alone is incomplete: the server has other policies, a hot-swap has
        changed the first policy, or the first policy has counters.
        """
        first = self.get()
        return len(self._deployed) > 1 or bool(first.changed) or first.state is not None

    def put(self, name: str, deployment: Deployment) -> Scheduler | None:
        """Let ``deployment`` answer all further requests that name the policy ``name``.

        Returns:
            The replaced scheduler, which the caller must drain; None if there is none.
        """
        with self._lock:
            old = self._deployed.get(name)
            self._deployed = {**self._deployed, name: deployment}
            if old is None or old.scheduler is deployment.scheduler:
                return None
            self._leaving.append(old.scheduler)
        self._tell(old.scheduler)
        return old.scheduler

    def take(self, name: str) -> Scheduler:
        """Remove a policy. Return its scheduler, which the caller must drain.

        Raises:
            UnknownPolicyError: There is no such policy.
            RequestError: The first policy cannot be removed.
        """
        with self._lock:
            scheduler = self.get(name).scheduler
            if name == DEFAULT:
                raise RequestError(f"policy: {DEFAULT} can be replaced but not unloaded; name another policy")
            self._deployed = {each: found for each, found in self._deployed.items() if each != name}
            self._leaving.append(scheduler)
        self._tell(scheduler)
        return scheduler

    def _tell(self, scheduler: Scheduler) -> None:
        for left in self._watching:
            left(scheduler)

    def retired(self, scheduler: Scheduler) -> None:
        """Record that the scheduler of a replaced or removed policy has sent its last answer. Its counters are added
        to the server's sums.
        """
        counts = scheduler.stats()
        with self._lock:
            for key, count in counts.items():
                self._past[key] = self._past.get(key, 0) + int(count)
            self._leaving.remove(scheduler)

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """All schedulers that may still have to answer requests. The schedulers of replaced and removed policies come
        first.
        """
        with self._lock:
            return (*self._leaving, *(each.scheduler for each in self._deployed.values()))

    def stats(self) -> dict[str, int | bool]:
        """Return the sum of :meth:`Scheduler.stats` over all policies since the start."""
        counts: dict[str, int | bool] = dict(self._past)
        for scheduler in self.schedulers:
            for name, count in scheduler.stats().items():
                counts[name] = count if name not in counts else counts[name] + count
        return counts

    def identities(self) -> dict[str, dict[str, str]]:
        """Return the identity of each policy's bundle (such as its hash), by the name under which the policy runs."""
        return {name: {"policy": each.spec.name, **each.identity} for name, each in self._deployed.items()}

    def describe(self) -> dict[str, Any]:
        """Return the policies by name, with their counters, ready for JSON."""
        return {
            name: {
                "policy": each.spec.name,
                **({"identity": each.identity} if each.identity else {}),
                **each.scheduler.stats(),
                **({} if each.state is None else each.state()),
                **({"changed": each.changed} if each.changed else {}),
            }
            for name, each in self._deployed.items()
        }


def check_name(name: str) -> None:
    """Raise RequestError if a text cannot be a policy's name in an address or a message."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise RequestError(
            f"policy: expected a name of at most {MAX_NAME} letters, digits, '.', '_' and '-', got {name[:80]!r}"
        )

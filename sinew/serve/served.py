"""The methods that a server requires of a policy."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from sinew.core import ActionChunk, Observation, SinewError


class ServedPolicy(Protocol):
    """A policy behind a scheduler, such as :class:`sinew.policy.Policy`.

    The methods of this class are the defaults of subclasses: the policy computes one observation at a time, and stores
    nothing between two requests.
    """

    @property
    def unbatched(self) -> str:
        """The reason why the policy computes one observation at a time; "" if it computes several together."""
        return "this policy computes one observation at a time"

    @property
    def keeps_frames(self) -> bool:
        """False if the policy does not read the frames of an observation after its answer."""
        return True

    @property
    def pauses(self) -> bool:
        """True if :meth:`run` and :meth:`run_batch` take the argument ``between``.

        Both methods call ``between`` between two steps of an inference, and ``between`` may run another inference
        of this policy.
        """
        return False

    def warm_up(self) -> object:
        """Compute one inference before the first request, on the thread that will run the policy, so that the first
        request is not slow.
        """

    def warm_batches(self, largest: int) -> None:
        """Prepare batches of up to ``largest`` observations, on the thread that will run the policy."""
        return

    def prepare(self, observation: Observation) -> Any:
        """Return the input of :meth:`run`. The method may be called during another inference.

        Raises:
            SinewError: The policy does not support the observation.
        """

    def run(self, prepared: Any, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Compute the chunk of a prepared observation.

        Raises:
            SinewError: The inference has failed.
            CancelledError: The event ``cancel`` was set before the inference ended.
        """
        raise NotImplementedError

    def batch_key(self, prepared: Any) -> Hashable | None:
        """Return a key of a prepared observation. Only observations with equal keys may be computed in one batch. None
        means that this observation is always computed alone.
        """
        return None

    def cost_key(self, prepared: Any) -> Hashable | None:
        """Return a key of a prepared observation. Inferences with equal keys take about the same time. None means that
        all inferences take the same time.
        """
        return None

    def run_batch(
        self, members: Sequence[Any], *, cancel: threading.Event | None = None
    ) -> list[ActionChunk | SinewError]:
        """Compute prepared observations with the same ``batch_key`` together.

        Returns:
            The chunk of each observation, or its error.

        Raises:
            SinewError: The whole batch failed.
        """
        raise SinewError(f"a batch of {len(members)}: {self.unbatched}")

    def dummy_observation(self) -> Observation:
        """Return an artificial observation whose inference takes as long as usual. It is used to warm the policy up and
        to time batches.
        """
        raise SinewError(self.unbatched)

    def reset(self, session: str) -> None:
        """Forget the stored state of a session, because a new episode begins."""
        return

    def problem(self) -> str | None:
        """Return a sentence with the reason why the policy cannot answer; None while it can."""
        return None

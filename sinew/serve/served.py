"""What a server asks of a policy."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from sinew.core import ActionChunk, Observation, SinewError


class ServedPolicy(Protocol):
    """A policy behind a scheduler. :class:`sinew.policy.Policy` is one; those that inherit from this have its answers
    where they give none of their own: one observation at a time, nothing kept from one request to the next.
    """

    @property
    def unbatched(self) -> str:
        """Return why it computes one observation at a time; "" where it computes several."""
        return "this policy computes one observation at a time"

    @property
    def keeps_frames(self) -> bool:
        """Return False if it looks at the frames of an observation no more once it has answered."""
        return True

    @property
    def pauses(self) -> bool:
        """Return True if :meth:`run` and :meth:`run_batch` take ``between``: a function to call between two steps, in
        which another inference of this policy may run."""
        return False

    def warm_up(self) -> object:
        """Compute once, on the thread that will go on to."""

    def prepare(self, observation: Observation) -> Any:
        """Return the input of :meth:`run`. May run during another inference. Raises SinewError for an unsupported
        observation.
        """

    def run(self, prepared: Any, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Return the chunk. Raises SinewError, CancelledError once ``cancel`` is set."""
        raise NotImplementedError

    def batch_key(self, prepared: Any) -> Hashable | None:
        """Return the properties that observations of one batch share; None for one that always runs alone."""
        return None

    def cost_key(self, prepared: Any) -> Hashable | None:
        """Return the properties that determine the time of an inference; None if all take equally long."""
        return None

    def run_batch(
        self, members: Sequence[Any], *, cancel: threading.Event | None = None
    ) -> list[ActionChunk | SinewError]:
        """Return the chunks of prepared observations of one ``batch_key``, or an error in the place of one of them.
        Raises SinewError for what concerns them all."""
        raise SinewError(f"a batch of {len(members)}: {self.unbatched}")

    def dummy_observation(self) -> Observation:
        """Return an observation that costs what others do, to measure batches with."""
        raise SinewError(self.unbatched)

    def reset(self, session: str) -> None:
        """Forget what is kept of a session: a new episode begins."""
        return

    def problem(self) -> str | None:
        """Return why it cannot answer, in a sentence; None while it can."""
        return None

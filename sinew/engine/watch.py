"""Observe one run of an engine: measure the time of each stage, cancel the run, and store the results of stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sinew.core import CancelledError, Timing


@dataclass
class Trace:
    """The results of the stages of one inference, in the order in which the stages ran.

    Attributes:
        vision: Image tokens [V, tokens, C].
        prefix: The tensors that each step reads, by their names in the context. A rewritten model may have other
            tensors than the reference.
        head: The output of each step of the solver, then the last x, all [H, A] in model units. If the head generates
            tokens, each token, [1], then the chunk.
        rows: For each embedding table (module), the indices of the rows that were read.
    """

    vision: np.ndarray = field(default_factory=lambda: np.empty(0))
    prefix: dict[str, np.ndarray] = field(default_factory=dict)
    head: list[np.ndarray] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)


class Watch:
    """Observes one inference of an engine: measures its stages, can stop it between stages, and can store results.

    An engine that reuses views or the prefix sets ``reused_views`` and ``reused_prefix``
    (:class:`sinew.core.Timing`).

    Args:
        cancel: Ends the run with :class:`CancelledError` when this event is set.
        trace: Receives the results of the stages of a single observation.
        apart: True makes an engine that runs all stages as one graph run each stage separately.
        between: Called after each step of the solver and after each token. Another run may begin during this call
            unless ``facts.refusals`` has STREAM or ``facts.one_graph`` is True. Another ``solve`` may begin unless
            ``facts.refusals`` has STREAM. An exception that ``between`` raises ends the run.
    """

    def __init__(
        self,
        cancel: threading.Event | None = None,
        trace: Trace | None = None,
        apart: bool = False,
        between: Callable[[], None] | None = None,
    ):
        self.trace, self.apart = trace, apart or trace is not None
        self.reused_views, self.reused_prefix = 0, False
        self._cancel, self._between = cancel, between
        self._laps: dict[str, list[float]] = {}
        self._begun = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Store the time of the stage that has just ended ("vision", "prefix", "text" or "step"). The caller must
        have waited for the device.
        """
        now = time.perf_counter()
        self._laps.setdefault(stage, []).append(1e3 * (now - self._begun))
        self.check()
        if self._between is not None and stage in ("step", "text"):
            self._between()
            now = time.perf_counter()
        self._begun = now

    def begin(self) -> None:
        """Set the start of the next stage to the present time."""
        self._begun = time.perf_counter()
        self.check()

    def check(self) -> None:
        """Check whether the run was cancelled.

        Raises:
            CancelledError: The run was cancelled.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError("the inference was cancelled")

    def timing(self, batch: int = 1, **around: float) -> Timing:
        """Return the milliseconds of the stages.

        An engine that ran all stages as one graph reports the whole time in ``step_ms``.

        Args:
            batch: Number of observations.
            **around: The times outside the engine, by their names in :class:`sinew.core.Timing`.
        """
        laps = self._laps
        return Timing(
            vision_ms=sum(laps.get("vision", ())),
            prefix_ms=sum(laps.get("prefix", ())),
            step_ms=tuple(laps.get("step", ())),
            batch=batch,
            text_ms=sum(laps.get("text", ())),
            reused_views=self.reused_views,
            reused_prefix=self.reused_prefix,
            **around,
        )

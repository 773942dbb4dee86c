"""Follow one run of an engine: its times, its end before time, and what its stages computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sinew.core import CancelledError, Timing


@dataclass
class Trace:
    """What the stages of one run computed, in the order in which they ran.

    vision: image tokens [V, tokens, C]. prefix: what each step reads of the observation, by name in the context; a
    rewritten model may hold other tensors than the reference. head: the output of each step of the solver, then the
    last x, [H, A] in model units; of a head that speaks each token, [1], then the chunk. rows: the indices by which
    tables of embeddings were read, by module.
    """

    vision: np.ndarray = field(default_factory=lambda: np.empty(0))
    prefix: dict[str, np.ndarray] = field(default_factory=dict)
    head: list[np.ndarray] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)


class Watch:
    """Follows one run: times its stages, stops it between two of them, and keeps what they computed.

    cancel: ends the run with :class:`CancelledError` when it is set. between: called after each step of the solver
    or token, where another run may begin unless ``facts.refusals`` has STREAM; what it raises ends the run. trace:
    gets what the stages of a single observation computed. apart: asks an engine that runs all stages as one for each
    of them. reused_views, reused_prefix: set by an engine that did not compute them (:class:`sinew.core.Timing`).
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
        """End a stage ("vision", "prefix", "text", "step"), after the device has caught up."""
        now = time.perf_counter()
        self._laps.setdefault(stage, []).append(1e3 * (now - self._begun))
        self.check()
        if self._between is not None and stage in ("step", "text"):
            self._between()
            now = time.perf_counter()
        self._begun = now

    def begin(self) -> None:
        """Count the next stage's time from now on."""
        self._begun = time.perf_counter()
        self.check()

    def check(self) -> None:
        """Raise :class:`CancelledError` if the run was cancelled."""
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError("the inference was cancelled")

    def timing(self, batch: int = 1, **around: float) -> Timing:
        """Return the milliseconds of the stages; an engine that ran them as one has all of them in ``step_ms``. around:
        those of what was no engine's, by their names in :class:`sinew.core.Timing`."""
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

"""Choose the number of threads and start the cache of repeated inputs, in the first inference of a policy."""

from __future__ import annotations

from collections.abc import Callable

from sinew.engine.backend import ASKED
from sinew.engine.engine import Engine
from sinew.processing import ModelInputs


class WarmUp:
    """The choices that a policy makes once, in its first inference.

    Attributes:
        threads_reason: Why the engine has this number of threads.
        reuse_reason: What is cached of earlier observations. "off" if caching is off.
    """

    def __init__(self, threads: int | None, reuse: bool):
        self.threads_reason = "one per core" if threads is None else ASKED
        self.reuse_reason = "not tried yet" if reuse else "off"
        self.reuse_open = reuse
        self._threads_open = threads is None

    def tune_threads(self, engine: Engine, infer: Callable[[], object]) -> None:
        """Measure and choose the number of threads, unless the user chose the number."""
        if self._threads_open:
            self._threads_open = False
            self.threads_reason = engine.tune_threads(infer) or self.threads_reason

    def pause_reuse(self, engine: Engine) -> None:
        """Stop the cache, because a measurement must compute everything."""
        self.reuse_open = False
        for each in (engine, *engine.adapters.values()):
            each.reuse = None

    def start_reuse(self, engine: Engine, inputs: ModelInputs) -> None:
        """Start to cache what observations like ``inputs`` repeat, if the user chose this."""
        self.reuse_open = False
        if self.reuse_reason == "off":
            return
        # Each engine has its own weights, so each engine needs its own cache.
        reasons = [each.start_reuse(inputs) for each in (engine, *engine.adapters.values())]
        apart = next(filter(None, reasons), "")
        self.reuse_reason = f"the prefix, but no single view: {apart}" if apart else "views and the prefix"

"""What the first inference of a policy settles: the number of threads, and what is kept of earlier observations."""

from __future__ import annotations

from collections.abc import Callable

from sinew.engine.backend import ASKED
from sinew.engine.engine import Engine
from sinew.processing import ModelInputs


class WarmUp:
    """Settles once what a load left open.

    Attributes:
        threads_reason: Why the engine has its number of threads.
        reuse_reason: What is kept of earlier observations, "off" for nothing.
    """

    def __init__(self, threads: int | None, reuse: bool):
        self.threads_reason = "one per core" if threads is None else ASKED
        self.reuse_reason = "not tried yet" if reuse else "off"
        self.reuse_open = reuse
        self._threads_open = threads is None

    def tune_threads(self, engine: Engine, infer: Callable[[], object]) -> None:
        """Choose the number of threads by measuring, if the user did not."""
        if self._threads_open:
            self._threads_open = False
            self.threads_reason = engine.tune_threads(infer) or self.threads_reason

    def pause_reuse(self, engine: Engine) -> None:
        """Compute everything from now on: what is measured must not be repeated from memory."""
        self.reuse_open = False
        for each in (engine, *engine.adapters.values()):
            each.reuse = None

    def start_reuse(self, engine: Engine, inputs: ModelInputs) -> None:
        """Keep from now on what observations like ``inputs`` repeat, if the user chose so."""
        self.reuse_open = False
        if self.reuse_reason == "off":
            return
        # Each engine has weights of its own.
        reasons = [each.start_reuse(inputs) for each in (engine, *engine.adapters.values())]
        apart = next(filter(None, reasons), "")
        self.reuse_reason = f"the prefix, but no single view: {apart}" if apart else "views and the prefix"

"""Settings that a policy chooses during its first inference: the number of threads, and the cache of repeated
inputs."""

from __future__ import annotations

from collections.abc import Callable

from sinew.engine.backend import ASKED
from sinew.engine.engine import Engine
from sinew.processing import ModelInputs


class WarmUp:
    """Chooses settings during a policy's first inference, and stores the reasons for these choices.

    Attributes:
        threads_reason: Text with the reason why the engine has this number of threads.
        reuse_reason: Text that states which results for earlier observations are cached. "off" if nothing is
            cached.
    """

    def __init__(self, threads: int | None, reuse: bool):
        self.threads_reason = "one per core" if threads is None else ASKED
        self.reuse_reason, self.reuse_open = "off", False
        if reuse:
            self.enable_reuse()
        self._threads_open = threads is None

    def enable_reuse(self) -> None:
        """Let the next inference start the cache of repeated inputs. The engine must support the cache."""
        self.reuse_reason, self.reuse_open = "not tried yet", True

    def tune_threads(self, engine: Engine, infer: Callable[[], object]) -> None:
        """Choose the number of threads by a measurement, unless the user has set the number."""
        if self._threads_open:
            self._threads_open = False
            self.threads_reason = engine.tune_threads(infer) or self.threads_reason

    def pause_reuse(self, engine: Engine) -> None:
        """Switch the cache of repeated inputs off for a measurement, which must compute all stages of the
        model.
        """
        self.reuse_open = False
        for each in (engine, *engine.adapters.values()):
            each.reuse = None

    def start_reuse(self, engine: Engine, inputs: ModelInputs) -> None:
        """Start the cache of inputs that repeat from one observation to the next, if the user enabled it.

        ``inputs`` is a typical observation.
        """
        self.reuse_open = False
        if self.reuse_reason == "off":
            return
        # Each engine has its own weights, so each engine needs its own cache.
        reasons = [each.start_reuse(inputs) for each in (engine, *engine.adapters.values())]
        apart = next(filter(None, reasons), "")
        self.reuse_reason = f"the prefix, but no single view: {apart}" if apart else "views and the prefix"

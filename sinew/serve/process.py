"""The life of a serving process: claim the addresses, load, answer until a signal, leave in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from sinew.serve.service import Service, Wire

logger = logging.getLogger(__name__)

GRACE_S = 1.5  # how long stopping waits for the running stage


class Process:
    """Runs wires over one service. ``stop`` may be called from any thread and from signal handlers."""

    def __init__(self, wires: Sequence[Wire]):
        self.wires = wires
        self._stop = threading.Event()
        self._running = False

    def run(self, service: Service, on_ready: Callable[[], None]) -> bool:
        """Answer requests until ``stop``. The service's scheduler must have been started.

        Returns False when the running stage outlasted the grace period, so that a thread is still busy.
        """
        self._running = True
        gc.collect()
        gc.freeze()  # what is loaded stays; searching it for garbage would hold up a request now and then
        for wire in self.wires:
            wire.start(service)
        on_ready()
        while not self._stop.wait(3600):
            pass
        logger.info("stopping: cancelling the running request and refusing the others")
        service.stopping()
        service.scheduler.stop()
        finished = service.scheduler.join(GRACE_S)
        if not finished:
            service.scheduler.give_up()
        self.close()
        return finished

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Hand over the last replies and free the ports."""
        for wire in self.wires:
            wire.stop()
        self.wires = ()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM stops :meth:`run` (before it: raises KeyboardInterrupt);
        the second ends the process at once. Main thread only."""

        def on_signal(_number: int, _frame: object) -> None:
            for each in previous:
                signal.signal(each, signal.SIG_DFL)
            if not self._running:
                raise KeyboardInterrupt
            self.stop()

        previous = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

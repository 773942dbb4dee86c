"""The life of a serving process: it opens the ports, loads the policy, answers requests until a signal, and stops in
order.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from sinew_client.signals import handled

from sinew.serve.service import Service
from sinew.serve.wire import Listener

logger = logging.getLogger(__name__)

GRACE_S = 1.5  # When the server stops, it waits this many seconds for the running stage of an inference.
END_S = 15.0  # seconds from the first signal to the end of the process, even if threads hang
PREPARED_S = 5.0  # seconds that a stop waits until the preparing process has removed its files
TEND_S = 0.5  # seconds between two checks of the server's health
HOPELESS = 70  # exit code of a server that cannot answer any more, so that its supervisor starts it again
DESCRIPTORS = 8192  # file descriptors that a server requests from the system
# File descriptors that are not connections: weights, records, wake-up calls, listening sockets.
RESERVED = 128


class Process:
    """Runs all protocols of one service. ``stop`` may be called from any thread and from signal handlers."""

    def __init__(self, wires: Sequence[Listener]):
        self.wires = wires
        self._stop = threading.Event()
        self._running = False
        self._signal = ""  # name of the signal that ends the process
        self.hopeless: str | None = None

    def run(self, service: Service, on_ready: Callable[[], None]) -> bool:
        """Answer requests until ``stop``. The service's scheduler must be started before.

        The run ends by itself when no request can be answered any more. ``hopeless`` then has the reason.

        Returns:
            False if the running stage took longer than the grace period, so that a thread still computes.
        """
        self._running = True
        gc.collect()
        # Exclude the loaded objects from garbage collection. They are never freed, and scanning them would delay a
        # request now and then.
        gc.freeze()
        for wire in self.wires:
            wire.start(service)
        on_ready()
        preparing = service.preparing  # object that prepares a faster form of the present policy
        if preparing is not None:
            preparing.start()
        while not self._stop.wait(TEND_S):
            service.tend()
            if (reason := service.supervisor.hopeless()) is not None:
                self.hopeless = reason
                logger.critical("this server cannot answer requests any more and ends: %s", reason)
                end_for_sure()
                break
        why = f"{self._signal}: " if self._signal else ""
        logger.info("%sstopping: cancelling the running request and rejecting the others", why)
        service.stopping()
        if preparing is not None:
            preparing.stop()
        schedulers = service.policies.schedulers
        finished = True
        for scheduler in schedulers:
            scheduler.stop()
        for scheduler in schedulers:
            finished &= scheduler.join(GRACE_S)
        if not finished:
            for scheduler in schedulers:
                scheduler.give_up()
        if preparing is not None and not preparing.join(PREPARED_S):
            finished = False  # the preparing thread still loads a policy
        self.close()
        return finished

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Send the last replies and close the ports."""
        for wire in self.wires:
            wire.stop()
        self.wires = ()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the ``with`` block runs. Call this method only on the main thread.

        The first signal stops :meth:`run`. Before :meth:`run`, it raises KeyboardInterrupt. The second signal ends the
        process at once. If SIGINT was ignored before, it stays ignored.
        """

        def on_signal(number: int, _frame: object) -> None:
            self._signal = signal.Signals(number).name
            for each in taken:
                signal.signal(each, signal.SIG_DFL)
            if not self._running:
                raise KeyboardInterrupt
            end_for_sure()
            self.stop()

        with handled((signal.SIGINT, signal.SIGTERM), on_signal) as taken:
            yield


def end_for_sure() -> None:
    """End this process after ``END_S`` seconds, even if its threads hang, and print their stacks on standard error.

    The timer is a thread that does not need the interpreter.
    """
    # Standard error may not be a file with a descriptor.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.stderr)


def tell_of_crashes() -> None:
    """Print the stacks of all threads on standard error when a signal such as SIGBUS ends the process.

    SIGBUS arrives if a file of weights is truncated while it is read. Python itself would print nothing.
    """
    # Standard error may not be a file with a descriptor.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        faulthandler.enable(sys.stderr)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process to the system's hard limit, at most to ``DESCRIPTORS``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def connections_within(requested: int, servers: int) -> int:
    """Return the number of connections that each server of this process may accept.

    The number is small enough that this process can open all its files and sockets. A server without free file
    descriptors could not even reject a client.

    Args:
        requested: Largest number of connections of a server.
        servers: Number of servers in this process.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    most = max(1, (soft - min(RESERVED, soft // 2)) // max(1, servers))
    if requested > most:
        logger.warning(
            "--max-connections %d: limited to %d on each of %d ports, because this process may open only %d files and"
            " sockets; raise `ulimit -n`",
            *(requested, most, servers, soft),
        )
    return min(requested, most)

"""The life of a serving process: claim the addresses, load, answer until a signal, leave in order."""

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

GRACE_S = 1.5  # how long stopping waits for the running stage
END_S = 15.0  # seconds from the first signal to the end of the process, even if threads hang
PREPARED_S = 5.0  # how long stopping waits for the process that makes a faster form to leave nothing behind
TEND_S = 0.5  # between two looks at the health of the server
HOPELESS = 70  # exit code of a server that ends itself so that another is started in its place
DESCRIPTORS = 8192  # file descriptors that a server requests from the system
RESERVED = 128  # descriptors that are not connections: weights, records, wake-up calls, listening sockets


class Process:
    """Runs wires over one service. ``stop`` may be called from any thread and from signal handlers."""

    def __init__(self, wires: Sequence[Listener]):
        self.wires = wires
        self._stop = threading.Event()
        self._running = False
        self._signal = ""  # the signal that ends the process
        self.hopeless: str | None = None

    def run(self, service: Service, on_ready: Callable[[], None]) -> bool:
        """Answer requests until ``stop``. The service's scheduler must have been started.

        Ends by itself when nothing can be answered any more, with ``hopeless`` saying why. Returns False when the
        running stage outlasted the grace period, so that a thread is still busy.
        """
        self._running = True
        gc.collect()
        gc.freeze()  # what is loaded stays; searching it for garbage would hold up a request now and then
        for wire in self.wires:
            wire.start(service)
        on_ready()
        preparing = service.preparing  # a faster form of what serves
        if preparing is not None:
            preparing.start()
        while not self._stop.wait(TEND_S):
            service.tend()
            if (reason := service.supervisor.hopeless()) is not None:
                self.hopeless = reason
                logger.critical("this server ends itself: %s", reason)
                end_for_sure()
                break
        why = f"{self._signal}: " if self._signal else ""
        logger.info("%sstopping: cancelling the running request and refusing the others", why)
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
            finished = False  # a policy is being loaded on that thread
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
        the second ends the process at once. SIGINT stays ignored where it was. Main thread only."""

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
    """End this process after a while, whatever its threads do, and print their stacks on standard error.

    The timer is a thread that does not need the interpreter.
    """
    with contextlib.suppress(ValueError, OSError, AttributeError):  # standard error is no file
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.stderr)


def tell_of_crashes() -> None:
    """Print the stacks of all threads on standard error when a signal such as SIGBUS ends the process.

    That happens if a file of weights is truncated while it is read, and Python itself prints nothing.
    """
    with contextlib.suppress(ValueError, OSError, AttributeError):  # standard error is no file
        faulthandler.enable(sys.stderr)


def raise_descriptor_limit() -> None:
    """Let this process open as many files as the system allows it to ask for, up to ``DESCRIPTORS``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within(asked: int, servers: int) -> int:
    """Return how many connections each of ``servers`` may take, at most ``asked``, so that this process can open all
    files and sockets.

    A server without file descriptors could not even reject a client.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return asked
    most = max(1, (soft - min(RESERVED, soft // 2)) // max(1, servers))
    if asked > most:
        logger.warning(
            "--max-connections %d: limited to %d on each of %d ports, because this process may open only %d files and"
            " sockets; raise `ulimit -n`",
            *(asked, most, servers, soft),
        )
    return min(asked, most)

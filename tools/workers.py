"""``--workers N``: run the tests in N processes, which are forked after all modules are imported and tests collected.

Each worker of pytest-xdist collects all tests itself: 27 CPU seconds for four workers, 65 in a new clone. Here one
process collects. It gives the next file to each idle worker, and reports the results of the workers as its own. If a
worker crashes, its test fails, and a new worker continues with the next test. The collecting process must have only
one thread when it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest


class Workers:
    """A pytest plugin that runs the collected tests in ``count`` processes."""

    def __init__(self, count: int):
        self.count, self.ended = count, mmap.mmap(-1, 1)  # all workers share this memory
        self._tell: Connection | None = None  # in a worker: the connection for its reports
        self.begins: list[
            Callable[[pytest.Config, int], None]
        ] = []  # functions that a worker calls at its start
        # tests/processes.py then uses one nursery for all workers
        os.environ["PYTEST_XDIST_TESTRUNUID"] = str(os.getpid())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None  # let pytest run the tests itself
        tasks = Path("/proc/self/task")  # exists only on Linux
        threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
        assert threads == 1, f"expected one thread before workers are forked, got {threads}"
        self._session, self._files = session, _files(session.items)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # make the folder here, so that all workers share it
        if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.showfspath = (
                False  # with alternating files, the reporter would print the file name for each test
            )
        self._queue = os.pipe()
        os.write(self._queue[1], b"".join(index.to_bytes(2, "big") for index in range(len(self._files))))
        os.close(self._queue[1])
        self._workers: dict[
            Connection, tuple[int, int]
        ] = {}  # connection -> number and process id of the worker
        self._under_way: dict[Connection, int] = {}
        try:
            for number in range(min(self.count, len(self._files))):
                self._fork(number, ())
            while self._workers:
                for ready in multiprocessing.connection.wait(list(self._workers)):
                    self._hear(ready)  # type: ignore[arg-type]
        finally:
            for _, process in self._workers.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        for why, error in ((session.shouldfail, session.Failed), (session.shouldstop, session.Interrupted)):
            if why:
                raise error(why)
        return True

    def _fork(self, number: int, first: tuple[int, ...]) -> None:
        ours, theirs = multiprocessing.connection.Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            status = 1
            try:
                ours.close()
                self._work(number, theirs, first)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._workers[ours] = (number, process)

    def _hear(self, ready: Connection) -> None:
        """Process the next message of a worker, or its end."""
        hook, items = self._session.config.hook, self._session.items
        try:
            kind, content = ready.recv()
        except EOFError:
            number, process = self._workers.pop(ready)
            _, status = os.waitpid(process, 0)
            if (at := self._under_way.pop(ready, None)) is not None:
                why = f"worker {number} ended with {os.waitstatus_to_exitcode(status)} while this test ran"
                item = items[at]
                hook.pytest_runtest_logreport(
                    report=pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
                )
                rest = next(file for file in self._files if at in file)
                self._fork(number, tuple(index for index in rest if index > at))
            return
        if self.ended[0]:  # results of tests that still run are not reported
            self._under_way.pop(ready, None)
        elif kind == "begun":
            self._under_way[ready] = content
            hook.pytest_runtest_logstart(nodeid=items[content].nodeid, location=items[content].location)
        elif kind == "ended":
            self._under_way.pop(ready)
            hook.pytest_runtest_logfinish(nodeid=items[content].nodeid, location=items[content].location)
        elif kind == "warned":
            message, given = content
            message = warnings.WarningMessage(*message)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **given})
        else:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
            self.ended[0] |= bool(self._session.shouldfail or self._session.shouldstop)

    # ------------------------------------------------------------------------- in a worker

    def _work(self, number: int, tell: Connection, first: tuple[int, ...]) -> None:
        """Run the tests of ``first``, then files until none is left, and exit as an interpreter does."""
        session, self._tell = self._session, tell
        config = session.config
        atexit._clear()  # the exit functions of imported modules belong to the collecting process
        os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
        config._tmp_path_factory._basetemp = folder = (
            config._tmp_path_factory.getbasetemp() / f"worker-{number}"
        )  # type: ignore[attr-defined]
        folder.mkdir(exist_ok=True)
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 - only the first process writes to the terminal
        capture = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        for begin in self.begins:
            begin(config, number)
        order = self._order(first)
        item = next(order, None)
        while item is not None:
            following = next(order, None)  # pytest needs the next test to know which fixtures to tear down
            tell.send(("begun", item))
            config.hook.pytest_runtest_protocol(
                item=session.items[item], nextitem=None if following is None else session.items[following]
            )
            tell.send(("ended", item))
            item = following
        session._setupstate.teardown_exact(None)
        capture.stop_global_capturing()
        tell.close()
        atexit._run_exitfuncs()

    def _order(self, first: tuple[int, ...]) -> Iterator[int]:
        yield from first
        while index := os.read(self._queue[0], 2):
            for item in self._files[int.from_bytes(index, "big")]:
                if self.ended[0]:
                    return
                yield item

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report. A passed setup or teardown is sent only if its output or time is printed, because these are
        two thirds of all reports.
        """
        option = self._session.config.option
        read = report.when == "call" or not report.passed or report.sections
        if self._tell is not None and (read or option.durations is not None or option.xmlpath):
            config = self._session.config
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            self._tell.send(("reported", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if self._tell is not None:
            text, category = str(warning_message.message), warning_message.category
            kind = category if category.__module__ == "builtins" else UserWarning
            words = text if kind is category else f"{category.__name__}: {text}"
            message = (words, kind, warning_message.filename, warning_message.lineno)
            given = {"when": when, "nodeid": nodeid, "location": location}
            with contextlib.suppress(OSError):  # the connection may be closed at the end
                self._tell.send(("warned", (message, given)))


def _files(items: list[pytest.Item]) -> list[range]:
    """Return the index range of each file's tests, which are adjacent."""
    begins = [at for at, item in enumerate(items) if at == 0 or items[at - 1].path != item.path]
    return [range(first, last) for first, last in zip(begins, [*begins[1:], len(items)], strict=True)]

"""Prepares a faster engine for the present policy in a separate process, and replaces the policy between two chunks.

The process (``sinew prepare --background``) exports, verifies and measures. The server follows its progress. If the
prepared engine is faster, it replaces the policy like ``PUT /v1/policies`` (``swap.py``). Requests never wait for any
of this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinew_client.untrusted import UntrustedError, named, parse_json

from sinew.core import RTC, BusyError, RequestError, SinewError, machine
from sinew.engine import prepared
from sinew.engine.backend import (
    AUTO,
    BACKENDS,
    candidates,
    choose,
    chosen_by,
    exported_graphs,
    unmeasured,
)
from sinew.engine.cpu.kernels import frame_kernels
from sinew.engine.prepared import EngineFinding
from sinew.serve.policies import DEFAULT, Deployment
from sinew.serve.service import STREAMED, Service
from sinew.serve.swap import MemoryNeed

logger = logging.getLogger(__name__)

END_S = 3.0  # seconds from SIGTERM to SIGKILL
RETRY_S = 1.0  # seconds between two attempts while another change of the policies is in progress
MOST_LINE = 1 << 16  # most characters of one output line of the process
# Environment of the process: one thread. Torch reads these variables only when it is imported.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class Preparation:
    """The plan to prepare another engine for a policy, because this engine may be faster.

    Attributes:
        source: Source of the policy in use.
        engine: The engine that may be faster.
        against: The engine in use.
        command: The command that prepares the engine and times all engines.
        bundle: The bundle for which the findings are stored.
        sweep: Removes files that a killed process has left.
        device: The device.
        threads: Number of threads with which the times are measured.
    """

    source: str
    engine: str
    against: str
    command: Sequence[str]
    bundle: Path
    sweep: Callable[[], None]
    device: str = "cpu"
    threads: int = 1


def preparation(
    bundle: Path, options: dict[str, Any], threads: int | None, budget: int | None
) -> Preparation | None:
    """Return the preparation that ``sinew prepare`` could run for a policy; None if there is none.

    The result of an earlier preparation is logged.

    Args:
        bundle: The bundle.
        options: Options of ``sinew.load``.
        threads: Number of threads; None if it is not set.
        budget: Largest memory of the policy and its successor together, in bytes; None without a limit.
    """
    from sinew.engine.onnx.borrowed import shipped
    from sinew.engine.onnx.cache import sweep
    from sinew.policy import open_bundle

    if options["engine"] not in (None, AUTO):
        return None
    opened = open_bundle(bundle)
    if exported_graphs(opened) is not None:
        return None
    choice = choose(opened, threads=threads, **chosen_by(options))
    faster: list[str] = []
    for candidate in candidates(opened, choice):
        finding = prepared.kept(opened.path, candidate.engine, threads)
        if finding is not None and not finding.taken and finding.against == choice.engine:
            logger.info(
                "%s (an earlier result; to measure again, run `sinew prepare %s --again`)",
                "; ".join(filter(None, (finding.why, choice.times))),
                bundle,
            )
            continue
        exports = BACKENDS[candidate.engine].runs_graphs and shipped(opened.path) is None
        if exports and not os.access(opened.path.parent, os.W_OK):
            words = "engine %s may be faster than %s, but is not prepared, because the folder %s cannot be written"
            logger.info(words, candidate.engine, choice.engine, opened.path.parent)
            continue
        faster.append(candidate.engine)
    faster += unmeasured(opened, choice)
    if not faster:
        return None
    command = [*python_module(), "sinew", "prepare", str(opened.path), "--background", "--json"]
    command += ["--device", choice.options.device]
    if options["dtype"] is not None:
        command += ["--dtype", str(options["dtype"])]
    if threads is not None:
        command += ["--threads", str(threads)]
    if budget is not None:
        command += ["--memory-gib", f"{max(budget, 1) / 2**30:.6f}"]
    return Preparation(
        str(bundle), faster[0], choice.engine, command, opened.path, lambda: sweep(opened.path),
        choice.options.device, threads or 1,
    )  # fmt: skip


class Preparer:
    """Runs one preparation of a faster engine on its own thread, from :meth:`start` to :meth:`join`.

    Args:
        service: The service. Its swapper replaces its first policy.
        work: The preparation.
    """

    def __init__(self, service: Service, work: Preparation):
        self._service, self._work = service, work
        self._standing = service.policies.get()
        self._state = ("waiting", "")
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="sinew-prepare", daemon=True)

    def describe(self) -> dict[str, str]:
        """Return the state of the preparation, ready for JSON.

        ``state`` is waiting, preparing, exchanging, taken, refused or failed. ``text`` is the progress or the reason.
        """
        state, text = self._state
        return {"engine": self._work.engine, "state": state, "text": text}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the process, which removes its unfinished files. The method returns at once; :meth:`join` waits for
        the end.
        """
        with self._lock:
            self._stopping.set()
            child = self._child
        if child is not None:
            _signal(child, signal.SIGTERM)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the preparation. A process that ignores SIGTERM is killed.

        Returns:
            False if the thread takes longer, because it loads a policy.
        """
        if self._thread.ident is None:
            return True
        self._thread.join(min(timeout, END_S))
        if self._thread.is_alive() and self._stopping.is_set() and self._child is not None:
            _signal(self._child, signal.SIGKILL)
        self._thread.join(max(0.0, timeout - END_S))
        return not self._thread.is_alive()

    def _run(self) -> None:
        work = self._work
        try:
            self._say(
                "preparing", f"engine {work.engine} may be faster than {work.against}", logging.INFO,
                "it is exported if needed, verified and timed in the background, and used if it is faster;"
                " --no-prepare disables this",
            )  # fmt: skip
            result = self._follow()
            if result is None or self._stopping.is_set():
                return
            finding, need = result
            # The process may have measured that another engine is the fastest.
            self._work = replace(work, engine=finding.engine)
            if not finding.taken:
                self._say("refused", finding.why, logging.INFO)
                return
            self._exchange(finding, need)
        except Exception as error:  # noqa: BLE001 - the server answers as before
            words = str(error) if isinstance(error, SinewError) else f"{type(error).__name__}: {error}"
            self._say("failed", f"engine {work.engine} was not prepared: {words}", logging.WARNING)

    def _follow(self) -> tuple[EngineFinding, MemoryNeed] | None:
        """Run the process ``sinew prepare``, and wait for its end.

        Returns:
            The stored result of the process; None if the process was ended together with the server.

        Raises:
            SinewError: The process has failed.
        """
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._stopping.is_set():
                    return None
                self._child = child = subprocess.Popen(
                    self._work.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    env={**os.environ, **ONE_THREAD}, start_new_session=True,
                )  # fmt: skip
            try:
                record = self._read(child)
                status = child.wait()
            finally:
                self._end(child)
            if self._stopping.is_set():
                return None
            errors.seek(0, os.SEEK_END)
            errors.seek(max(0, errors.tell() - MOST_LINE))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        if status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            name = {each.value: each.name for each in signal.Signals}.get(number, "unknown")
            why = (
                f"engine {self._work.engine} is not used, because the process that prepared it was ended by signal"
                f" {number} ({name}){', for example because memory was short' if number == 9 else ''};"
                f" to try again, run `sinew prepare {self._work.source} --again`"
            )
            return self._refused(why), MemoryNeed(0)
        if status or record is None:
            last = next((line for line in reversed(lines) if line.strip()), f"it ended with status {status}")
            raise SinewError(last.strip().removeprefix("error: ")[:500])
        try:
            finding = EngineFinding.parse(record, self._work.device, self._work.threads)
            return finding, MemoryNeed(int(record["need"]))
        except (KeyError, TypeError, ValueError):
            raise SinewError(
                f"the preparing process printed no valid result, but {named(record.get('text', record), 300)}"
            ) from None

    def _read(self, child: subprocess.Popen[str]) -> dict[str, Any] | None:
        """Log the progress reports of the preparing process. Return its last output that is not a progress report."""
        last: dict[str, Any] | None = None
        assert child.stdout is not None
        while line := child.stdout.readline(MOST_LINE):
            try:
                record = parse_json(line)
            except UntrustedError:
                # A library has printed this line.
                continue
            if not isinstance(record, dict):
                continue
            if "progress" in record:
                self._say(
                    "preparing",
                    f"preparing engine {self._work.engine}: {named(record['progress'], 300)}",
                    logging.INFO,
                )
            else:
                last = record
        return last

    def _end(self, child: subprocess.Popen[str]) -> None:
        """End the process if it is still running. Remove its files if it did not succeed."""
        if child.poll() is None:
            _signal(child, signal.SIGTERM)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                _signal(child, signal.SIGKILL)
                child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if child.returncode:
            self._work.sweep()

    def _exchange(self, finding: EngineFinding, need: MemoryNeed) -> None:
        work, service = self._work, self._service
        if need.total > (free := machine.memory()[1]):
            raise SinewError(
                f"memory: the new engine needs {need} in addition, and {free / 2**20:.0f} MiB are free"
            )
        self._say("exchanging", f"engine {work.engine} replaces engine {work.against}", logging.INFO)
        while not self._stopping.is_set():
            if service.policies.get() is not self._standing:
                self._say("refused", "another policy has replaced this policy in the meantime", logging.INFO)
                return
            try:
                took = service.swapper.load(
                    DEFAULT, work.source, need=need if need.total else None, check=self._check
                )
            except BusyError:
                self._stopping.wait(RETRY_S)
                continue
            except RequestError as error:
                self._say("refused", str(error), logging.INFO)
                return
            self._standing = service.policies.get()
            self._say(
                "taken", f"engine {work.engine} has replaced engine {work.against}", logging.INFO,
                f"{finding.why}; loaded in {took['load_s']:.1f} s while the old engine answered",
            )  # fmt: skip
            return

    def _check(self, deployment: Deployment) -> None:
        """Raise RequestError if the prepared engine lacks a function that robots of this server have used.

        The preparer stores this result, so that the next start does not prepare the same engine again.
        """
        if self._stopping.is_set():
            raise RequestError("the server is shutting down")
        now, then = (each.scheduler.policy for each in (self._standing, deployment))
        if (engine := then.engine_name) != self._work.engine:  # type: ignore[attr-defined]
            reason = deployment.metadata["server"]["engine_reason"]
            raise RequestError(f"expected engine {self._work.engine}, got {engine}: {reason}")
        before, after = now.facts, then.facts  # type: ignore[attr-defined]
        loses_batches = bool(then.unbatched) and not now.unbatched
        uses = self._service.uses
        lost = [
            f"real-time chunking with rtc {kind}" for kind in RTC if kind in uses and kind not in after.guides
        ]
        if STREAMED in uses and before.head_reads_state and not after.head_reads_state:
            lost.append("streams with the newest state")
        if self._standing.scheduler.batcher is not None and loses_batches:
            lost.append("batches of several requests")
        if lost:
            why = (
                f"engine {self._work.engine} is not used, because robots of this server have used"
                f" {' and '.join(lost)}, which only engine {self._work.against} supports; to try again, run"
                f" `sinew prepare {self._work.source} --again`"
            )
            raise RequestError(self._refused(why).why)

    def _refused(self, why: str) -> EngineFinding:
        """Store the result that the prepared engine is not used, with the reason ``why``, and return this result."""
        work = self._work
        finding = EngineFinding(
            work.engine, work.against, False, why, device=work.device, threads=work.threads
        )
        # If the folder is not writable, the next start prepares the engine again.
        with contextlib.suppress(OSError):
            finding.keep(work.bundle)
        return finding

    def _say(self, state: str, text: str, level: int, more: str = "") -> None:
        self._state = state, f"{text}: {more}" if more else text
        logger.log(level, "%s", self._state[1])


@contextlib.contextmanager
def compiling_frames() -> Iterator[None]:
    """Compile the kernels that resize frames, if they are not compiled yet.

    The compiler runs in a separate process that ends with this process.
    """
    if not frame_kernels.missing():
        if not frame_kernels.compiled.in_use:
            logger.info("frames are resized without compiled kernels; run `sinew doctor` for the reason")
        yield
        return
    logger.info("compiling kernels that resize frames, in the background; --no-prepare disables this")
    child = subprocess.Popen(
        [*python_module(), "sinew.engine.cpu.kernels.build", "--background"], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def take() -> None:
        if (status := child.wait()) == 0:
            frame_kernels.take_kept_resize.cache_clear()
            frame_kernels.take_kept_resize()
        elif status == 1:
            # Status 1 means that the compilation failed. Other codes mean that the process was ended
            # with the server.
            logger.warning(
                "numpy resizes frames, because the kernels were not compiled; run `sinew doctor` for the reason"
            )

    threading.Thread(target=take, name="sinew-frames", daemon=True).start()
    try:
        yield
    finally:
        child.terminate()
        if child.stdin is not None:
            child.stdin.close()
        # The process runs at the lowest priority, so on a busy machine it may get no CPU time to end.
        # The server does not wait longer: the signal stays pending, and the end of standard input ends
        # the process too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)


def python_module() -> list[str]:
    """Return the words before MODULE in the command that starts ``python -m MODULE``.

    The new process imports modules of the current folder only if this process does.
    """
    return [sys.executable, *([] if sys.path[:1] and sys.path[0] in ("", str(Path.cwd())) else ["-P"]), "-m"]


def _signal(child: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)

"""Start processes of Sinew that already have torch imported, which saves seconds for each process.

``run`` and ``Process`` do the same as ``subprocess.run`` and ``subprocess.Popen`` for ``python -m MODULE ...`` and
``python -c PROGRAM ...``. They start a process with its own environment, standard streams, signals and exit status.
The process is forked from a nursery. A nursery is a process for all test workers, which has imported torch and starts
no threads. Tests of the start of a process (its imports, their order, torch's variables) use ``subprocess``. Another
interpreter needs its own nursery with its own list of imports.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.shape_rounding import begin_if_asked

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = (
    "sinew",
    "torch",
    "numpy",
    "PIL.Image",
    "rich.console",
    "rich.live",
    "cyclopts",
    "gguf",
    "zmq.asyncio",
    "gymnasium",
    "prometheus_client",
    "tokenizers",
    "aiohttp.web",
    "msgpack",
    # The first operator of a trace and each export load these modules, which takes two to three CPU seconds in each
    # process.
    "torch._dynamo",
    "torch.export",
    "torch.onnx._internal.exporter._core",
    "onnxscript",
    # The commands themselves, and the modules of their policies, which take a second in each process.
    "sinew.cli.run",
    "sinew.cli.serve",
    "sinew.engine.loading",
    "sinew.engine.plan.engine",
    "sinew_eval.episodes.campaign",
    "sinew_eval.farm.shards",
    "sinew_eval.episodes.fitting",
    "sinew_eval.episodes.robot",
    "sinew_eval.foreign.server",
    "sinew_eval.episodes.variants",
    "sinew.families.smolvla.model",
    "sinew.policy",
    "sinew.serve.launch",
    "sinew.serve.process",
    "sinew.serve.wires.http",
    "sinew.serve.wires.native",
    "sinew.serve.wires.openpi",
)
# identifies a test run, for the processes that it starts
os.environ.setdefault("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
STARTING = (
    "sinew_eval.foreign.server",
    "sinew_eval.farm.shards",
)  # the modules that start processes of Sinew
PYTHON_IGNORES = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ") if hasattr(signal, name)]


class Process:
    """A process that runs ``command`` and is forked from a nursery.

    As a context manager, it waits for its end, as ``subprocess.Popen`` does. Its signals have the defaults of a new
    interpreter at a terminal, even if the test worker ignores a signal (SIGINT in the background of a script, SIGHUP
    under nohup).

    Args:
        command: The command. Its first word must be the interpreter of the nursery.
        stdin: None (that of the worker), a file, a descriptor, ``subprocess.PIPE`` or ``subprocess.DEVNULL``.
        stdout: As ``stdin``.
        stderr: As ``stdin``.
        env: Environment. None: that of the worker.
        cwd: Folder. None: that of the worker.
        start_new_session: Start a new session.
        ignored: Signals that the process ignores.
        forking: Also fork the servers and shards that the process starts, which saves three CPU seconds for each. They
            are then not children of the process.
        nursery: The nursery. None: that of this interpreter.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
        ignored: Sequence[signal.Signals] = (),
        forking: bool = False,
        nursery: Nursery | None = None,
    ):
        nursery = nursery or own_nursery()
        words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in command]
        assert words[0] == nursery.interpreter, f"expected {nursery.interpreter}, got {words[0]}"
        self.args, self.returncode = words, None
        ours: list[IO[str] | None] = []
        theirs: list[int] = []
        close: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            file, descriptor = None, number if stream is None else stream
            if stream == subprocess.PIPE:
                reader, writer = os.pipe()
                descriptor, kept = (reader, writer) if number == 0 else (writer, reader)
                file = os.fdopen(kept, "w" if number == 0 else "r", buffering=1 if number == 0 else -1)
                close.append(descriptor)
            elif stream == subprocess.DEVNULL:
                descriptor = os.open(os.devnull, os.O_RDWR)
                close.append(descriptor)
            elif not isinstance(stream, int) and stream is not None:
                descriptor = stream.fileno()
            ours.append(file)
            theirs.append(descriptor)
        self.stdin, self.stdout, self.stderr = ours
        request = {
            "words": words[1:],
            "env": dict(os.environ if env is None else env),
            "cwd": str(Path.cwd()) if cwd is None else os.fspath(cwd),
            "session": start_new_session,
            "ignored": list(map(int, ignored)),
            "forking": forking,
        }
        try:
            self._fate = nursery.fork(request, theirs)
        finally:
            for descriptor in close:
                os.close(descriptor)
        self.pid = int(self._line(None))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def _line(self, timeout: float | None) -> str | None:
        """Return the next line of the keeper, a process that waits for the end of this process. None after
        ``timeout`` seconds."""
        if not select.select([self._fate], [], [], timeout)[0]:
            return None
        return self._fate.readline()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            line = self._line(timeout)
            if line is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(line)
            self._fate.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the text that the process writes to its pipes until its end."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(file.read) if file else None for file in (self.stdout, self.stderr)]
            self.wait(timeout)
            out, err = (text.result() if text else "" for text in texts)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[object], *, timeout: float = 600.0, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` without input to its end. Returns its output.

    Raises:
        subprocess.TimeoutExpired: The process took too long and was killed.
        subprocess.CalledProcessError: The process failed, and ``check`` is True.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Process(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **options)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        for file in (out, err):
            file.seek(0)
        done = subprocess.CompletedProcess(process.args, process.returncode or 0, out.read(), err.read())
    if check:
        done.check_returncode()
    return done


_guards: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port that no other test gets while this process lives.

    The port is below the range that the system assigns automatically. This process also opens the UDP port with the
    same number, so that tests in other workers and other runs see that the port is taken.
    """
    for port in random.SystemRandom().sample(range(12_000, 32_000), 1000):
        guard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            try:
                guard.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError:
                guard.close()
            else:
                _guards.append(guard)
                return port
    raise OSError("no free port among a thousand; close other programs on this machine")


def popen(command: Sequence[object], *, text: bool = True, **options: Any) -> Process:
    """Start a process in place of ``subprocess.Popen`` in a module of Sinew."""
    return Process(command, **options)


# A replacement of the module `subprocess` in the modules that start processes.
FORKED = types.SimpleNamespace(PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired, Popen=popen)


class Nursery:
    """A process from which other processes are forked, one for all workers of a test run. It ends after its last
    worker."""

    def __init__(self, interpreter: str, imports: Sequence[str], env: Mapping[str, str] | None = None):
        self.interpreter, self._lock = interpreter, threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        run = os.environ["PYTEST_XDIST_TESTRUNUID"]
        found = (env or os.environ).get(
            "PYTHONPATH"
        )  # the path may contain another release of the same packages
        name = hashlib.sha256(repr((run, interpreter, imports, found)).encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"sinew-nursery-{name}"
        if len(os.fsencode(place)) > 100:  # the name of a socket has at most 104 bytes on some systems
            place = Path("/tmp") / place.name
        with _alone():
            if not place.exists():
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(place))
                    listener.listen()
                    command = [interpreter, "-m", "tests.processes", str(listener.fileno()), *imports]
                    self._process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[listener.fileno()])
            self._socket.connect(str(place))

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> IO[str]:
        """Start a process. Returns a file with the process id at once, and the exit code at the end."""
        fate, theirs = os.pipe()
        try:
            message = json.dumps(request).encode()
            with self._lock:
                self._socket.sendall(len(message).to_bytes(4, "big"))
                socket.send_fds(self._socket, [message[:1]], [*streams, theirs])
                self._socket.sendall(message[1:])
        finally:
            os.close(theirs)
        return os.fdopen(fate)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within the block, no other process of this user can start or end a nursery."""
    with (Path(tempfile.gettempdir()) / f"sinew-nurseries-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_making = threading.Lock()  # several threads of a test may start their processes at the same time


@cache
def _own_nursery() -> Nursery:
    return Nursery(sys.executable, PRELOAD)


def own_nursery() -> Nursery:
    """Return the nursery of this interpreter, which starts with the first process."""
    with _making:
        return _own_nursery()


def _request(worker: socket.socket) -> tuple[dict[str, Any], array.array]:
    """Return the next request with its four descriptors.

    Raises:
        EOFError: The worker has ended.
    """
    size = worker.recv(4, socket.MSG_WAITALL)
    if len(size) < 4:
        raise EOFError
    first, descriptors, _, _ = socket.recv_fds(worker, 1, 4)
    rest = worker.recv(int.from_bytes(size, "big") - 1, socket.MSG_WAITALL)
    return json.loads(first + rest), array.array("i", descriptors)


def _answer_signals(ignored: Sequence[int]) -> None:
    """Set every signal to the default of a new interpreter, except for the signals to ignore."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    usual = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(PYTHON_IGNORES, signal.SIG_IGN)}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # signals of the C library cannot be set
            signal.signal(number, signal.SIG_IGN if number in ignored else usual.get(number, signal.SIG_DFL))


def _keep(request: dict[str, Any], descriptors: array.array) -> list[str] | None:
    """Fork the process and wait for its end (in the keeper). In the new process, returns the words of the command."""
    *streams, fate = descriptors
    child = os.fork()
    if child:
        for descriptor in streams:
            os.close(descriptor)
        os.write(fate, f"{child}\n".encode())
        status = os.waitpid(child, 0)[1]
        os.write(fate, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        return None
    os.close(fate)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    _answer_signals(request["ignored"])
    begin_if_asked()
    if request["forking"]:
        for name in STARTING:
            importlib.import_module(name).subprocess = FORKED  # type: ignore[attr-defined]
    return request["words"]


def _standard_streams(write_through: bool) -> None:
    """Open the standard streams again, because their buffering depends on their present target."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) or write_through else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _run(words: list[str]) -> None:
    """Run a command in this process to its end, as the interpreter does."""
    flags = list(itertools.takewhile(("-u", "-P").__contains__, words))
    first, *rest = words[len(flags) :]
    _standard_streams("-u" in flags)
    own = [] if "-P" in flags else [str(Path.cwd()) if first in ("-m", "-c") else str(Path(first).parent)]
    sys.path[:1] = own + [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        text, name = rest[0], "<string>"
    else:
        sys.argv = [first, *rest]
        text, name = Path(first).read_text(), first
        main.__file__ = first
    exec(compile(text, name, "exec"), main.__dict__)


def _end(words: list[str]) -> NoReturn:
    """Run a command and exit as the interpreter does, without freeing memory that the process shares with others."""
    code: Any = 0
    try:
        _run(words)
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int) and code is not None:
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001, as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # wait for all threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def main() -> None:
    """Answer requests until all workers have ended. A forked process runs its command instead."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt concerns only the worker
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # an extra may not be installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # frozen objects are never collected, so their memory stays shared between the processes
    workers: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *workers], [], [])[0]:
            if ready is listener:
                workers.append(listener.accept()[0])
                continue
            try:
                request, descriptors = _request(ready)
            except (EOFError, OSError):  # OSError: the worker was killed
                ready.close()
                workers.remove(ready)
                continue
            if os.fork() == 0:
                for each in (listener, *workers):
                    each.close()
                words = _keep(request, descriptors)
                if words is None:
                    os._exit(0)
                _end(words)
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if not workers:
            with _alone():
                if not select.select([listener], [], [], 0)[0]:  # no worker has connected in the meantime
                    Path(listener.getsockname()).unlink()
                    return


if __name__ == "__main__":
    main()

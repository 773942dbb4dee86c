"""A reader at a shell, who types the lines of a page unchanged and checks the results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests import processes
from tests.journeys.pages import ROOT, lines, programs

# All hosts on the pages are replaced by this machine.
HOSTS = re.compile(r'(?<=[/"])(server|gpu|cloud|box|robot-gpu|gpu-machine|10\.0\.0\.[56])(?=:)')
WRONG = (
    "Traceback",
    "internal error",
    "fault of this program",
)  # a working command never prints these texts
LOOPBACK = "127.0.0.1"
PORTS = {5555: "native", 8000: "openpi"}  # the default ports of `sinew serve`


@dataclass
class Ran:
    """The result of a line: its exit status, its output, and its JSON result if there is one."""

    line: str
    status: int
    text: str
    result: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"$ {self.line}\nended with {self.status}\n{self.text[-6000:]}"


class Walk:
    """The lines of a page in one folder.

    The methods ``type``, ``serving`` and ``leaves`` require a line exactly as on the page. ``instead`` replaces a
    part of the line, such as a number of episodes. ``run`` and ``server`` accept any line, for the preconditions of a
    page.

    Args:
        page: A page of ``pages.PAGES``.
        folder: Folder in which the lines run. It links to the folders of the checkout.
        python: Interpreter of an environment with ``sinew``.
        quick: True to run plain lines of ``sinew`` in processes that start with torch imported (tests/processes.py).
            ``python`` is then this interpreter, and servers use free ports instead of the default ports.
        checkout: False to hide the checkout, so that only installed packages are found.
    """

    def __init__(
        self,
        page: str,
        folder: Path,
        python: Path = Path(sys.executable),
        *,
        quick: bool = False,
        checkout: bool = True,
    ):
        self.page, self.folder, self.python, self.quick = page, folder, python, quick
        self.lines = lines(page)
        self.walked: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for name in (
            "sinew",
            "docs",
            "examples",
            "packages",
            "eval",
            "benchmarks",
            "constraints.txt",
            "docker",
        ):
            if checkout and not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SINEW_", "PYTHON", "HF_", "PYTEST"))
        }
        if "PYTHONPATH" in os.environ:  # a checkout that is not installed
            kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
        self.environment = kept | {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / ".cache"),
        }
        self.ports = {port: processes.free_port() if quick else port for port in PORTS}
        if quick:
            wires = (f"{wire}:{self.ports[port]}" for port, wire in PORTS.items())
            self.environment["SINEW_SERVE_WIRE"] = " ".join(wires)

    # ------------------------------------------------------------------------- lines of the page

    def type(
        self,
        line: str,
        *,
        instead: tuple[str, str] | None = None,
        adds: str = "",
        says: tuple[str, ...] = (),
        status: int = 0,
        timeout: float = 900.0,
    ) -> Ran:
        """Type a line and wait for its end.

        Args:
            line: The line on the page.
            instead: A text in the line, and its replacement.
            adds: Text to append to the line.
            says: Patterns that the output must contain.
            status: Required exit status.
            timeout: Seconds.

        Raises:
            AssertionError: The status or the output is not as required, or the output contains an internal error.
        """
        return self.run(self._written(line, instead, adds), says=says, status=status, timeout=timeout)

    def serving(
        self, line: str, *, instead: tuple[str, str] | None = None, adds: str = "", says: tuple[str, ...] = ()
    ) -> contextlib.AbstractContextManager[Ran]:
        """Run a ``sinew serve ...`` of the page until the end of the block, as ``server`` does."""
        return self.server(self._written(line, instead, adds), says=says)

    def meant(self, line: str, instead: tuple[str, str]) -> str:
        """Return a line of the page with its replacement, for ``server`` or ``beside``."""
        return self._written(line, instead, "")

    def leaves(self, line: str, why: str) -> None:
        """State why a line of the page is not typed here."""
        self._written(line, None, "")
        print(f"  - {line}\n    not typed: {why}", flush=True)

    def program(self, number: int, *instead: tuple[str, str], before: str = "", after: str = "") -> Ran:
        """Run a program of the page.

        Args:
            number: Number of the program on the page.
            instead: Texts in the program, and their replacements.
            before: Code that the program assumes.
            after: Code that checks the result.
        """
        body = self._here(HOSTS.sub(LOOPBACK, programs(self.page)[number]))
        for old, new in instead:
            assert old in body, f"{self.page}, program {number}: the text {old!r} is not in it"
            body = body.replace(old, new)
        self.walked.add(f"program {number}")
        name = f"program{number}.py"
        self.write(name, f"{before}\n{body}\n{after}\n")
        return self.run(f"python {name}")

    def has(self, module: str) -> bool:
        """Return True if the environment contains an optional package."""
        found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", found], cwd=self.folder, check=False).returncode == 0

    def left(self) -> list[str]:
        """Return the lines and programs of the page that no story has mentioned."""
        numbered = [f"program {number}" for number in range(len(programs(self.page)))]
        return [each for each in [*self.lines, *numbered] if each not in self.walked]

    # ------------------------------------------------------------------------- any line

    def run(self, line: str, *, says: tuple[str, ...] = (), status: int = 0, timeout: float = 900.0) -> Ran:
        """Run any line, as ``type`` does."""
        result = self.folder / ".result.json"
        result.unlink(missing_ok=True)
        words = f"{line} --json={result}" if "sinew " in line and "&&" not in line else line
        print(f"  $ {line}", flush=True)
        begun = time.monotonic()
        said = self.folder / ".said.log"
        with said.open("w") as output:
            command = self._start(words, output)
            try:
                ended = command.wait(timeout)
            finally:
                command.kill()
        ran = Ran(line, ended, said.read_text())
        if result.exists():
            ran.result = json.loads(result.read_text())
        self._judge(ran, status, says)
        print(f"    {time.monotonic() - begun:.1f} s", flush=True)
        return ran

    @contextlib.contextmanager
    def server(self, line: str, *, says: tuple[str, ...] = ()) -> Iterator[Ran]:
        """Run ``sinew serve ...`` until the end of the block. It must print that it is ready, and exit with 0 after a
        signal."""
        print(f"  $ {line} &", flush=True)
        for port in self.ports.values():
            with socket.socket() as probe:
                assert probe.connect_ex((LOOPBACK, port)), f"port {port} is taken: {line} cannot run here"
        log = self.folder / ".server.log"
        with log.open("w") as output:
            server = self._start(f"exec {line}", output)
        ran = Ran(line, -1, "")
        try:
            while "ready on" not in (text := log.read_text()):
                assert server.poll() is None, f"$ {line}\nended with {server.returncode}\n{text}"
                time.sleep(0.05)
            ran.text = text
            yield ran
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()
            ran.status = server.wait()
            ran.text = log.read_text()
        self._judge(ran, 0, says)

    @contextlib.contextmanager
    def beside(self, line: str, says: tuple[str, ...] = ()) -> Iterator[Ran]:
        """Run a line until the end of the block, and end it with SIGTERM. It must exit with 0."""
        print(f"  $ {line} &", flush=True)
        log = self.folder / ".beside.log"
        ran = Ran(line, -1, "")
        with log.open("w") as output:
            command = self._start(f"exec {line}", output)
        try:
            yield ran
            assert command.poll() is None, f"$ {line}\nended with {command.returncode}\n{log.read_text()}"
        finally:
            if command.poll() is None:
                command.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(60)
            command.kill()
            ran.status = command.wait()
            ran.text = log.read_text()
        self._judge(ran, 0, says)

    def copy(self, source: Path, name: str) -> None:
        """Copy a file or folder into the folder of the lines."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)

    def write(self, name: str, text: str) -> None:
        """Write a file into the folder of the lines."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _written(self, line: str, instead: tuple[str, str] | None, adds: str) -> str:
        assert line in self.lines, f"{self.page} has no line\n{line}\nbut\n" + "\n".join(self.lines)
        self.walked.add(line)
        if instead is not None:
            assert instead[0] in line, f"{instead[0]!r} is not in {line}"
            line = line.replace(*instead)
        return HOSTS.sub(LOOPBACK, f"{line} {adds}".strip())

    def _here(self, text: str) -> str:
        """Return a line or program with the ports of this walk."""
        return re.sub(r"(?<=:)(\d{4})\b", lambda at: str(self.ports.get(int(at[1]), at[1])), text)

    def _start(self, line: str, output: IO[str]) -> subprocess.Popen[str] | processes.Process:
        """Start a shell line, and write its output to ``output``."""
        words = shlex.split((line := self._here(line)).removeprefix("exec "))
        if self.quick and words[0] == "sinew":
            command: list[object] = [sys.executable, "-m", *words]
            return processes.Process(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                forking=True,
            )
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )

    def _judge(self, ran: Ran, status: int, says: tuple[str, ...]) -> None:
        assert ran.status == status, f"expected {status}\n{ran}"
        for fault in WRONG:
            assert fault not in ran.text, f"{fault!r} is printed\n{ran}"
        for pattern in says:
            assert re.search(pattern, ran.text), f"{pattern!r} is not printed\n{ran}"


Story = Callable[[Walk], None]

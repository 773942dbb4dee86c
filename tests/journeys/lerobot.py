"""Run the commands on the page of LeRobot's plugin: ``python3.12 -m tests.journeys.lerobot 0.6.1`` (make lerobot).

The program creates an environment with the page's command for that release of LeRobot, and runs the page's commands
there: ten episodes with a server, ten episodes in LeRobot's own process, and a robot. At least eight of ten episodes
must succeed. It replaces the port, and the arm by a simulated gantry. It needs a package index. The torch on PyPI is
the build with CUDA, which needs 5.6 GB on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "packages" / "lerobot_policy_sinew" / "README.md"
ROBOT = ROOT / "tests" / "serve" / "lerobot_blocks.py"
ADDRESS, ARM_TASK = "tcp://127.0.0.1:5555", "pick up the cube"  # the address and the instruction on the page
TASK = "put the red block into the left bin"
EPISODES, SUCCESSES = 10, 8


def documented(program: str) -> list[str]:
    """Return the page's lines that begin with the name of a program, with their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = re.sub(r" *\\\n *", " ", "".join(blocks)).splitlines()
    return [line for line in lines if line.startswith(f"{program} ")]


def robot_line(release: str, bundle: Path, folder: Path) -> str:
    """Return the page's line that drives an arm, for a simulated gantry, whose module is written to ``folder``."""
    line = documented("lerobot-record" if release.startswith("0.4.") else "lerobot-rollout")[0]
    words = shlex.split(line.replace(ARM_TASK, TASK))
    words = [word for word in words if not word.startswith(("--robot.", "--policy.bundle="))]
    (folder / "robots").mkdir()
    (folder / "robots" / "__init__.py").touch()
    shutil.copy(ROBOT, folder / "robots" / "blocks.py")
    robot = ("--robot.type=blocks", "--robot.discover_packages_path=robots")
    return shlex.join([*words, f"--policy.bundle={bundle}", *robot])


def check_evaluation(folder: Path, episodes: int = EPISODES, least: int = SUCCESSES) -> str:
    """Return the number of successes in LeRobot's evaluation, as text.

    Raises:
        AssertionError: Too few episodes succeeded.
    """
    found = json.loads((folder / "eval_info.json").read_text())
    (task,) = found["per_task"]
    wins = task["metrics"]["successes"]
    assert len(wins) == episodes, wins
    assert sum(wins) >= least, wins
    return f"{sum(wins)} of {episodes} episodes"


class Reader:
    """A shell in the checkout, whose programs come from an environment."""

    def __init__(self, home: Path):
        self.home, self.work = home, home / "work"
        self.work.mkdir(exist_ok=True)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SINEW_"))},
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.work),
            "HF_LEROBOT_HOME": str(self.work / "data"),
            "HF_HUB_OFFLINE": "1",
            "ROBOT_LOG": str(self.work / "robot.json"),
        }

    def run(self, line: str, status: int = 0) -> None:
        """Run a line, whose exit status must be ``status``."""
        print(f"$ {line}", flush=True)
        started = time.monotonic()
        log = self.work / "log.txt"
        with log.open("w") as out:
            done = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )
        if done.returncode != status:
            sys.exit(f"{line}\nended with {done.returncode}\n{log.read_text()[-6000:]}")
        print(f"  {time.monotonic() - started:.0f} s", flush=True)

    @contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Run ``sinew serve ...`` until the end of the block. It must print that it is ready, and exit with status
        0."""
        print(f"$ {line} &", flush=True)
        with (self.work / "server.txt").open("w+") as log:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )
            try:
                while "ready on" not in (self.work / "server.txt").read_text():
                    if server.poll() is not None:
                        sys.exit(
                            f"{line}\nended with {server.returncode}\n{(self.work / 'server.txt').read_text()}"
                        )
                    time.sleep(0.1)
                yield
            finally:
                server.terminate()  # a program in the background of a shell ignores an interrupt
                server.wait(timeout=60)
        if server.returncode != 0:
            sys.exit(f"{line}\nended with {server.returncode}")


def install(release: str, home: Path) -> None:
    """Create an environment with the page's command for this release."""
    (line,) = (line for line in documented("pip install") if f"# LeRobot {release}," in line)
    wanted = tuple(map(int, re.findall(r"Python (\d+)\.(\d+)", line)[0]))
    if sys.version_info[:2] < wanted:
        sys.exit(f"LeRobot {release} needs Python {wanted[0]}.{wanted[1]} or newer: make lerobot PYTHON=...")
    venv.create(home, with_pip=True)
    Reader(home).run(line)


def follow(release: str, home: Path) -> list[str]:
    """Run the page's commands. Returns one sentence for each result."""
    reader = Reader(home)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (serve,) = documented("sinew serve")
    found = []
    with reader.serving(f"{serve} --wire native:{port}"):
        for number, line in enumerate(documented("lerobot-eval")):
            out = reader.work / f"eval-{number}"
            reader.run(f"{line.replace(ADDRESS, f'tcp://127.0.0.1:{port}')} --output_dir={out}")
            found.append(f"{line}: {check_evaluation(out)}")
    line = robot_line(release, ROOT / "sinew" / "assets" / "blocks.gguf", reader.work)
    # At the end of its episode, the gantry interrupts the program: lerobot-rollout then exits with 0, lerobot-record
    # with 130.
    reader.run(line, status=130 if line.startswith("lerobot-record") else 0)
    log = json.loads((reader.work / "robot.json").read_text())
    assert log["success"], log
    return [*found, f"a robot: a block in its bin after {log['commands']} commands"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", nargs="?", default="0.6.1", help="of LeRobot: 0.6.1 or 0.4.4")
    parser.add_argument(
        "--environment",
        type=Path,
        help="an existing environment (default: a new one, which is removed at the end)",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sinew-lerobot-") as folder:
        home = given.environment or Path(folder) / "environment"
        if given.environment is None:
            install(given.release, home)
        shutil.rmtree(home / "work", ignore_errors=True)
        print("\n".join(follow(given.release, home)))


if __name__ == "__main__":
    main()

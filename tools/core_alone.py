"""Test the wheels of `sinew` and its client alone, without the other distributions: ``make core``.

    python -m tools.core_alone [PYTEST ARGUMENTS]

The program builds both wheels and installs them into a new environment. This environment has all packages of the
present environment, except for the distributions of this checkout. Commands and a few tests then run in a folder
outside of the checkout. This takes about two minutes and needs no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.installs import bare_environment, uv

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("packages/sinew-client", ".")
# These tests of the core need no simulated task. There is one file or folder for each part of the path of a request.
TESTS = (
    "tests/bundle",
    "tests/contract/test_targets.py",
    "tests/processing",
    "tests/serve/test_fair_queue.py",
    "tests/test_providers.py",
)
EVERY_MODULE = """
import importlib, pkgutil, sys, sinew, sinew_client
from sinew.core.extras import EXTRAS
absent = []
for package in (sinew_client, sinew):
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if each.name.endswith(("__main__", "_pb2")):
            continue
        try:
            importlib.import_module(each.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in {*EXTRAS, "triton", "mujoco"}:
                absent.append(f"{each.name}: {error}")
others = [name for name in sys.modules if name.partition(".")[0] in ("sinew_perf", "sinew_eval", "research")]
assert not absent and not others, (absent, others)
"""
PROGRAM = """
import numpy as np
import sinew

policy = sinew.load("blocks")
images = {each.name: np.zeros((each.height, each.width, 3), np.uint8) for each in policy.spec.cameras}
state = np.zeros(policy.spec.state.dim, np.float32)
chunk = policy.infer({"images": images, "state": state, "prompt": "red block, left bin"})
assert chunk.actions.shape == (policy.spec.chunk_size, policy.spec.action.dim)
"""


@dataclass(frozen=True)
class Command:
    """A command line, its required exit status, and a text that it must print."""

    words: tuple[str, ...]
    status: int = 0
    prints: str = ""


COMMANDS = (
    Command(("-m", "sinew", "--help"), prints="Not installed:"),
    Command(
        ("-m", "sinew", "doctor", "blocks"), prints="weights only: the package sinew-perf counts activations"
    ),
    Command(
        ("-m", "sinew", "perf", "need", "--rate", "10"),
        2,
        "sinew perf is in the package sinew-perf: pip ",
    ),
    Command(
        ("-m", "sinew", "eval", "blocks", "--episodes", "2"),
        2,
        "sinew eval is in the package sinew-eval: pip ",
    ),
    Command(
        ("-m", "sinew", "run", "blocks", "--robot", "blocks", "--episodes", "1"),
        1,
        "sinew run --robot blocks is in the package sinew-eval: pip ",
    ),
    Command(
        ("-c", "import sinew; sinew.evaluate"), 1, "sinew.evaluate is in the package sinew-eval: pip install"
    ),
    Command(("-c", PROGRAM)),
    Command(("-c", EVERY_MODULE)),
)


def environment(home: Path) -> Path:
    """Create the environment. Returns its interpreter."""
    wheels = home / "wheels"
    for folder in FOLDERS:
        build = [*uv(), "build", "--no-config", "--quiet", "--no-build-isolation", "--python", sys.executable]
        subprocess.run(
            [*build, "--wheel", "--out-dir", str(wheels), str(ROOT / folder)],
            check=True,
            env=bare_environment(),
        )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "env")], check=True)
    python = home / "env" / "bin" / "python"
    (site,) = (home / "env" / "lib").glob("python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "sinew" not in path.name and path.name != "__pycache__":
            (site / path.name).symlink_to(path)
    subprocess.run(
        [*uv(), "pip", "install", "--no-config", "--quiet", "--no-deps", "--offline", "--python", str(python)]
        + [str(path) for path in wheels.glob("*.whl")],
        check=True,
        env=bare_environment(),
    )
    return python


def run(command: Command, python: Path, folder: Path, variables: dict[str, str]) -> None:
    """Run a command outside of the checkout.

    Raises:
        SystemExit: The command exits with another status, or does not print the required text.
    """
    done = subprocess.run(
        [str(python), *command.words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    text = " ".join(f"{done.stdout} {done.stderr}".split())
    shown = " ".join(command.words)[:60].replace("\n", " ")
    if done.returncode != command.status or command.prints not in text:
        raise SystemExit(
            f"{shown}: expected status {command.status} and {command.prints!r}, got {done.returncode}: {text}"
        )
    print(f"ok: {shown}", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sinew-core-") as name:
        home = Path(name)
        python, work = environment(home), home / "work"
        work.mkdir()
        variables = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SINEW_"))
        }
        variables["COLUMNS"] = "200"
        for command in COMMANDS:
            run(command, python, work, variables)
        for folder in ("tests", "benchmarks", "tools", "docs"):
            shutil.copytree(ROOT / folder, work / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / file, work)
        (site,) = (home / "env" / "lib").glob("python*/site-packages")
        (work / "sinew").mkdir()
        for folder in (
            "assets",
            "families",
        ):  # the tests look for policies and reference data in these folders
            (work / "sinew" / folder).symlink_to(site / "sinew" / folder)
        words = ["-m", "pytest", "-q", "-m", "not slow and not gpu and not kernels", *(sys.argv[1:] or TESTS)]
        return subprocess.run([str(python), *words], cwd=work, env=variables, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())

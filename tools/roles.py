"""Install wheels into an empty environment for each role, and run the commands of the README: ``python -m
tools.roles``.

``make roles`` runs this program. It builds the wheels once, installs each role as docker/install.sh does, and runs
the role's commands in README.md unchanged. It prints sizes and import times. It needs a package index and takes
minutes. The files in the commands (policy.gguf, front.jpg, records/) are in the folder in which they run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cases import golden_cases
from tests.journeys.stories import GANTRY, ROBOT, STORIES, arm
from tests.journeys.walk import Walk

ROOT = Path(__file__).resolve().parents[1]
CASE = "smolvla-2cam"
ROLES = {
    "client": "sinew_client",
    "onnx": "sinew",
    "cpu": "sinew",
}  # role -> the module whose import is timed
# The role onnx supports these commands. All others need torch.
PAGES = ("README.md", "docs/commands.md")
ONNX = ("sinew inspect", "sinew infer", "sinew bench", "sinew doctor")


class Role:
    """An environment whose programs are found first, and a folder in which the commands run."""

    def __init__(self, name: str, home: Path, wheels: Path):
        self.name, self.home, self.work = name, home / "env", home / "work"
        self.work.mkdir(parents=True)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SINEW_"))},
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(home / "cache"),
            "HOME": str(home),
        }
        extras = {"cpu": "onnx-export,sim,hub"}.get(name, "")
        started = time.monotonic()
        subprocess.run(
            [ROOT / "docker" / "install.sh", name, self.home],
            check=True,
            env={**os.environ, "PYTHON": sys.executable, "WHEELS": str(wheels), "EXTRAS": extras},
        )
        self.seconds = time.monotonic() - started

    def walk(self, page: str = "README.md") -> Walk:
        """Return the commands of a page for this environment, which cannot find the checkout."""
        return Walk(page, self.work, self.home / "bin" / "python", checkout=False)

    def row(self) -> str:
        """Return a row of the table: packages, bytes, and the import times as medians of five."""
        python = str(self.home / "bin" / "python")
        packages = subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze"],
            capture_output=True, text=True, check=True, env=self.environment,
        ).stdout.split()  # fmt: skip
        bare = [p for p in packages if not p.startswith(("pip==", "setuptools=="))]
        site = next((self.home / "lib").glob("python*/site-packages"))
        tools = sum(size(path) for pattern in ("pip", "pip-*", "setuptools*") for path in site.glob(pattern))
        times = {}
        for what in ("pass", f"import {ROLES[self.name]}"):
            runs = []
            for _ in range(5):
                started = time.perf_counter()
                subprocess.run([python, "-c", what], check=True, env=self.environment)
                runs.append(time.perf_counter() - started)
            times[what] = statistics.median(runs)
        bare_s, with_s = times.values()
        return (
            f"| {self.name} | {len(bare)} | {(size(self.home) - tools) / 1e6:.0f} MB | {self.seconds:.0f} s |"
            f" {with_s - bare_s:.2f} s (python itself {bare_s:.2f} s) |"
        )


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def healthcheck() -> str:
    """Return the command of the health check in docker/Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (words,) = re.findall(r"^HEALTHCHECK .*\\\n +(\[.*\])$", text, re.MULTILINE)
    return shlex.join(json.loads(words))


def torch_free(walk: Walk, verbs: Walk, exported: Path) -> None:
    """Run the commands that need no torch, on a folder of `sinew export` from another role."""
    arm(walk)
    walk.copy(exported, "policy.gguf")  # the README uses this name
    for line in verbs.lines:
        if line.startswith(ONNX):
            verbs.type(line)
    walk.program(0, before=GANTRY)
    with walk.serving("sinew serve policy.gguf"):
        verbs.type("sinew bench tcp://127.0.0.1:5555")
        walk.program(1, before=ROBOT)
        walk.run(healthcheck())
    walk.run("""python -c 'from importlib.util import find_spec; assert find_spec("torch") is None'""")


def export(home: Path) -> Path:
    """Return a folder of `sinew export` with the policy of the README, written by this interpreter's sinew."""
    policy, folder, case = home / "policy.gguf", home / "robot", golden_cases() / CASE
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'packages' / 'sinew-client' / 'src'}"}
    for words in (
        ("convert", case / "checkpoint", policy, "--vlm", case / "vlm"),
        ("export", policy, "--onnx", folder),
    ):
        subprocess.run(
            [sys.executable, "-m", "sinew", *words], check=True, env=environment, stdout=subprocess.DEVNULL
        )
    return folder


def build(home: Path) -> Path:
    """Build wheels of the distributions from the files that a clone of this checkout has. Returns their folder."""
    wheels, builder = home / "wheels", home / "builder"
    subprocess.run([sys.executable, "-m", "venv", builder], check=True)
    pip = [builder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [
            *pip,
            "wheel",
            "--no-deps",
            "--wheel-dir",
            wheels,
            ROOT / "packages" / "sinew-client",
            ROOT / "eval",
            ROOT / "perf",
            ROOT,
        ],
        check=True,
    )
    for wheel in sorted(wheels.glob("*.whl")):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    return wheels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roles", nargs="*", default=list(ROLES), help="client, onnx or cpu (default: all)")
    chosen = parser.parse_args().roles
    rows = []
    with tempfile.TemporaryDirectory(prefix="sinew-roles-") as folder:
        home = Path(folder)
        wheels = build(home)
        exported = None
        if "cpu" in chosen:
            print(
                "cpu: all engines for a CPU, and all commands in README.md and docs/commands.md", flush=True
            )
            complete = Role("cpu", home / "cpu", wheels)
            for page in PAGES:
                STORIES[page](complete.walk(page))
            rows.append(complete.row())
            exported = complete.work / "robot"
        if "onnx" in chosen or "client" in chosen:
            print("onnx: a server without torch", flush=True)
            light = Role("onnx", home / "onnx", wheels)
            torch_free(light.walk(), light.walk(PAGES[1]), exported or export(home))
            rows.append(light.row())
        if "client" in chosen:
            print("client: a robot", flush=True)
            robot = Role("client", home / "client", wheels)
            with light.walk().serving("sinew serve policy.gguf"):
                robot.walk().program(1, before=ROBOT)
            rows.append(robot.row())
    print("\n| role | packages | on disk | installed in | import |\n|---|---|---|---|---|")
    print("\n".join(reversed(rows)))


if __name__ == "__main__":
    main()

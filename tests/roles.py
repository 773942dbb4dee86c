"""Wheels into empty environments, one per role, with the README's commands: ``python -m tests.roles`` (make roles).

Builds the two wheels once, installs each role as docker/install.sh does, runs that role's lines of README.md as they
stand there, and prints sizes and import times. It needs a package index and takes minutes. Files that the lines
name (policy.gguf, front.jpg, records/) lie in the folder in which they run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cases import golden_cases

ROOT = Path(__file__).resolve().parents[1]
CASE = "smolvla-2cam"
NATIVE = "tcp://127.0.0.1:5555"
ROLES = {"client": "sinew_client", "onnx": "sinew", "cpu": "sinew"}  # role -> what is imported
# Lines of the README that a role cannot run, and what is said instead; everything else has to end with 0.
FAILS = {("cpu", "sinew tune"): "finds no CUDA device"}
# What the onnx role is for; the other lines need torch.
ONNX = ("sinew inspect", "sinew infer", "sinew serve", "sinew client", "sinew bench", "sinew doctor")
SERVED = ("sinew client", "sinew top", "sinew run")  # lines that talk to a running `sinew serve`
ENDLESS = ("sinew top", "sinew run")  # until somebody ends them: given --seconds
BLOCKS = ("sinew run", "sinew eval")  # lines that play the embedded task, with its policy


class Role:
    """An environment in which words are found first, and a folder in which they run."""

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

    def run(self, line: str, fails: str | None = None, timeout: int = 1200) -> None:
        """Run one line of a shell. fails: what is said by a line that must not succeed here."""
        print(f"  $ {line}", flush=True)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        said = done.stdout + done.stderr
        if "Traceback" in said or (done.returncode != 0) != (fails is not None) or (fails or "") not in said:
            sys.exit(f"{self.name}: {line}\nended with {done.returncode}\n{said[-4000:]}")

    @contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Run `sinew serve ...` while inside; it has to say that it is ready, and to end with 0."""
        print(f"  $ {line} &", flush=True)
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert server.stdout is not None
            said = ""
            while "ready on" not in said:
                if not (part := server.stdout.readline()):
                    sys.exit(f"{self.name}: {line}\n{said}")
                said += part
            yield
        finally:
            server.terminate()
            rest = server.communicate(timeout=60)[0]
        if server.returncode != 0:
            sys.exit(f"{self.name}: {line} ended with {server.returncode}\n{said}{rest}")

    def row(self) -> str:
        """Return a line of the table: packages, bytes, and how long imports take, medians of five."""
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
    """Return the bytes of a file, or of a folder's files."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def readme() -> tuple[list[str], list[str]]:
    """Return the commands and the Python programs of "Use it" in README.md."""
    section = (ROOT / "README.md").read_text().split("## Use it")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL)
    text = next(body for kind, body in blocks if not kind).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    commands = [line for line in lines if line.startswith("sinew ")]
    return commands, [body for kind, body in blocks if kind == "python"]


def healthcheck() -> str:
    """Return the line by which an image of docker/Dockerfile is asked for its health."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (words,) = re.findall(r"^HEALTHCHECK .*\\\n +(\[.*\])$", text, re.MULTILINE)
    return shlex.join(json.loads(words))


def matches(line: str, words: tuple[str, ...]) -> bool:
    return line.startswith(words)


# What the README's programs take for granted.
PRELUDE = """
import numpy as np
front = wrist = np.zeros((480, 640, 3), np.uint8)
state = np.zeros(6, np.float32)
observation = {"images": {"camera1": front, "camera2": wrist}, "state": state, "prompt": "pick up the red cube"}
"""


def furnish(role: Role) -> None:
    """Put the files that the README's lines name into the folder where they run."""
    case = golden_cases() / CASE
    shutil.copytree(case / "checkpoint", role.work / "my_smolvla")
    shutil.copytree(case / "vlm", role.work / "SmolVLM2-500M-Video-Instruct")
    picture = (
        "from PIL import Image; [Image.new('RGB', (640, 480)).save(f) for f in ('front.jpg', 'wrist.png')]"
    )
    subprocess.run(
        [role.home / "bin" / "python", "-c", picture], cwd=role.work, check=True, env=role.environment
    )


def full(role: Role) -> None:
    """All commands and programs of the README."""
    furnish(role)
    commands, programs = readme()
    local, remote = programs
    replay = next(line for line in commands if "--replay" in line)
    serve = next(line for line in commands if line.startswith("sinew serve policy.gguf"))
    talking = [line for line in commands if matches(line, SERVED)]
    plain = [line for line in commands if line not in (replay, serve, *talking)]
    for line in plain:
        if not matches(line, BLOCKS):
            fails = next(
                (
                    text
                    for (name, words), text in FAILS.items()
                    if name == role.name and line.startswith(words)
                ),
                None,
            )
            role.run(line, fails)
    (role.work / "local.py").write_text(PRELUDE + local)
    role.run("python local.py")
    (role.work / "remote.py").write_text(PRELUDE + remote.replace("robot-gpu", "127.0.0.1"))
    with role.serving(f"{serve} --record records/"):
        for line in talking:
            if not matches(line, BLOCKS):
                role.run(line + " --seconds 5" * matches(line, ENDLESS))
        role.run("python remote.py")
    with role.serving(replay):
        role.run("python remote.py")
    shutil.copyfile(ROOT / "sinew" / "assets" / "blocks.gguf", role.work / "policy.gguf")
    with role.serving(serve):
        for line in filter(lambda line: matches(line, BLOCKS), talking):
            role.run(f"{line} --seconds 5")
    for line in filter(lambda line: matches(line, BLOCKS), plain):
        role.run(line)


def torch_free(role: Role, exported: Path) -> None:
    """What needs no torch, over a folder of `sinew export` that the full role has written."""
    furnish(role)
    shutil.copytree(exported, role.work / "policy.gguf")  # the README's lines call it so
    commands, programs = readme()
    for line in commands:
        if matches(line, ONNX) and not matches(line, ("sinew serve", *SERVED)):
            role.run(line)
    (role.work / "local.py").write_text(PRELUDE + programs[0])
    role.run("python local.py")
    (role.work / "remote.py").write_text(PRELUDE + programs[1].replace("robot-gpu", "127.0.0.1"))
    with role.serving(next(line for line in commands if line.startswith("sinew serve policy.gguf"))):
        role.run(next(line for line in commands if line.startswith("sinew client")))
        role.run("python remote.py")
        role.run(healthcheck())
    role.run("""python -c 'from importlib.util import find_spec; assert find_spec("torch") is None'""")


def export(home: Path) -> Path:
    """Return a folder of `sinew export` with the README's policy, written by this interpreter's own sinew."""
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
    """Return a folder with wheels of both distributions, made of what a clone of this checkout has."""
    wheels, builder = home / "wheels", home / "builder"
    subprocess.run([sys.executable, "-m", "venv", builder], check=True)
    pip = [builder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT / "packages" / "sinew-client", ROOT],
        check=True,
    )
    for wheel in sorted(wheels.glob("*.whl")):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    return wheels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roles", nargs="*", default=list(ROLES), help="client, onnx, cpu; all if absent")
    chosen = parser.parse_args().roles
    rows = []
    with tempfile.TemporaryDirectory(prefix="sinew-roles-") as folder:
        home = Path(folder)
        wheels = build(home)
        exported = None
        if "cpu" in chosen:
            print("cpu: every engine, and everything that the README shows", flush=True)
            complete = Role("cpu", home / "cpu", wheels)
            full(complete)
            rows.append(complete.row())
            exported = complete.work / "robot"
        if "onnx" in chosen or "client" in chosen:
            print("onnx: a server without torch", flush=True)
            light = Role("onnx", home / "onnx", wheels)
            torch_free(light, exported or export(home))
            rows.append(light.row())
        if "client" in chosen:
            print("client: a robot", flush=True)
            robot = Role("client", home / "client", wheels)
            (robot.work / "remote.py").write_text(PRELUDE + readme()[1][1].replace("robot-gpu", "127.0.0.1"))
            with light.serving("sinew serve policy.gguf"):
                robot.run("python remote.py")
            rows.append(robot.row())
    print("\n| role | packages | on disk | installed in | import |\n|---|---|---|---|---|")
    print("\n".join(reversed(rows)))


if __name__ == "__main__":
    main()

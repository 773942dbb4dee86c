"""Check every install command of this repository with the public package index: ``python -m tools.installs``.

``make installs`` runs this program. The commands come from the README, the pages, the packages, the Makefile (as
``make -n`` prints them) and docker/install.sh (run for each role with a script instead of Python). uv resolves each
command for Python 3.11 to 3.14, without local wheels and configuration files. uv downloads only metadata. (pip's own
``--dry-run`` downloads whole wheels, 2.8 GB for torch.) The program then prints a table of platform x Python x role
with packages and bytes. Last, it compares the download sizes in the documents with the index.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging import tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
CLIENT, EVAL, PERF = "./packages/sinew-client", "./eval", "./perf"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST = {"client": ("3.8", *PYTHONS)}  # robots have old distributions of Linux
# Key: platform as people name it. Value: uv's name, and the tags of wheels that run there, best first.
LINUX = [f"manylinux_2_{minor}_{{0}}" for minor in range(39, 4, -1)]
PLATFORMS: dict[str, tuple[str, list[str]]] = {
    "Linux x86-64": (
        "x86_64-manylinux_2_39",
        [each.format("x86_64") for each in (*LINUX, "manylinux2014_{0}", "linux_{0}")],
    ),
    "Linux aarch64": (
        "aarch64-manylinux_2_39",
        [each.format("aarch64") for each in (*LINUX, "manylinux2014_{0}", "linux_{0}")],
    ),
    "macOS 14 arm64": ("aarch64-apple-darwin", list(tags.mac_platforms((14, 0), "arm64"))),
    "Windows x86-64": ("x86_64-pc-windows-msvc", ["win_amd64"]),
}
HOME = "Linux x86-64"
ROLES = {
    "client": [CLIENT],
    "demo": [CLIENT, ".[demo]", EVAL],
    "onnx": [CLIENT, ".[onnx]"],
    "full": [CLIENT, ".[full]", EVAL, PERF],
    "everything": [CLIENT, ".[dev,sim]", EVAL, PERF],
}
UNCONSTRAINED = {"client"}  # the version ranges of this role are wide, for old robots

OURS = (
    "sinew-vla",
    "sinew-vla-client",
    "sinew-vla-eval",
    "sinew-vla-perf",
)  # constraints.txt has no line for these packages

# Key: text of a command that is not checked. Value: the reason.
EXEMPT = {
    "pip install '...[rerun]'": "is part of a quoted message; the text below it has the complete command",
    "pip install -e './my-arm[test]'": "installs a package that the user created; tests/cli/test_new.py checks it",
}
WORDS = re.compile(
    r"\b(?:pip|uv)3?[\"']?(?:\[@\][^ ]*)? +(?:-\S+ +)*(?:install|download|wheel|sync|pip|add|lock|tool)\b"
)
START = re.compile(r"(?:\S*python\S* -m )?\S*\b(?:pip|uv)3? .*")
VALUED = (
    "-c",
    "--constraint",
    "-d",
    "--target",
    "--index-url",
    "--extra-index-url",
    "--python",
    "--torch-backend",
    "--wheel-dir",
)
FLAGS = (
    "-q",
    "--quiet",
    "--disable-pip-version-check",
    "--no-build-isolation",
    "--only-binary=:all:",
    "--system-site-packages",
)


@dataclass
class Line:
    """One install command.

    Attributes:
        where: File that contains the command.
        names: Packages, as on the command line.
        uv: True for a command of uv, which reads [tool.uv].
    """

    where: str
    text: str
    names: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    constrained: bool = False
    alone: bool = False  # --no-deps
    newest: bool = False  # --ignore-requires-python: the package is for the newest Python only
    uv: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """The question to the index. Equal commands are resolved only once."""
        return (*self.names, None, *self.files, self.constrained, self.alone, self.uv)


def parse(where: str, text: str) -> Line:
    """Parse an install command.

    Raises:
        ValueError: The command contains an unknown word, so it cannot be checked.
    """
    words = shlex.split(text.split(" && ", maxsplit=1)[0], comments=True)
    line = Line(where, text)
    while words and (
        re.fullmatch(r"\S*python[\d.]*", words[0]) or words[0] == "-m" or re.fullmatch(r"\w+=.*", words[0])
    ):
        words.pop(0)
    if not words or not re.fullmatch(r"(?:.*/)?(?:pip3?|uv)", words[0]):
        raise ValueError(f"{where}: {text}: expected pip or uv")
    if line.uv or words[0].endswith("uv"):
        line.uv = True
        words = words[2:] if words[1:2] == ["pip"] else words[1:]
    else:
        words = words[1:]
    verb = None
    while words:
        word = words.pop(0)
        if word in ("-c", "--constraint"):
            if words.pop(0).rsplit("/")[-1] != "constraints.txt":
                raise ValueError(f"{where}: {text}: expected -c constraints.txt")
            line.constrained = True
        elif word in VALUED:
            words.pop(0)
        elif word in ("-r", "--requirement"):
            line.files.append(words.pop(0))
        elif word in ("-e", "--editable"):
            line.names.append(words.pop(0))
        elif word == "--no-deps":
            line.alone = True
        elif word == "--ignore-requires-python":
            line.newest = True
        elif word in FLAGS or word.startswith(("--torch-backend=", "--progress-bar=")):
            continue
        elif verb is None and word in ("install", "wheel", "download"):
            verb = word
        elif verb and not word.startswith("-"):
            line.names.append(word)
        else:
            raise ValueError(f"{where}: {text}: {word!r} is unknown; add it to tools/installs.py")
    if not verb or not (line.names or line.files):
        raise ValueError(f"{where}: {text}: expected the name of a package")
    return line


# ----------------------------------------------------------------------------- where the commands are


def pages() -> list[Path]:
    """Return the documents. research/log describes the past, so it is left out."""
    found = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
    own = [ROOT / "eval" / "README.md", ROOT / "perf" / "README.md"]
    return [*found, *sorted((ROOT / "packages").glob("*/README.md")), *own]


def written(text: str) -> list[str]:
    """Return the install commands in the blocks and sentences of a document."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    blocks += ["\n".join(each) for each in [re.findall(r"^ {4}\S.*$", text, re.MULTILINE)]]
    lines = [line.strip() for block in blocks for line in block.splitlines() if WORDS.search(line)]
    lines += [
        found.replace("\n", " ")
        for found in re.findall(
            r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        )
    ]
    return [START.search(line)[0] for line in lines if WORDS.search(line) and START.search(line)]  # type: ignore[index]


def of_documents() -> list[Line]:
    found = []
    for path in pages():
        for text in written(path.read_text()):
            bare = " ".join(re.sub(r"\s#.*", "", text).split())
            if bare not in EXEMPT:
                found.append(parse(str(path.relative_to(ROOT)), bare))
    return found


def unseen() -> list[str]:
    """Return the lines of documents that mention an installer and that :func:`written` did not find."""
    missed = []
    for path in pages():
        text = path.read_text()
        seen = " ".join(" ".join(written(text)).split())
        for found in WORDS.finditer(text):
            words = " ".join(text[found.start() : text.find("\n", found.start())].split("`")[0].split())
            if " ".join(re.sub(r"\s#.*", "", words).split()).rstrip(" \\") not in seen:
                missed.append(f"{path.relative_to(ROOT)}: {words}")
    return missed


def of_makefile() -> list[Line]:
    """Return the install commands that the targets of the Makefile would run.

    Raises:
        ValueError: The Makefile contains other commands of pip.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(
            ["make", "-n", "env", "clients", "docs", f"VENV={folder}/env", f"PYTHON={sys.executable}", "TORCH_INDEX="],
            cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "MAKEFLAGS": ""},
        ).stdout.replace("\\\n", " ")  # fmt: skip
    lines = [line.strip() for line in said.splitlines() if re.search(r"-m pip ", line)]
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    written_there = [
        line
        for line in recipes
        if line.startswith("\t") and re.search(r"\$\(PIP\)|-m pip|\buv ", line)
        if ".venv-ros/" not in line  # the packages of this environment exist only for Python 3.11
    ]
    if len(lines) != len(written_there):
        raise ValueError(
            f"Makefile: expected {len(written_there)} installs in env, clients and docs, got {len(lines)}"
        )
    return [parse("Makefile", line) for line in lines]


STAND_IN = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    for last; do :; done
    mkdir -p "$last/bin" && cp "$0" "$last/bin/python"
elif [ "$1 $2" = "-m pip" ]; then
    for word; do printf '%s\\0' "$word" >> "$RECORD"; done
    printf '\\n' >> "$RECORD"
fi
"""


def of_docker() -> list[Line]:
    """Return the install commands that docker/install.sh runs for each role, with the extras of the image."""
    found = []
    extras = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        python, wheels, record = home / "python", home / "wheels", home / "record"
        python.write_text(STAND_IN)
        python.chmod(0o755)
        wheels.mkdir()
        local = {
            str(wheels / "sinew_vla_client-0.whl"): CLIENT,
            str(wheels / "sinew_vla_eval-0.whl"): EVAL,
            str(wheels / "sinew_vla_perf-0.whl"): PERF,
            str(wheels / "sinew_vla-0.whl"): ".",
        }
        for wheel in local:
            Path(wheel).touch()
        for role in ("client", "onnx", "cpu", "cuda", "jetson"):
            record.unlink(missing_ok=True)
            subprocess.run(
                [ROOT / "docker" / "install.sh", role, home / role],
                check=True,
                env={
                    **os.environ,
                    "PYTHON": str(python),
                    "WHEELS": str(wheels),
                    "EXTRAS": extras[0],
                    "RECORD": str(record),
                },
            )
            for words in record.read_text().splitlines():
                text = shlex.join(["python", *words.split("\0")[:-1]])
                for wheel, name in local.items():
                    text = text.replace(wheel, name)
                found.append(parse(f"docker/install.sh {role}", text))
    return found


def all_lines() -> list[Line]:
    """Return all install commands.

    Raises:
        ValueError: A command cannot be checked.
    """
    if missed := unseen():
        raise ValueError(
            "\n".join(
                [
                    "install commands that tools/installs.py cannot parse; change its function `written`:",
                    *missed,
                ]
            )
        )
    return [*of_documents(), *of_makefile(), *of_docker()]


# ----------------------------------------------------------------------------- the package index


class RefusedError(Exception):
    """The index cannot provide the packages of a command."""


def uv() -> list[str]:
    if found := shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        return [found]
    raise SystemExit("uv is not installed; run `make env`")


def bare_environment() -> dict[str, str]:
    """Return the environment variables without settings of package indexes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON"))}
    return {**kept, "UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": "14.0", "NO_COLOR": "1"} | {
        key: os.environ[key] for key in ("UV_CACHE_DIR",) if key in os.environ
    }


LOCAL = {
    ".": "sinew-vla",
    CLIENT: "sinew-vla-client",
    EVAL: "sinew-vla-eval",
    PERF: "sinew-vla-perf",
    "./packages/lerobot_policy_sinew": "lerobot-policy-sinew",
    "./packages/sinew_ros": "sinew-ros",
}


@cache
def wheels() -> dict[str, Path]:
    """Build the distributions of this checkout once. Returns folder -> wheel."""
    home, built = Path(tempfile.mkdtemp(prefix="sinew-installs-")), {}
    atexit.register(shutil.rmtree, home)
    for folder in LOCAL:
        out = home / str(len(built))
        done = subprocess.run(
            [
                *uv(), "build", "--no-config", "--quiet", "--python", sys.executable, "--wheel",
                "--out-dir", str(out), str(ROOT / folder),
            ],
            capture_output=True, text=True, env=bare_environment(),
        )  # fmt: skip
        if done.returncode != 0:
            raise RefusedError(done.stderr.strip())
        (built[folder],) = out.glob("*.whl")
    return built


def as_wheel(name: str) -> str:
    """Return the wheel of a folder of this checkout as a requirement. Any other name is returned unchanged."""
    folder, bracket, extras = name.partition("[")
    return f"{LOCAL[folder]}{bracket}{extras} @ {wheels()[folder].as_uri()}" if folder in LOCAL else name


def as_folder(name: str) -> str:
    """Return a folder of this checkout as a requirement. Any other name is returned unchanged."""
    folder, bracket, extras = name.partition("[")
    return f"{LOCAL[folder]}{bracket}{extras} @ {(ROOT / folder).as_uri()}" if folder in LOCAL else name


def resolve(line: Line, platform: str, python: str) -> list[dict[str, Any]]:
    """Resolve a command for an empty environment.

    Returns:
        The packages in the form of PEP 751.

    Raises:
        RefusedError: The index cannot provide the packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock, wanted = Path(folder) / "pylock.toml", Path(folder) / "wanted.in"
        # A wheel contains its requirements, so it is not built again. The commands of uv keep the folder, which has
        # [tool.uv].
        names = [as_folder(name) if line.uv else as_wheel(name) for name in line.names]
        wanted.write_text("\n".join(names) + "\n")
        command = [*uv(), "pip", "compile", "--no-config", "--quiet", "--python", sys.executable]
        command += ["--python-version", python, "--python-platform", PLATFORMS[platform][0]]
        command += ["--format", "pylock.toml", "--output-file", str(lock)]
        command += ["--constraint", "constraints.txt"] * line.constrained + ["--no-deps"] * line.alone
        command += ["--no-sources"] * (not line.uv)
        done = subprocess.run(
            [*command, str(wanted), *(str(ROOT / each) for each in line.files)],
            cwd=ROOT, capture_output=True, text=True, env=bare_environment(),
        )  # fmt: skip
        if done.returncode != 0:
            raise RefusedError(done.stderr.strip())
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text()).get("packages", [])
        return packages


def size(packages: list[dict[str, Any]], platform: str, python: str) -> tuple[int, int, list[str]]:
    """Return the number of packages from the index, the bytes of their wheels, and the packages that must be
    compiled."""
    version = tuple(map(int, python.split(".")))
    places = PLATFORMS[platform][1]
    order = [
        *tags.cpython_tags(version, platforms=places),
        *tags.compatible_tags(version, f"cp{version[0]}{version[1]}", places),
    ]
    rank = {tag: place for place, tag in reversed(list(enumerate(order)))}
    total, count, compiled = 0, 0, []
    for package in packages:
        best = None
        for wheel in package.get("wheels", []):
            name = wheel.get("name") or wheel["url"].rsplit("/", 1)[-1].replace("%2B", "+")
            places_of = [rank[tag] for tag in parse_wheel_filename(name)[3] if tag in rank]
            if places_of and (best is None or min(places_of) < best[0]):
                best = (min(places_of), wheel["size"])
        if best is None and "sdist" in package:
            compiled.append(package["name"])
            best = (0, package["sdist"]["size"])
        if best is not None:
            count, total = count + 1, total + best[1]
    return count, total, compiled


def reachable() -> str:
    """Return the reason why the index cannot be reached, or ""."""
    try:
        wheels()
        resolve(Line("here", "pip install msgpack", ["msgpack"]), HOME, PYTHONS[0])
    except RefusedError as error:
        return str(error)
    return ""


def amount(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# ----------------------------------------------------------------------------- sizes in the documents

PAGE = ROOT / "docs" / "install.md"
# Key: pattern of a download size in a document, with one number and its unit. Value: role and platform.
SAID = (
    ("Makefile", r"without torch: ([\d.]+ [MG]B) to download", "demo"),
    ("Makefile", r"everything else into \$\(VENV\): ([\d.]+ [MG]B) to download, and torch", "rest"),
    ("Makefile", r"built for CUDA: ([\d.]+ [MG]B) to download", "cuda"),
    ("README.md", r"They download ([\d.]+ [MG]B):", "demo"),
    ("README.md", r"The tests\s+download\s+([\d.]+ [MG]B) on Linux", "everything"),
)
AGREES = 0.06  # allowed relative difference, because the documents have numbers of two digits


def number(text: str) -> float:
    amount_, unit = text.split()
    return float(amount_) * {"MB": 1e6, "GB": 1e9}[unit]


def disagreements(rows: dict[tuple[str, str, str], tuple[int, int, list[str]]]) -> list[str]:
    """Return the download sizes in documents that differ from the index."""
    here = {role: rows[HOME, "3.12", role][1] for role in ROLES}
    torch = sum(
        size(resolve(parse("here", "pip install -c constraints.txt torch"), HOME, "3.12"), HOME, "3.12")[1:2]
    )
    known = here | {"cuda": torch, "rest": here["everything"] - torch - here["demo"]}
    found = []
    for name, pattern, role in SAID:
        said = re.findall(pattern, (ROOT / name).read_text())
        if not said:
            found.append(f"{name}: contains no text for the pattern {pattern!r}")
        found += [
            f"{name}: states {each} for {role}, but the index states {amount(known[role])}; correct the document"
            for each in said
            if abs(number(each) - known[role]) > AGREES * known[role]
        ]
    if (wanted := page_table(rows)) not in PAGE.read_text():
        found.append(f"{PAGE.name}: expected this table; copy it:\n{wanted}")
    return found


def page_table(rows: dict[tuple[str, str, str], tuple[int, int, list[str]]]) -> str:
    """Return the table for docs/install.md, for Python 3.12."""
    lines = ["| platform | " + " | ".join(ROLES) + " |", "|---" * (len(ROLES) + 1) + "|"]
    for platform in PLATFORMS:
        cells = [amount(rows[platform, "3.12", role][1]) for role in ROLES]
        lines.append(" | ".join([f"| {platform}", *cells]) + " |")
    return "\n".join(lines)


HEAD = re.compile(r"(?:#.*\n)+")


def lock(*more: str) -> str:
    """Return constraints.txt as uv writes it for all platforms together, starting with the present versions."""
    there = (ROOT / "constraints.txt").read_text()
    head = HEAD.match(there)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "constraints.txt"
        out.write_text(there)
        # The plugin is left out, because LeRobot requires its own versions.
        projects = [f"{folder}pyproject.toml" for folder in ("", "packages/sinew-client/", "eval/", "perf/")]
        done = subprocess.run(
            [
                *uv(), "pip", "compile", "--no-config", "--quiet", "--python", sys.executable, "--universal",
                "--python-version", PYTHONS[0], "--no-annotate", "--no-header", "--all-extras", "--group", "build",
                *(word for name in OURS for word in ("--no-emit-package", name)),
                *more, *projects,
                "--output-file", str(out),
            ],
            cwd=ROOT, capture_output=True, text=True, env=bare_environment(),
        )  # fmt: skip
        if done.returncode != 0:
            raise RefusedError(done.stderr.strip())
        return (head[0] if head else "") + "".join(
            line for line in out.read_text().splitlines(keepends=True) if not line.startswith("#")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--required", action="store_true", help="fail if the package index does not answer")
    parser.add_argument("--lock", nargs="*", help="write constraints.txt; further arguments are passed to uv")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: use the newest versions")
    asked = parser.parse_args()
    if why := reachable():
        print(f"{'failed' if asked.required else 'skipped'}: the package index does not answer: {why}")
        return int(asked.required)
    if asked.lock is not None:
        (ROOT / "constraints.txt").write_text(lock(*asked.lock, *(["--upgrade"] * asked.upgrade)))
        return 0
    problems = []
    if lock() != (ROOT / "constraints.txt").read_text():
        problems.append("constraints.txt does not match pyproject.toml; run `make lock`")

    def one(line: Line, platform: str, python: str) -> Any:
        try:
            return size(resolve(line, platform, python), platform, python)
        except RefusedError as error:
            return error

    lines = {(line.text, line.where): line for line in all_lines()}
    roles = {
        role: Line(role, role, names, constrained=role not in UNCONSTRAINED) for role, names in ROLES.items()
    }
    jobs = [
        ("line", line, HOME, python)
        for line in lines.values()
        for python in PYTHONS[-1 if line.newest else 0 :]
    ]
    jobs += [
        ("role", line, platform, python)
        for platform in PLATFORMS
        for role, line in roles.items()
        for python in OLDEST.get(role, PYTHONS)
    ]
    rows: dict[tuple[str, str, str], tuple[int, int, list[str]]] = {}
    print(
        f"{len(lines)} install lines x Python {', '.join(PYTHONS)} on {HOME}, without local wheels and configuration"
    )
    with ThreadPoolExecutor(8) as pool:
        asked_once: dict[Any, Any] = {}
        for _, line, *where in jobs:
            if (line.key, *where) not in asked_once:
                asked_once[line.key, *where] = pool.submit(one, line, *where)
        for kind, line, platform, python in jobs:
            found = asked_once[line.key, platform, python].result()
            if isinstance(found, RefusedError):
                problems.append(f"{line.where}: {line.text}: Python {python} on {platform}: {found}")
            elif kind == "role":
                rows[platform, python, line.where] = found
            elif python == PYTHONS[-1]:
                print(f"  {found[0]:4} packages {amount(found[1]):>8}  {line.where}: {line.text}")
    print(
        "\n| platform | Python | role | packages | to download | without a wheel |\n|---|---|---|---|---|---|"
    )
    for (platform, python, role), (count, total, compiled) in rows.items():
        print(
            f"| {platform} | {python} | {role} | {count} | {amount(total)} | {', '.join(compiled) or '-'} |"
        )
    if not problems:
        problems += disagreements(rows)
    print(
        "\n" + "\n".join(problems or ["all commands resolve, and the documents state the sizes of the index"])
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""``make elsewhere``: run the whole test suite as other users would, in new clones with their own environments.

``python -m tools.elsewhere [NAME ...]`` runs ``make test`` once for each place and prints a table. A place is a way to
run the suite, such as another user or another interpreter. ``--list`` prints the names of the places. By default, all
places are run. The exit status is 1 if a test failed. A place with another user needs root, and interpreters that
every user can run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
KEPT = (
    "PATH",
    "SSL_CERT_FILE",
)  # environment variables to keep; the second one is needed to download packages
TOTALS = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|error).*?)(?: =+)?$", re.MULTILINE)
ALWAYS_BUSY = "while True: pass"


@dataclass(frozen=True)
class Place:
    """One way to run the test suite.

    Attributes:
        name: Name of the place.
        python: Name of the interpreter.
        folder: Folder of the clone.
        lang: Language setting of the environment.
        uid: User that runs the suite.
        home: "" for an empty home folder, else its defect.
        workers: Number of test processes.
        order: Number for the order of the tests.
        ignored: True to ignore signals, as a shell does for programs in the background.
        neighbours: Number of other programs that compute all the time.
    """

    name: str
    python: str = "python3.11"
    folder: str = "sinew"
    lang: str = "C.UTF-8"
    uid: int = 0
    home: str = ""
    workers: int = 2
    order: int = 1
    ignored: bool = False
    neighbours: int = 0


PLACES = [
    Place("guest", "python3.12", "Ein Platz für Tests/sinew", "C", NOBODY, "read-only", 1, 1, ignored=True),
    Place("crowd", "python3.13", workers=4, order=2, neighbours=2),
    Place("plain", order=3),
]


def interpreter(name: str) -> str | None:
    """Return the first interpreter with this name on the path that works. A version manager may have a stub of this
    name."""
    for folder in os.get_exec_path():
        # With an empty home folder, a version manager finds no interpreters.
        if found := shutil.which(name, path=folder):
            told = subprocess.run(
                [found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
            )
            if told.returncode == 0:
                return told.stdout.strip()
    return None


def run(place: Place, folder: Path, arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Clone the repository, install it and run its tests, under the conditions of a place.

    Returns:
        True if all tests passed, pytest's line with the totals, and the failures.
    """
    home, clone, scratch = folder / "home", folder / place.folder, folder / "tmp"
    for each in (home, clone.parent, scratch):
        each.mkdir(parents=True, exist_ok=True)
    python = interpreter(place.python)
    if python is None:
        return False, f"no {place.python} on the path works; install it", []
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if place.uid:
        folder.chmod(0o755)
        subprocess.run(["chown", "-R", f"{place.uid}:{place.uid}", folder], check=True)
    if place.home == "read-only":
        os.chown(home, 0, 0)
        home.chmod(0o555)
    environment = {
        name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")
    }
    environment |= {"HOME": str(home), "LANG": place.lang, "TMPDIR": str(scratch)}
    command = [
        "make",
        "test",
        f"PYTHON={python}",
        f"WORKERS={place.workers}",
        f"PYTEST_ARGS=--order {place.order} -q {' '.join(arguments)}",
    ]
    neighbours = [subprocess.Popen([sys.executable, "-c", ALWAYS_BUSY]) for _ in range(place.neighbours)]
    log = ROOT / "build" / "elsewhere" / f"{place.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before = signal.getsignal(signal.SIGINT)
    try:
        if place.ignored:  # a shell ignores these signals in programs that it starts in the background
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with log.open("w") as out:
            done = subprocess.run(
                command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                user=place.uid or None, group=place.uid or None, extra_groups=[] if place.uid else None,
                start_new_session=True,
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
        for each in neighbours:
            each.kill()
            each.wait()
    said = log.read_text(errors="replace")
    totals = TOTALS.findall(said) or said.strip().splitlines()[-1:] or ["nothing"]
    failures = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, totals[-1], failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="places (default: all)")
    parser.add_argument("--list", action="store_true", help="print the places and exit")
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest (default: all tests)")
    given = parser.parse_args()
    known = {place.name: place for place in PLACES}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown place {', '.join(unknown)}; use one of {', '.join(known)}")
    table, every = [], True
    for place in [known[name] for name in given.names] or PLACES:
        if given.list:
            print(place)
            continue
        if place.uid and os.geteuid() != 0:
            print(f"{place.name}: skipped; run this program as root to test as another user")
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sinew-elsewhere-") as folder:
            passed, totals, failures = run(place, Path(folder), given.tests)
        every = every and passed
        row = f"{place.name:6}  {'passed' if passed else 'FAILED':6}  {time.monotonic() - begun:5.0f} s  {totals}"
        print(row, *failures, sep="\n", flush=True)
        table.append(row)
    print("", *table, sep="\n")
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())

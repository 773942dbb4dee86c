"""`make demo` as a stranger runs it: a clone of what is committed, an empty home, the public index: ``make fresh``.

Prints the bytes that pip fetched (what its empty cache holds afterwards), the seconds of installation and of the demo,
and its successes. Fails where torch came along, or where an episode failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "python", nargs="*", default=[sys.executable], help="interpreters, one clone for each"
    )
    for python in parser.parse_args().python:
        with tempfile.TemporaryDirectory(prefix="sinew-fresh-") as folder:
            print(measured(python, Path(folder)), flush=True)
    return 0


def measured(python: str, folder: Path) -> str:
    clone, home = folder / "sinew", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {"HOME": str(home), "PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull, "LANG": "C.UTF-8"}
    seconds = []
    (stamp,) = [
        word
        for word in subprocess.run(
            ["make", "-s", "-n", "demo", f"PYTHON={python}"], cwd=clone, env=environment,
            capture_output=True, text=True, check=True,
        ).stdout.split()
        if word.startswith(".venv/demo-")
    ]  # fmt: skip
    for target in (stamp, "demo"):
        started = time.monotonic()
        subprocess.run(["make", target, f"PYTHON={python}"], cwd=clone, env=environment, check=True)
        seconds.append(time.monotonic() - started)
    cache = home / ".cache" / "pip"
    fetched = sum(
        path.stat().st_size
        for path in cache.rglob("*")
        if path.is_file() and "http" in path.parts[len(cache.parts)]
    )
    disk = sum(path.lstat().st_size for path in (clone / ".venv").rglob("*") if not path.is_dir())
    if any((clone / ".venv").glob("lib/python*/site-packages/torch")):
        sys.exit("expected no torch in the demo's environment")
    (played,) = json.loads((clone / "build" / "demo" / "report.json").read_text())["variants"]
    if played["success"] != 1.0:
        sys.exit(f"expected every episode to succeed, got {played['success']}")
    return (
        f"{python}: {fetched / 1e6:.1f} MB fetched, {disk / 1e6:.0f} MB on disk; installed in {seconds[0]:.0f} s,"
        f" demo in {seconds[1]:.0f} s; {played['wins']} of {played['episodes']} episodes"
    )


if __name__ == "__main__":
    sys.exit(main())

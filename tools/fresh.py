"""Run `make demo` as a new user would, in a clone with an empty home folder and the public package index: ``make
fresh``.

The program prints the bytes that pip downloaded (the sum of pip's own output), the seconds of the installation and of
the demo, and the successes. It fails if torch was installed, or if an episode failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOWNLOAD = re.compile(r"^ *Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", re.MULTILINE)
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "python", nargs="*", default=[sys.executable], help="interpreters; each one runs in its own clone"
    )
    for python in parser.parse_args().python:
        with tempfile.TemporaryDirectory(prefix="sinew-fresh-") as folder:
            print(measured(python, Path(folder)), flush=True)
    return 0


def measured(python: str, folder: Path) -> str:
    clone, home = folder / "sinew", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # keep the certificates of the network, which old versions of pip do not find, and no settings of package indexes
    certificates = {key: os.environ[key] for key in ("PIP_CERT", "SSL_CERT_FILE") if key in os.environ}
    environment = certificates | {
        "HOME": str(home),
        "PATH": os.defpath,
        "PIP_CONFIG_FILE": os.devnull,
        "LANG": "C.UTF-8",
    }
    seconds = []
    (stamp,) = [
        word
        for word in subprocess.run(
            ["make", "-s", "-n", "demo", f"PYTHON={python}"], cwd=clone, env=environment,
            capture_output=True, text=True, check=True,
        ).stdout.split()
        if word.startswith(".venv/demo-")
    ]  # fmt: skip
    said = ""
    for target in (stamp, "demo"):
        started = time.monotonic()
        command = ["make", target, f"PYTHON={python}"]
        with subprocess.Popen(command, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                said += line
                print(line, end="", flush=True)
        if run.returncode != 0:
            sys.exit(f"make {target} ended with {run.returncode}")
        seconds.append(time.monotonic() - started)
    fetched = sum(float(number) * UNITS[unit] for number, unit in DOWNLOAD.findall(said))
    disk = sum(path.lstat().st_size for path in (clone / ".venv").rglob("*") if not path.is_dir())
    if any((clone / ".venv").glob("lib/python*/site-packages/torch")):
        sys.exit(
            "torch is in the environment of the demo, which must not need it; check the extra of `make demo`"
        )
    (played,) = json.loads((clone / "build" / "demo" / "report.json").read_text())["variants"]
    if played["success"] != 1.0:
        sys.exit(f"expected every episode to succeed, got {played['success']}")
    return (
        f"{python}: {fetched / 1e6:.1f} MB fetched, {disk / 1e6:.0f} MB on disk; installed in {seconds[0]:.0f} s,"
        f" demo in {seconds[1]:.0f} s; {played['wins']} of {played['episodes']} episodes"
    )


if __name__ == "__main__":
    sys.exit(main())

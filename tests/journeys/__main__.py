"""Run the documentation: ``python -m tests.journeys [PAGE ...]`` (make journeys).

The program creates an environment with the install commands in README.md, unless ``--python`` names one. It types
every line of every page there. The exit status is 1 if a result is not as the page states.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.journeys.pages import PAGES, ROOT, lines
from tests.journeys.stories import STORIES
from tests.journeys.walk import Walk


def install(home: Path) -> Path:
    """Create an environment with the install commands in README.md. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    for line in lines("README.md"):
        if line.startswith("pip install"):
            print(f"$ {line}", flush=True)
            quiet = line.replace("pip install", "pip install -q --disable-pip-version-check", 1)
            subprocess.run(["bash", "-c", f"source {home}/bin/activate && {quiet}"], check=True, cwd=ROOT)
    return home / "bin" / "python"


def refusal(pages: list[str]) -> str:
    """Return the reason why these pages cannot be run. "" if each of them has a story."""
    unknown = [page for page in pages if page not in STORIES]
    if not unknown:
        return ""
    silent = [page for page in unknown if page in PAGES]
    why = f" ({', '.join(silent)}: these pages contain no commands)" if silent else ""
    return f"no story for {', '.join(unknown)}{why}; use one of {', '.join(STORIES)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", default=list(STORIES), help="default: all")
    parser.add_argument("--python", type=Path, help="interpreter of an environment with sinew")
    chosen = parser.parse_args()
    if why := refusal(chosen.pages):
        parser.error(why)
    failed = []
    with tempfile.TemporaryDirectory(prefix="sinew-journeys-") as folder:
        python = chosen.python or install(Path(folder) / "env")
        for number, page in enumerate(chosen.pages):
            print(f"\n{page}", flush=True)
            begun = time.monotonic()
            walk = Walk(page, Path(folder) / str(number), python.absolute())
            try:
                STORIES[page](walk)
                assert not walk.left(), "lines of the page without a story:\n" + "\n".join(walk.left())
            except AssertionError as error:
                failed.append(page)
                print(f"FAILED {page}: {error}", flush=True)
            except Exception:  # noqa: BLE001 - the other pages are walked all the same
                failed.append(page)
                traceback.print_exc()
            print(f"{page}: {time.monotonic() - begun:.0f} s", flush=True)
    print(
        f"{len(chosen.pages) - len(failed)} passed, {len(failed)} failed"
        + "".join(f"\n  {p}" for p in failed)
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

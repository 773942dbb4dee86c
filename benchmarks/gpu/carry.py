"""Pack the files that ``make gpu`` needs on another machine, and print their size: ``python -m benchmarks.gpu.carry``.

The archive contains the checkout, without the files that no section reads. It also contains the files in
``build/gpu``: the archive of :mod:`.ahead`, the base of a comparison, and wheels. ``--fixtures`` adds the golden cases,
which only section ``tests`` reads. Without them, this section is skipped. ``--base COMMIT`` first packs the base of a
comparison (:mod:`.compare`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

from benchmarks.gpu.__main__ import COMMIT, commit

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu" / "carry.tgz"
MOST = 60 << 20  # bytes; some machines accept at most 64 MiB
NOT_READ = ("docs/", "packages/sinew_ros/", "tests/serve/", "tests/journeys/", "eval/sinew_eval/training/")
FIXTURES = "tests/fixtures/"
BASE = OUT.with_name("base.tgz")
OF_BASE = ("sinew", ":(exclude)sinew/assets", "perf", "packages/sinew-client", "benchmarks")
NOT_READ_FILES = tuple(f"sinew/assets/{name}.gguf" for name in ("act", "blocks-rtc", "egg"))


def files(fixtures: bool = False) -> list[str]:
    """Return the files to pack, relative to the root of the checkout.

    Args:
        fixtures: Include the golden cases.
    """
    left_out = (*NOT_READ, *NOT_READ_FILES, *(() if fixtures else (FIXTURES,)))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kept = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    kept = [name for name in kept if not name.startswith(left_out)]
    made = [path for path in OUT.parent.rglob("*") if path.is_file() and path != OUT]
    return sorted([*kept, *(str(path.relative_to(ROOT)) for path in made)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.carry", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--fixtures", action="store_true", help="add the golden cases, for section tests")
    parser.add_argument("--base", metavar="COMMIT", help="pack this commit as build/gpu/base.tgz first")
    options = parser.parse_args(arguments)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    if options.base is not None:
        command = ["git", "archive", "--format=tar.gz", f"--output={BASE}", options.base, "--", *OF_BASE]
        subprocess.run(command, cwd=ROOT, check=True)
    OUT.with_name(COMMIT).write_text(commit())  # the other machine has no repository to ask
    names, sizes = files(options.fixtures), Counter[str]()
    with tarfile.open(OUT, "w:gz") as archive:
        for name in names:
            archive.add(ROOT / name, f"sinew/{name}")
            sizes["/".join(Path(name).parts[:2])] += (ROOT / name).stat().st_size
    for folder, size in sizes.most_common(8):
        print(f"{size / 2**20:6.1f} MiB  {folder}")
    total = OUT.stat().st_size
    print(f"{OUT.name}: {len(names)} files, {total / 2**20:.1f} MiB packed")
    if total > MOST:
        print(
            f"{OUT.name} is too large: expected at most {MOST >> 20} MiB; add folders to NOT_READ",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pack the files that ``make gpu`` needs on another machine, and print their size: ``python -m benchmarks.gpu.carry``.

The archive contains the checkout, without the files that no section reads. It also contains the files in
``build/gpu``: the archive of :mod:`.ahead`, and wheels.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu" / "carry.tgz"
MOST = 60 << 20  # bytes; some machines accept at most 64 MiB
NOT_READ = ("docs/", "packages/sinew_ros/", "tests/serve/", "tests/journeys/", "eval/sinew_eval/training/")
NOT_READ_FILES = tuple(f"sinew/assets/{name}.gguf" for name in ("act", "blocks-rtc", "egg"))


def files() -> list[str]:
    """Return the files to pack, relative to the root of the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kept = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    kept = [name for name in kept if not name.startswith((*NOT_READ, *NOT_READ_FILES))]
    made = [path for path in OUT.parent.rglob("*") if path.is_file() and path != OUT]
    return sorted([*kept, *(str(path.relative_to(ROOT)) for path in made)])


def main() -> int:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    names, sizes = files(), Counter[str]()
    with tarfile.open(OUT, "w:gz") as archive:
        for name in names:
            archive.add(ROOT / name, f"sinew/{name}")
            sizes["/".join(Path(name).parts[:2])] += (ROOT / name).stat().st_size
    for folder, size in sizes.most_common(8):
        print(f"{size / 2**20:6.1f} MiB  {folder}")
    total = OUT.stat().st_size
    print(f"{OUT.relative_to(ROOT)}: {len(names)} files, {total / 2**20:.1f} MiB packed")
    if total > MOST:
        print(
            f"{OUT.name} is too large: expected at most {MOST >> 20} MiB; add folders to NOT_READ",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

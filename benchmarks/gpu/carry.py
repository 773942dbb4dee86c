"""Pack what a borrowed machine needs into one archive, and say how large it is: ``python -m benchmarks.gpu.carry``.

It is the checkout without what no section reads, with what lies in ``build/gpu`` (:mod:`.ahead`'s archive, wheels).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu" / "carry.tgz"
MOST = 60 << 20  # bytes: where little may be carried it is 64 MiB
NOT_READ = ("docs/", "packages/sinew_ros/", "tests/serve/", "tests/journeys/", "eval/sinew_eval/training/")
NOT_READ_FILES = tuple(f"sinew/assets/{name}.gguf" for name in ("act", "blocks-rtc", "egg"))


def files() -> list[str]:
    """Return what goes, relative to the checkout's root."""
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
        print(f"expected at most {MOST >> 20} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

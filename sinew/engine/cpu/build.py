"""Compiling the kernels with the machine's own compiler, once, into the user's cache.

Each instruction set is a file of its own, compiled with its own flags; which of them runs is decided at run time. What
was compiled is kept under ``$XDG_CACHE_HOME/sinew/cpu/<hash of sources, flags and compiler>``. An image is prepared
with ``python -m sinew.engine.cpu.build``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sinew import scratch

SOURCES = Path(__file__).parent / "csrc"
NAME = "lowbit.so"
# Sums are rounded as the twin rounds them: nothing may be contracted to a fused multiply-add.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w")
FUSED = "-ffp-contract=fast"  # but what stands between products promises no bit
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
EVERYWHERE = ("portable", "between_portable", "dispatch", "product", "between")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "between_avx2": ("-mavx2", "-mfma", FUSED),
        "between_avx512": (*AVX512, FUSED),
        "x86_avx2": ("-mavx2",),
        "x86_avxvnni": ("-mavx2", "-mavxvnni"),
        "x86_avx512vnni": (*AVX512, "-mavx512vnni"),
    },
    "aarch64": {
        "between_neon": ("-march=armv8.2-a", FUSED),
        "arm_dotprod": ("-march=armv8.2-a+dotprod",),
        "arm_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}
SETS |= {"AMD64": SETS["x86_64"], "arm64": SETS["aarch64"]}
COMPILERS = ("c++", "g++", "clang++")
LONGEST_S = 300


@dataclass(frozen=True)
class Built:
    """The library, or why there is none; and what was left out of it or found."""

    path: Path | None
    reason: str


def find_compiler() -> str | None:
    """Return ``$CXX``, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, COMPILERS)), None)


def build(compiler: str | None = None) -> Built:
    """Return the library for this machine, compiled now unless the cache has it."""
    compiler = compiler or find_compiler()
    if compiler is None:
        return Built(None, f"no C++ compiler ({', '.join(COMPILERS)} or $CXX)")
    try:
        return _build(compiler)
    except subprocess.TimeoutExpired:
        return Built(None, f"{compiler} took more than {LONGEST_S} s")
    except subprocess.CalledProcessError as error:
        return Built(None, f"{compiler} failed: {_first_line(error.stderr)}")
    except OSError as error:
        return Built(None, f"{error.filename or compiler}: {error.strerror or error}")


def _build(compiler: str) -> Built:
    sets = SETS.get(platform.machine(), {})
    version = _run(compiler, "--version")
    digest = hashlib.sha256(repr((version, FLAGS, sets, sys.platform, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache() / digest.hexdigest()[:16]
    if (folder / NAME).is_file():
        return Built(folder / NAME, f"compiled by {_first_line(version)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch.beside(folder) as made:
        objects, left_out = compile_into(made, compiler, sets)
        _run(compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made / NAME))
        folder.mkdir(exist_ok=True)
        os.replace(made / NAME, folder / NAME)  # at once: another process may do the same
    without = f", without {', '.join(left_out)}, which it does not know" if left_out else ""
    return Built(folder / NAME, f"compiled by {_first_line(version)}{without}")


def compile_into(
    folder: Path, compiler: str, sets: dict[str, tuple[str, ...]], extra: tuple[str, ...] = ()
) -> tuple[list[Path], list[str]]:
    """Write object files to ``folder``; return them and the instruction sets that the compiler refused."""
    objects: list[Path] = []
    left_out: list[str] = []
    here: list[str] = []
    needed: dict[str, tuple[str, ...]] = dict.fromkeys(EVERYWHERE, ())
    for name, flags in {**sets, **needed}.items():
        made = folder / f"{name}.o"
        try:
            _run(compiler, *FLAGS, *flags, *here, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(made))
        except subprocess.CalledProcessError:
            if name in needed:
                raise
            left_out.append(name)
            continue
        objects.append(made)
        if name in sets:
            here.append(f"-DLOWBIT_{name}")  # what dispatch.cpp may name
    return objects, left_out


def cache() -> Path:
    """Return the folder that compiled libraries are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sinew" / "cpu"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=True)
    return done.stdout


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    found = build()
    sys.stdout.write(f"{found.path or 'no library'} ({found.reason})\n")
    sys.exit(found.path is None)

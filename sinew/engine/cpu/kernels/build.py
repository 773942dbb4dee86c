"""Compile the kernels with the machine's own compiler, once, into the user's cache.

Each instruction set has its own file, which is compiled with its own flags. The instruction set is chosen at run time.
The library is stored under ``$XDG_CACHE_HOME/sinew/cpu/<hash of sources, flags and compiler>``, together with its own
hash. The hash is needed because a library that was truncated by a power loss would crash every later process.

A library that other users could have written is not loaded. If no folder is safe, the library is compiled for this
process alone. To prepare an image, run ``python -m sinew.engine.cpu.kernels.build``. With ``--background``, the
compilation runs at the lowest priority.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sinew_client.untrusted import open_regular, read_text

from sinew.core import machine, progress, scratch

SOURCES = Path(__file__).parent / "csrc"
NAME, HASH = "lowbit.so", "lowbit.sha256"
# The compiler must not contract sums to fused multiply-adds, because sums are rounded as the reference rounds them.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w")
# Kernels for the operations between products may use fused multiply-adds, because their results need not equal the
# reference in every bit.
FUSED = "-ffp-contract=fast"
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
EVERYWHERE = ("portable", "floats_portable", "dispatch", "product", "layer", "floats")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "floats_avx2": ("-mavx2", "-mfma", FUSED),
        "floats_avx512": (*AVX512, "-mavx512vnni", FUSED),
        "x86_avx2": ("-mavx2",),
        "x86_avxvnni": ("-mavx2", "-mavxvnni"),
        "x86_avx512vnni": (*AVX512, "-mavx512vnni"),
        "x86_avx512bf16": (*AVX512, "-mavx512bf16"),
        "x86_amx": (*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
    "aarch64": {
        "floats_neon": ("-march=armv8.2-a", FUSED),
        "arm_fmla": ("-march=armv8.2-a",),
        "arm_dotprod": ("-march=armv8.2-a+dotprod",),
        # gcc 12 would load all operands before the products, and then has no registers for 5 of 24 sums.
        "arm_i8mm": ("-march=armv8.2-a+dotprod+i8mm", "-fno-schedule-insns"),
        "arm_bf16": ("-march=armv8.2-a+bf16",),
    },
}
SETS |= {"AMD64": SETS["x86_64"], "arm64": SETS["aarch64"]}
COMPILERS = ("c++", "g++", "clang++")
LONGEST_S = 300


@dataclass(frozen=True)
class Built:
    """The path of the compiled library. If there is no library, the path is None and a reason is given."""

    path: Path | None
    reason: str


def find_compiler() -> str | None:
    """Return ``$CXX``, or the first C++ compiler on the search path, or None."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, COMPILERS)), None)


def build(compiler: str | None = None) -> Built:
    """Return the compiled library for this machine. If the cache does not contain the library, it is compiled now."""
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


def kept() -> Path | None:
    """Return the library for this machine if the cache contains it, otherwise None. The function does not compile."""
    compiler = find_compiler()
    try:
        folder = None if compiler is None else _place(compiler)[0]
    except (subprocess.SubprocessError, OSError):
        return None
    return folder / NAME if folder is not None and is_whole(folder) and not untrusted(folder) else None


def _place(compiler: str) -> tuple[Path, str]:
    """Return the folder for the library that ``compiler`` makes from these sources, and the compiler's version."""
    version, sets = _run(compiler, "--version"), SETS.get(platform.machine(), {})
    digest = hashlib.sha256(repr((version, FLAGS, sets, sys.platform, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        code = source.read_bytes()  # own file: in an installed package
        digest.update(source.name.encode() + code)
    return cache() / digest.hexdigest()[:16], _first_line(version)


def _build(compiler: str) -> Built:
    sets = SETS.get(platform.machine(), {})
    folder, version = _place(compiler)
    by = f"compiled by {version}"
    if is_whole(folder) and not untrusted(folder):
        return Built(folder / NAME, by)
    if problem := unkept(folder):
        folder = private()
        by += f", for this process only: {problem}"
    with scratch.beside(folder) as made, progress.task("compiling the kernels of engine cpu, once"):
        objects, left_out = compile_into(made, compiler, sets)
        # The compiler supports the flags of these sets, so compiling failed for another reason, such as memory or a
        # full disk. The next start may succeed.
        failed = [name for name in left_out if _knows(compiler, sets[name])]
        names = (NAME,) if failed else (NAME, HASH)  # without the stored hash, the next start compiles again
        _run(compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made / NAME))
        (made / HASH).write_text(_sha256(made / NAME), encoding="ascii")
        for name in names:
            (made / name).chmod(0o700)  # the mode does not depend on the umask
        # Write each file to disk before it gets its final name, because another process may compile the same library.
        for name in names:
            _flush(made / name)
            os.replace(made / name, folder / name)
        _flush(folder)
    if left_out:
        why = "failed and will be tried at the next start" if failed else "this compiler does not support"
        by += f", without {', '.join(failed or left_out)}, which {why}"
    return Built(folder / NAME, by)


def unkept(folder: Path) -> str:
    """Create ``folder`` for a library. Return the reason why this folder cannot store the library, or "" if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return untrusted(folder) or ("" if os.access(folder, os.W_OK) else f"{folder} cannot be written")


def is_whole(folder: Path) -> bool:
    """Return True if a folder contains a complete library. The library's hash is compared with the stored hash."""
    try:
        return read_text(folder / HASH, 256) == _sha256(folder / NAME)
    except (OSError, ValueError):
        return False


def untrusted(folder: Path) -> str:
    """Return the other user or group that could have changed a library in ``folder``, as text.

    "" if only this user and root could.

    ssh uses the same rule for its keys. The rule includes all parent folders. A user who may write to a folder may
    replace its content, unless the folder's sticky bit allows that to owners only (as in /tmp).
    """
    if not hasattr(os, "geteuid"):
        return ""
    ours = (0, os.geteuid())
    for path in (folder / NAME, folder / HASH, folder, *folder.resolve().parents):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid not in ours:
            return f"{path} belongs to another user ({status.st_uid})"
        above = path not in (folder, folder / NAME, folder / HASH)
        others = stat.S_IWOTH if _alone_in(status.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        shared = status.st_mode & others
        if not stat.S_ISLNK(status.st_mode) and shared and not (above and status.st_mode & stat.S_ISVTX):
            return f"other users may write {path} (mode {stat.S_IMODE(status.st_mode):o})"
        if stat.S_ISLNK(status.st_mode) and not above:
            return f"{path} is a link"
    return ""


def _alone_in(group: int) -> bool:
    """Return True if this user is the only member of a group.

    Many systems create such a group for each user, so write permission for this group is safe.
    """
    import grp
    import pwd

    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def private() -> Path:
    """Return a new folder that is removed when this process ends."""
    # The function mkdtemp makes a folder that only this user can read.
    parent = Path(tempfile.mkdtemp(prefix="sinew-cpu-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / "kernels"
    folder.mkdir()
    return folder


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Write a file or folder to disk. After a power loss, a file may otherwise exist without its content."""
    number = os.open(path, os.O_RDONLY)  # own file: written by this process
    try:
        os.fsync(number)
    finally:
        os.close(number)


def compile_into(
    folder: Path, compiler: str, sets: dict[str, tuple[str, ...]], extra: tuple[str, ...] = ()
) -> tuple[list[Path], list[str]]:
    """Compile object files into ``folder``.

    Args:
        folder: The folder.
        compiler: The compiler.
        sets: The compiler flags of each instruction set, such as AVX2.
        extra: Flags for all files.

    Returns:
        The object files, and the instruction sets that the compiler rejected.
    """
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
            here.append(f"-DLOWBIT_{name}")  # dispatch.cpp refers to these sets only
    return objects, left_out


def _knows(compiler: str, flags: tuple[str, ...]) -> bool:
    """Return True if a compiler accepts the flags of an instruction set.

    The function compiles an empty file as a test.
    """
    try:
        _run(compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull)
    except subprocess.CalledProcessError:
        return False
    return True


def cache() -> Path:
    """Return the folder for compiled libraries."""
    return machine.cache_folder("cpu")


def _run(*command: str) -> str:
    """Return the output of a compiler.

    After a timeout or an interrupt, the compiler's child processes are ended and its temporary files are removed.
    """
    group, pipe = 0 if hasattr(os, "killpg") else None, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=group) as made:
        try:
            out, errors = made.communicate(timeout=LONGEST_S)
        except BaseException:
            if group is None:
                made.terminate()
                raise
            os.killpg(made.pid, signal.SIGTERM)
            # The compiler removes its temporary files after SIGTERM. A child process that it has just started may have
            # missed this signal, so the group gets a second signal. The process is not reaped yet, so no other group
            # can have its number.
            if hasattr(os, "waitid"):  # macOS has waitid since Python 3.13
                os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
                os.killpg(made.pid, signal.SIGKILL)
            raise
    if made.returncode:
        raise subprocess.CalledProcessError(made.returncode, command, out, errors)
    return out


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    if sys.argv[1:] == ["--background"]:
        machine.step_back()
    result = build()
    sys.stdout.write(f"{result.path or 'no library'} ({result.reason})\n")
    sys.exit(result.path is None)

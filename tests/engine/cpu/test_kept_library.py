"""The compiled library in its cache: damaged, planted, on a disk that is full or may not be written to."""

from __future__ import annotations

import os
import platform
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sinew.engine.cpu.kernels import build
from tests import processes

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
SHOW = "from sinew.engine.cpu.kernels.library import extension as e; print(e().kernels, '|', e().reason)"
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user"
)
NOBODY = 65534


# The machine's compiler takes ten seconds of CPU, and is tested by all the others: this one remembers what it made.
REMEMBERS = """#!/bin/sh
case "$*" in *--version*) exec "{compiler}" --version;; esac
for last; do :; done
case "$*" in *-shared*) exec cp "{library}" "$last";; esac
: > "$last"
"""


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    made = build.build()
    assert made.path is not None, made.reason
    folder = tmp_path_factory.mktemp("compiler")
    kept = Path(shutil.copy(made.path, folder / "kept.so"))
    kept.chmod(0o755)
    open_to_all(folder)
    program = folder / "c++"
    program.write_text(REMEMBERS.format(compiler=build.find_compiler(), library=kept))
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(program))
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with the library."""
    (tmp_path / "cache").mkdir()
    assert "reference" not in shown(tmp_path / "cache")
    return tmp_path / "cache"


def shown(cache: Path) -> str:
    """Return what a new process says of its kernels."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = processes.run([sys.executable, "-c", SHOW], cwd=processes.ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def open_to_all(folder: Path) -> None:
    """Let another user into a folder of tests."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            break
        each.chmod(each.stat().st_mode | 0o055)


def library(cache: Path) -> Path:
    (found,) = (cache / "sinew" / "cpu").glob(f"*/{build.NAME}")
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data, chance = bytearray(path.read_bytes()), random.Random(0)
    for _ in range(200):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def without_hash(path: Path) -> None:
    (path.parent / build.HASH).unlink()


@pytest.mark.parametrize(
    "damage",
    [cut, *(pytest.param(each, marks=pytest.mark.slow) for each in (flipped, without_hash))],
    ids=lambda each: each.__name__,
)
def test_what_was_damaged_is_compiled_again(cache: Path, damage: Callable[[Path], None]) -> None:
    """Of a file that was cut short, whoever maps it dies by SIGBUS, at each start and for ever."""
    kept = library(cache)
    before = kept.read_bytes()
    damage(kept)
    assert shown(cache).startswith(shown(cache).split("|")[0])
    assert kept.read_bytes() == before
    assert build.is_whole(kept.parent)


@needs_root
def test_what_another_user_may_have_written_is_not_loaded(cache: Path) -> None:
    kept = library(cache)
    for path, mode, uid in ((kept, 0o700, NOBODY), (kept.parent, 0o777, 0), (kept.parent.parent, 0o777, 0)):
        before = path.stat()
        os.chown(path, uid, -1)
        path.chmod(mode)
        said = shown(cache)
        assert "reference" not in said
        assert "for this process only" in said
        assert f"{path} belongs to another user ({NOBODY})" in said or f"other users may write {path}" in said
        os.chown(path, before.st_uid, -1)
        path.chmod(before.st_mode)
    assert "for this process only" not in shown(cache)


@needs_root
def test_a_home_that_may_not_be_written_to_costs_a_compilation_and_no_speed(tmp_path: Path) -> None:
    """As of a service, or of `make elsewhere`."""
    open_to_all(tmp_path)
    home, scratch = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(0o555)
    scratch.mkdir()
    os.chown(scratch, NOBODY, NOBODY)
    environment = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
    environment |= {"HOME": str(home), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SHOW]
    try:
        subprocess.run([sys.executable, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], check=True)
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("this interpreter is root's alone")
    done = subprocess.run(
        command,
        cwd=processes.ROOT,
        env=environment,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("reference")
    assert "for this process only" in done.stdout
    assert "Permission denied" in done.stdout
    assert list(scratch.iterdir()) == []


def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        processes.Process(
            [sys.executable, "-c", SHOW], cwd=processes.ROOT, env=environment, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(not text.startswith("reference") for text in said), said
    assert build.is_whole(library(tmp_path).parent)


# As gcc does: the work is in a program that it starts, and what it began goes where it is asked to end. What it prints
def test_a_set_that_fails_for_want_of_room_is_not_left_out(tmp_path: Path, monkeypatch) -> None:
    """The compiler takes its flags: the library would lack it for good."""
    sets = build.SETS.get(platform.machine(), {})
    if not sets:
        pytest.skip(f"no instruction sets of {platform.machine()}")
    name, real, full = next(iter(sets)), os.environ["CXX"], tmp_path / "full"
    program = tmp_path / "c++"
    failing = (
        f"case \"$*\" in *{name}.cpp*) if [ -e {full} ]; then echo 'no space left' >&2; exit 1; fi;; esac"
    )
    program.write_text(f'#!/bin/sh\n{failing}\nexec {real} "$@"\n')
    program.chmod(0o755)
    full.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(program))
    lacking = build.build()
    assert lacking.path is not None
    assert f"without {name}, which failed and will be tried at the next start" in lacking.reason
    assert build.kept() is None
    full.unlink()
    whole = build.build()
    assert whole.path == build.kept() is not None
    assert "without" not in whole.reason
    # One that takes no such flags, whatever the file: its library is kept, and says what it lacks.
    unknown = f"case \"$*\" in *{sets[name][0]}*) echo 'unknown option' >&2; exit 1;; esac"
    program.write_text(f'#!/bin/sh\n{unknown}\nexec {real} "$@"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    older = build.build()
    assert older.path == build.kept() is not None
    assert f"without {name}" in older.reason
    assert "this compiler does not support" in older.reason


# first is more than a pipe holds: then the process that waits for it reads.
DRIVER = """#!/bin/sh
case "$*" in *--version*) echo a compiler; exit;; esac
trap 'rm -f "$TMPDIR/half.s"; exit 1' TERM
: > "$TMPDIR/half.s"
printf '%200000s' ''
sleep 600 <&- 2>&- &
echo $! > "$TMPDIR/started"
wait
"""


def test_a_compilation_that_is_ended_leaves_no_program_and_no_file(tmp_path: Path) -> None:
    driver, folder = tmp_path / "c++", tmp_path / "temporary"
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    folder.mkdir()
    os.mkfifo(folder / "started")
    environment = {"CXX": str(driver), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with processes.Process(
        [sys.executable, "-m", "sinew.engine.cpu.kernels.build", "--background"],
        stdin=subprocess.PIPE, env=os.environ | environment, cwd=processes.ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        work = os.pidfd_open(int((folder / "started").read_text()))
        try:
            process.stdin.close()  # the server was ended by a signal that it cannot hear
            assert process.wait(60) == 128 + 15
            assert select.select([work], [], [], 60)[0], "the compiler's program goes on"
        finally:
            os.close(work)
    assert [path.name for path in folder.iterdir()] == ["started"]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.suffix]

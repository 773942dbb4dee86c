"""A folder beside a target: gone at the end, after a signal, and after a kill once the next one comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sinew.core import scratch
from tests import processes
from tests.serve.test_server import START_S

CASE = "smolvla-2cam"
# Sleeps are short: of a signal that comes after Python's last look and before the system's wait begins, Python runs the
# handler when that wait is over.
HOLDER = """
import signal, sys, time
from pathlib import Path
from sinew.core import scratch
with scratch.beside(Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(b"half")
    print(folder, signal.getsignal(signal.SIGHUP), sep="\\n", flush=True)
    while True: time.sleep(0.01)
"""


def holder(target: Path, *ignored: str, **options) -> tuple[subprocess.Popen, Path]:
    """Start a process that writes beside a target, and wait until it does. No signal but those of ``env``'s ``ignored``
    is ignored there, as one is that this process was started to ignore."""
    words = ["env", "--default-signal=HUP,INT,TERM", *ignored, sys.executable, "-c", HOLDER, target]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_becomes_the_target_or_goes(tmp_path: Path) -> None:
    target = tmp_path / "robot"
    with scratch.beside(target) as folder:
        assert folder.parent == tmp_path
        (folder / "graphs.json").write_text("{}")
        folder.rename(target)
    assert [each.name for each in tmp_path.iterdir()] == ["robot"]
    with pytest.raises(ValueError, match="fails"), scratch.beside(target):
        raise ValueError("fails")
    assert [each.name for each in tmp_path.iterdir()] == ["robot"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: int) -> None:
    process, folder = holder(tmp_path / "robot", stderr=subprocess.DEVNULL)
    assert (folder / "half").exists()
    process.send_signal(number)
    code = process.wait(START_S)
    assert code == (-number if number == signal.SIGINT else 128 + number)
    assert list(tmp_path.iterdir()) == []


DROPPED = """
import os, signal, sys, threading, time, weakref
from pathlib import Path
from sinew.core import scratch
class Thing: pass
class Timer(threading.Timer):
    slow = 1  # starts that take longer than the timer, as on a busy machine
    def start(self):
        super().start()
        Timer.slow -= 1
        if Timer.slow >= 0: time.sleep(1)
threading.Timer = Timer
def callback(_gone):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10_000): pass  # here the signal's handler runs
with scratch.beside(Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(b"half")
    thing = Thing()
    kept = weakref.ref(thing, callback)
    del thing
    threading.Event().wait(600)
"""


def test_a_signal_whose_exception_python_drops_ends_the_process_all_the_same(tmp_path: Path) -> None:
    """One that comes in the callback of a weak reference; importlib has such callbacks."""
    words = ["env", "--default-signal=TERM", sys.executable, "-c", DROPPED, tmp_path / "robot"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    process, _folder = holder(tmp_path / "robot", "--ignore-signal=HUP")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # the second alone ends it
    assert process.wait(START_S) == 128 + signal.SIGTERM


def test_what_a_kill_left_goes_with_the_next_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "robot"
    killed, left = holder(target)
    killed.kill()
    killed.wait(START_S)
    assert left.exists()
    alive, kept = holder(target)
    try:
        assert not left.exists()
        strangers = [
            tmp_path / name
            for name in (
                ".robot.abc.sinew",
                ".robot.0000000000000000.part",
                ".robot2.0000000000000000.sinew",
                "robot.km_8xft3",
            )
        ]
        for stranger in strangers:
            stranger.mkdir()
        link = tmp_path / ".robot.000000000000000a.sinew"
        link.symlink_to(strangers[0], target_is_directory=True)
        with scratch.beside(target) as folder:
            assert kept.exists()
            assert folder != kept
        assert all(stranger.exists() for stranger in strangers)
        assert link.is_symlink()
    finally:
        alive.kill()
        alive.wait(START_S)


@pytest.mark.parametrize(
    "arguments",
    [("export", "--onnx", "robot"), ("quantize", "--out", "small.gguf", "--recipe", "head=q8_0")],
    ids=["export", "quantize"],
)
def test_a_verb_that_is_stopped_leaves_nothing_beside_its_target(
    smolvla_bundle, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    verb, *options = arguments
    bundle = tmp_path / "policy.gguf"
    bundle.write_bytes(Path(smolvla_bundle(CASE)).read_bytes())
    command = [sys.executable, "-m", "sinew", verb, str(bundle), *options]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path}
    process = processes.Process(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    start = time.monotonic()
    while not list(tmp_path.glob(".*.sinew")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - start < START_S
        time.sleep(0.005)
    process.terminate()
    _out, errors = process.communicate(timeout=START_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert [each.name for each in tmp_path.iterdir()] == ["policy.gguf"]

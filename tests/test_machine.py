"""Cores and memory as control groups limit them, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sinew.core import machine

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files of a made-up machine with four logical processors on two cores and 16 GiB."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write({"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        write({f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": siblings})
    return write


def test_one_thread_per_physical_core(tree, monkeypatch) -> None:
    assert machine.cores() == machine.Cores(logical=4, physical=2, quota=None)
    count, reason = machine.recommended_threads()
    assert count == 2
    assert "physical" in reason
    for told, count in (("1", 1), ("4", 2), ("0", 2), ("2,1", 2)):  # fewer than that, where somebody says so
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert machine.recommended_threads()[0] == count
        assert ("OMP_NUM_THREADS=1" in machine.recommended_threads()[1]) == (told == "1")


@pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 2)])
def test_quota_of_cgroup_v2(tree, quota: str, threads: int) -> None:
    tree(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": quota,
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        }
    )
    count, reason = machine.recommended_threads()
    assert count == threads
    assert ("quota is" in reason) == (threads == 1)


def test_quota_of_cgroup_v1(tree) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct"
    tree({"proc/self/cgroup": "3:cpu,cpuacct:/job\n1:memory:/job\n"})
    tree({f"{folder}/cpu.cfs_quota_us": "-1", f"{folder}/cpu.cfs_period_us": "100000"})
    tree({f"{folder}/job/cpu.cfs_quota_us": "175000", f"{folder}/job/cpu.cfs_period_us": "100000"})
    assert machine.cores().quota == 1.75
    assert machine.recommended_threads()[0] == 1


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/in\n", "sys/fs/cgroup/job", ("memory.max", "memory.current", "")),
        (
            "4:memory:/job/in\n",
            "sys/fs/cgroup/memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_memory_limit(tree, line: str, folder: str, names: tuple[str, str, str]) -> None:
    assert machine.memory() == (16 * GIB, 12 * GIB)
    tree({"proc/self/cgroup": line, f"{folder}/{names[0]}": str(4 * GIB), f"{folder}/{names[1]}": str(GIB)})
    assert machine.memory() == (4 * GIB, 3 * GIB)
    # Pages of files that were read are taken back where memory is wanted, as MemAvailable has it of the machine.
    files = f"anon 5\n{names[2]}inactive_file {GIB // 2}\n{names[2]}active_file {GIB // 4}\nactive_anon 7\n"
    tree({f"{folder}/memory.stat": files})
    assert machine.memory() == (4 * GIB, 3 * GIB + GIB // 2 + GIB // 4)
    tree({f"{folder}/in/{names[0]}": str(2 * GIB), f"{folder}/in/{names[1]}": "0"})
    # Neighbours in the outer group leave less than the inner one allows.
    tree({f"{folder}/{names[1]}": str(4 * GIB)})
    assert machine.memory() == (2 * GIB, GIB // 2 + GIB // 4)


SPINNING = """
import os, sys
import {first}
import {second}
from sinew.core import machine
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("KMP_BLOCKTIME"), machine.spinning())
"""


def spinning(first: str, second: str, **environment: str) -> str:
    """What a process that imports two packages in this order says of its waiting threads."""
    inherited = {name: value for name, value in os.environ.items() if name not in machine.WAITING}
    run = subprocess.run(
        [sys.executable, "-c", SPINNING.format(first=first, second=second)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


def test_importing_sinew_limits_spinning() -> None:
    assert spinning("sinew", "json").startswith("0 0 idle threads wait as set by GOMP_SPINCOUNT=0")


def test_spinning_is_the_users_decision() -> None:
    assert spinning("sinew", "json", OMP_WAIT_POLICY="active").startswith(
        "None None idle threads wait as set by OMP_"
    )


@pytest.mark.slow
def test_spinning_is_not_claimed_where_torch_came_first() -> None:
    assert spinning("torch", "sinew").startswith("None None idle threads spin for milliseconds")


LOAD = """
import sys
import threading
import sinew
policy = sinew.load({bundle!r})
policy.infer(policy.dummy_observation())
assert "torch" in sys.modules
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_loading_imports_no_compiler() -> None:
    bundle = Path(__file__).resolve().parents[1] / "sinew" / "assets" / "pen.gguf"
    run = subprocess.run(
        [sys.executable, "-c", LOAD.format(bundle=str(bundle))], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_gpu_is_told_once_something_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        is_initialized = staticmethod(lambda: started)
        mem_get_info = staticmethod(lambda: (60, 80))
        get_device_name = staticmethod(lambda: "H100")
        memory_reserved = staticmethod(lambda: 7)
        max_memory_reserved = staticmethod(lambda: 9)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda))
    started = False
    assert machine.gpu() is None
    started = True
    wanted = {"name": "H100", "memory": {"limit": 80, "available": 60}, "own": 7, "peak": 9}
    assert machine.gpu() == wanted
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.gpu() is None


def test_this_process_has_memory() -> None:
    found = machine.resident_bytes()
    assert found["peak"] >= found.get("now", 0) > 0


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = machine.write_whole(tmp_path / "new" / "record.json", b"old")
    assert machine.write_whole(path, b"new").read_bytes() == b"new"
    (path.parent / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        machine.write_whole(path.parent / "folder", b"newer")
    assert sorted(each.name for each in path.parent.iterdir()) == ["folder", "record.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_work_beside_others_has_a_low_priority_and_nothing_else_has():
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    lower = min(19, before + machine.BESIDE)
    assert machine.beside_others(priority) == lower
    child = [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
    ran = machine.beside_others(lambda: subprocess.run(child, capture_output=True, text=True, check=True))
    assert ran.stdout == f"{lower}\n"  # what it starts has it, too
    assert priority() == before
    with pytest.raises(ZeroDivisionError):
        machine.beside_others(lambda: 1 // 0)

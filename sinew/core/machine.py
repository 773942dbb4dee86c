"""What this process may use of the machine: cores, memory, instruction sets. Standard library only.

Choices made from it come with their reason, so that ``sinew doctor`` can print it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sinew import WAITING

Result = TypeVar("Result")
PROC = Path("/proc")
SYS = Path("/sys")
HALF_UNITS = {
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "fp16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}  # flags of the Linux kernel
ARITHMETIC = frozenset(
    {"avx", "avx2", "fma", "avx_vnni", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"}
)
WIDE = ("avx512", "amx_")
ISA_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "NPY_DISABLE_CPU_FEATURES",
    "SINEW_CPU_KERNELS",
)
# Niceness of what is computed beside requests. A load that competes with another program for its core took 4 s at 0 and
# 5, 9 s at 10, and 71 s at 19. On a machine with five more programs, a load at 10 did not end in 180 s. At 5 the
# longest answer beside a load is the shortest of all four (652 ms; 852 at 0, 724 at 10): research/log/2026-11-28.md.
BESIDE = 5
LIBRARIES = ("torch", "onnxruntime", "triton", "numpy")


def busy(load: float | None = None) -> str:
    """Return a note if other processes use the machine during a measurement; "" on an idle machine.

    Args:
        load: the load average of the last minute when the measurement began; None: the present one.
    """
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    count = cores().physical
    return "" if load <= count else f"load average {load:.2f} on {count} cores: others were computing"


def lower_priority(by: int = 19) -> None:
    """Let other work go first: on Linux that of other threads than this one, elsewhere that of other processes.

    Args:
        by: What is added to the niceness, of which 19 is the most.
    """
    # What `chrt -r 1 sinew serve` starts is in real time too, where nice counts for nothing.
    if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(by)  # applies to the calling thread and to threads that it starts


def beside_others(call: Callable[[], Result]) -> Result:
    """Call a function on a thread with lower priority than the other threads of this process, and return its result.

    Raises the function's errors. On systems other than Linux, a thread has no priority of its own, and the function
    is called directly.
    """
    if sys.platform != "linux":
        return call()

    def run() -> Result:
        lower_priority(BESIDE)
        return call()

    # A thread cannot take its priority back without privileges, so it ends with the call.
    with ThreadPoolExecutor(1, "sinew-beside") as pool:
        return pool.submit(run).result()


def step_back() -> None:
    """Give this process the lowest priority, make it the first that the system ends if memory runs out, and end it
    when standard input closes.
    """
    lower_priority()
    # Linux only. A process in a session of its own gets the priority of the session, so that is lowered too.
    for name, value in (("autogroup", 19), ("oom_score_adj", 1000)):
        with contextlib.suppress(OSError):
            Path("/proc/self", name).write_text(str(value))
    logging.getLogger().addHandler(logging.NullHandler())

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True, name="sinew-parent").start()


def cache_folder(room: str) -> Path:
    """Return the directory for what can be made again: ``$XDG_CACHE_HOME/sinew/<room>``, ``~/.cache`` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinew" / room


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file of this user's, and the folders above it; who reads it sees the old bytes or the new ones. Raises
    OSError, and then leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


@dataclass(frozen=True, slots=True)
class Cores:
    """``logical`` processors in the affinity mask, ``physical`` cores behind them, ``quota`` of a cgroup in
    cores (None: no limit)."""

    logical: int
    physical: int
    quota: float | None


def cores() -> Cores:
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS
        allowed = set(range(os.cpu_count() or 1))
    siblings = {
        _read(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in allowed
    }
    return Cores(len(allowed), len(siblings), _cpu_quota())


def recommended_threads() -> tuple[int, str]:
    """Threads for compute, and why that many. More threads than cores spin against each other."""
    found, told = cores(), os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and 0 < int(told) < found.physical:
        return int(told), f"OMP_NUM_THREADS={told}"
    if found.quota is not None and found.quota < found.physical:
        count = max(1, int(found.quota))
        return count, f"the cgroup's quota is {found.quota:g} cores of {found.physical}"
    if found.physical < found.logical:
        return found.physical, f"one per physical core, which {found.logical} processors share"
    return found.physical, "one per core in the affinity mask, no cgroup quota below that"


def spinning() -> str:
    """Return how idle OpenMP threads wait, for ``sinew doctor``."""
    if told := sorted(WAITING & os.environ.keys()):
        return f"idle threads wait as set by {told[0]}={os.environ[told[0]]}"
    return "idle threads spin for milliseconds, because torch was imported before sinew"


def _cpu_quota() -> float | None:
    """Cores that the cgroup allows: the smallest limit on the way to the root (v2, then v1)."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        if text := _read(folder / "cpu.max"):  # v2: "200000 100000", or "max 100000"
            quota, period = text.split()
            if quota != "max":
                limits.append(int(quota) / int(period))
        quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota_us and period_us and int(quota_us) > 0:  # v1: -1 means no limit
            limits.append(int(quota_us) / int(period_us))
    return min(limits, default=None)


def memory() -> tuple[int, int]:
    """Return bytes (limit, available): of the machine, or of the cgroup where that is less. Both count pages of files,
    which the system takes back, as available."""
    try:
        text = (PROC / "meminfo").read_text()  # own file: of the operating system
        fields = dict(line.split(":", 1) for line in text.splitlines())
        total = int(fields["MemTotal"].split()[0]) * 1024
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:  # macOS
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = total
    for folder in _cgroup_folders("memory"):
        for limit_file, usage_file, hierarchy in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdigit():
                counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                files = sum(int(counts.get(f"{hierarchy}{kind}_file", 0)) for kind in ("active", "inactive"))
                total = min(total, int(limit))
                available = min(available, max(0, int(limit) - int(usage or 0) + files))
    return total, available


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders that may limit this process, innermost first."""
    folders = []
    for line in _read(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = SYS / "fs/cgroup"
        elif controller in controllers.split(","):
            root = SYS / "fs/cgroup" / controllers
        else:
            continue
        inner = root / path.lstrip("/")
        folders += [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]
    return folders


def cpu_model() -> str:
    for line in _read(PROC / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the Linux kernel names them; empty elsewhere."""
    for line in _read(PROC / "cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def instructions() -> str:
    """Return the instruction sets that choose how products are summed, and what the environment forbids of them."""
    names = [name for name in sorted(cpu_flags()) if name in ARITHMETIC or name.startswith(WIDE)]
    told = [f"{name}={os.environ[name]}" for name in ISA_SETTINGS if os.environ.get(name)]
    return " ".join([*names, *told]) or platform.machine()


def arithmetic(threads: int) -> dict[str, Any]:
    """Return the settings that affect results bit for bit (threads, CPU, library versions), as a JSON-ready dict."""
    return {
        "threads": threads,
        "hardware": cpu_model(),
        "instructions": instructions(),
        "libraries": {
            name: str(module.__version__)
            for name in LIBRARIES
            if (module := sys.modules.get(name)) is not None and hasattr(module, "__version__")
        },
    }


def half_units(dtype: str) -> str | None:
    """Return the instruction set that multiplies ``dtype`` ("bf16" or "fp16") in hardware, or None."""
    flags = cpu_flags()
    return next((name for name in HALF_UNITS[dtype] if name in flags), None)


def half_lowered(dtype: str) -> str:
    """Return the setting with which PyTorch's attention in ``dtype`` ("bf16" or "fp16") fails here, "" if none does.

    PyTorch asks oneDNN, which finds AMX, whether to lay out keys for tiles. The code that does so is in its AVX-512
    kernels only. With other kernels (``ATEN_CPU_CAPABILITY``) it raises "pack_vnni2 is only supported when avx512".
    """
    setting = os.environ.get("ATEN_CPU_CAPABILITY", "")
    tiles = HALF_UNITS[dtype][0] in cpu_flags() if dtype in HALF_UNITS else False
    lowered = setting and not setting.lower().startswith(("avx512", "amx"))
    return f"ATEN_CPU_CAPABILITY={setting}" if tiles and lowered else ""


def may_have_cuda() -> bool:
    """Return whether an NVIDIA driver seems to be there; false spares the import of torch that would find out."""
    if sys.platform == "darwin":
        return False
    if sys.platform != "linux":
        return True
    places = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg")
    return (PROC / "driver/nvidia/version").exists() or any(Path(place).exists() for place in places)


def resident_bytes() -> dict[str, int]:
    """Memory of this process: ``peak`` and ``now``, and where known ``anonymous`` and ``file`` (mapped
    weights and libraries count there)."""
    names = {"VmHWM": "peak", "VmRSS": "now", "RssAnon": "anonymous", "RssFile": "file"}
    found = {}
    for line in _read(PROC / "self/status").splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    if not found:
        import resource

        # Not used on Linux: there it would include the peak of the process that started this one.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {"peak": peak if sys.platform == "darwin" else peak * 1024}
    return found


def gpu() -> dict[str, Any] | None:
    """Return the GPU that this process computes on, None where it uses none; never wakes one up. ``memory``: its bytes,
    as the driver has them. ``own``, ``peak``: what PyTorch's allocator holds of them for this process, and has held at
    most."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "memory": {"limit": total, "available": free},
        "own": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_reserved(),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()  # own file: of the operating system
    except OSError:
        return ""

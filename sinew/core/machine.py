"""The part of the machine that this process may use: cores, memory, instruction sets. Uses only the standard library.

Each choice comes with a reason, so that ``sinew doctor`` can print it.
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
BOARD = Path("/proc/device-tree/model")  # Linux on ARM
SYS = Path("/sys")
# Key: number type. Value: the Linux kernel's flags for CPUs that multiply this type in hardware.
HALF_UNITS = {
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "fp16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
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
# Priority (Linux niceness) of computations in the background. Measured: a load next to another program on the same core
# took 4 s at 0 and 5, 9 s at 10, and 71 s at 19. Next to five programs, a load at 10 did not end in 180 s. The longest
# answer during a load was shortest at 5 (652 ms; 852 at 0, 724 at 10). See research/log/2026-11-28.md.
BESIDE = 5
LIBRARIES = ("torch", "onnxruntime", "triton", "numpy")


def busy(load: float | None = None) -> str:
    """Return a note if other processes use the machine during a measurement; "" on an idle machine.

    Args:
        load: the load average of the last minute when the measurement began; None: the present one.
    """
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has no load average
    count = cores().physical
    return "" if load <= count else f"load average {load:.2f} on {count} cores: other programs were running"


def lower_priority(by: int = 19) -> None:
    """Lower the priority of the calling thread on Linux, and of this process on other systems.

    Args:
        by: Number that is added to the niceness. The largest niceness is 19.
    """
    # A process that `chrt -r 1` started has a real-time priority, which the function nice does not change, so return to
    # the normal scheduler first.
    if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(by)  # applies to the calling thread and to threads that it starts


def beside_others(call: Callable[[], Result]) -> Result:
    """Call a function on a thread with lower priority than the other threads of this process, and return its result.

    Errors of the function are raised here. On systems other than Linux, a thread has no priority of its own, and the
    function is called directly.
    """
    if sys.platform != "linux":
        return call()

    def run() -> Result:
        lower_priority(BESIDE)
        return call()

    # A thread without privileges cannot raise its priority again, so the call runs in a new thread, which then ends.
    with ThreadPoolExecutor(1, "sinew-beside") as pool:
        return pool.submit(run).result()


def step_back() -> None:
    """Give this process the lowest priority, make the system end it first if memory runs out, and end it when standard
    input closes.
    """
    lower_priority()
    # These files exist only on Linux. A process in its own session has the session's priority, so lower that too.
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


def cache_folder(name: str) -> Path:
    """Return a folder for files that can be computed again: ``$XDG_CACHE_HOME/sinew/NAME``, by default in
    ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinew" / name


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file, and create its parent folders. Any reader sees either the old bytes or the new bytes.

    Raises:
        OSError: The file cannot be written. No partial file is left.
    """
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
    """The processors that this process may use.

    Attributes:
        logical: Logical processors in the affinity mask.
        physical: Physical cores of these processors.
        quota: Limit of the cgroup (such as a container's limit) in cores; None if there is no limit.
    """

    logical: int
    physical: int
    quota: float | None


def cores() -> Cores:
    try:
        allowed = os.sched_getaffinity(0)
    # macOS has no affinity mask.
    except AttributeError:
        allowed = set(range(os.cpu_count() or 1))
    siblings = {
        _read(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in allowed
    }
    return Cores(len(allowed), len(siblings), _cpu_quota())


def recommended_threads() -> tuple[int, str]:
    """Return the number of compute threads, and the reason. With more threads than cores, threads that wait in a loop
    would take CPU time from threads that compute."""
    available, setting = cores(), os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and 0 < int(setting) < available.physical:
        return int(setting), f"OMP_NUM_THREADS={setting}"
    if available.quota is not None and available.quota < available.physical:
        count = max(1, int(available.quota))
        return count, f"the cgroup's quota is {available.quota:g} cores of {available.physical}"
    if available.physical < available.logical:
        return available.physical, f"one per physical core, which {available.logical} processors share"
    return available.physical, "one per core in the affinity mask, no cgroup quota below that"


def spinning() -> str:
    """Return a text for ``sinew doctor``: whether idle OpenMP threads wait in a loop or sleep."""
    if names := sorted(WAITING & os.environ.keys()):
        return f"idle threads wait as set by {names[0]}={os.environ[names[0]]}"
    return "idle threads spin for milliseconds, because torch was imported before sinew"


def _cpu_quota() -> float | None:
    """Return the number of cores that this process's cgroup allows; it is the smallest limit of the cgroup and its
    parents (cgroup v2 or v1)."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        if text := _read(folder / "cpu.max"):  # cgroup v2 has "200000 100000", or "max 100000"
            quota, period = text.split()
            if quota != "max":
                limits.append(int(quota) / int(period))
        quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota_us and period_us and int(quota_us) > 0:  # in cgroup v1, -1 means that there is no limit
            limits.append(int(quota_us) / int(period_us))
    return min(limits, default=None)


def memory() -> tuple[int, int]:
    """Return two numbers of bytes: how much memory this process may use at most, and how much of it is available now.

    The numbers are the machine's, or the cgroup's if these are smaller. Cached pages of files count as available,
    because the system can reclaim them.
    """
    try:
        text = (PROC / "meminfo").read_text()  # own file: of the operating system
        fields = dict(line.split(":", 1) for line in text.splitlines())
        total = int(fields["MemTotal"].split()[0]) * 1024
        available = int(fields["MemAvailable"].split()[0]) * 1024
    # macOS has no /proc, so its total memory counts as available.
    except OSError:
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
    """Return the cgroup folders that may limit this process, innermost first."""
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


def board() -> str:
    """Return the name of the board, for example of a Jetson; "" if the system states none."""
    return _read(BOARD).rstrip("\0").strip()


def cpu_flags() -> frozenset[str]:
    """Return the processor's instruction-set flags as the Linux kernel names them; empty on other systems."""
    for line in _read(PROC / "cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def instructions() -> str:
    """Return the CPU's instruction sets that matrix products use, and the settings that disable some of them.

    The order of additions, and so the rounding, depends on the instruction set.
    """
    names = [name for name in sorted(cpu_flags()) if name in ARITHMETIC or name.startswith(WIDE)]
    settings = [f"{name}={os.environ[name]}" for name in ISA_SETTINGS if os.environ.get(name)]
    return " ".join([*names, *settings]) or platform.machine()


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
    """Return the instruction set that multiplies ``dtype`` ("bf16" or "fp16") in hardware; None if there is none."""
    flags = cpu_flags()
    return next((name for name in HALF_UNITS[dtype] if name in flags), None)


def half_lowered(dtype: str) -> str:
    """Return the setting with which PyTorch's attention in ``dtype`` fails on this machine; "" if there is none.

    oneDNN finds AMX and tells PyTorch to lay out keys for tiles, but only PyTorch's AVX-512 kernels can do so. If
    ``ATEN_CPU_CAPABILITY`` selects other kernels, PyTorch raises "pack_vnni2 is only supported when avx512".

    Args:
        dtype: "bf16" or "fp16".
    """
    setting = os.environ.get("ATEN_CPU_CAPABILITY", "")
    tiles = HALF_UNITS[dtype][0] in cpu_flags() if dtype in HALF_UNITS else False
    lowered = setting and not setting.lower().startswith(("avx512", "amx"))
    return f"ATEN_CPU_CAPABILITY={setting}" if tiles and lowered else ""


def may_have_cuda() -> bool:
    """Return True if an NVIDIA driver seems to be installed. If the result is False, the caller need not import torch
    to look for a GPU."""
    if sys.platform == "darwin":
        return False
    if sys.platform != "linux":
        return True
    places = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg")
    return (PROC / "driver/nvidia/version").exists() or any(Path(place).exists() for place in places)


def resident_bytes() -> dict[str, int]:
    """Return how much of the machine's memory this process uses, in bytes.

    The keys are ``peak`` and ``now``, and on Linux ``anonymous`` and ``file``. ``file`` includes mapped weights and
    libraries.
    """
    names = {"VmHWM": "peak", "VmRSS": "now", "RssAnon": "anonymous", "RssFile": "file"}
    sizes = {}
    for line in _read(PROC / "self/status").splitlines():
        key, _, value = line.partition(":")
        if key in names:
            sizes[names[key]] = int(value.split()[0]) * 1024
    if not sizes:
        import resource

        # Use ru_maxrss only on systems other than Linux. On Linux it would include the peak of the parent process.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sizes = {"peak": peak if sys.platform == "darwin" else peak * 1024}
    return sizes


def gpu() -> dict[str, Any] | None:
    """Return the GPU that this process uses; None if it uses none. An idle GPU is not woken up.

    ``memory`` has the limit and the available bytes from the driver. ``own`` and ``peak`` are the bytes that PyTorch's
    allocator has reserved for this process, now and at most.
    """
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

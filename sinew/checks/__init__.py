"""The checks of ``sinew doctor`` that need no bundle. Each check returns a result, and advice if the user must act."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from sinew_client.errors import ConnectionLost

from sinew import __version__
from sinew.checks.check import Check, gib
from sinew.checks.loaded import bundle, hashes
from sinew.core import SinewError, machine, progress
from sinew.core.extras import DISTRIBUTION, install
from sinew.core.registry import families
from sinew.engine.backend import AUTO, BACKENDS, either, installed

__all__ = ["Check", "bundle", "hashes", "installation"]

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
# Bytes; for comparison, a converted policy with 450M parameters in float32 has 1.8 GB.
MINIMUM_TEMPORARY_BYTES = 4 << 30
ROUND_TRIPS = 200
LOOPBACK_S = 2.0  # the loopback check fails if one round trip takes longer, in seconds

# The core dependencies except torch. Key: name of the Python module. Value: name of the package to install.
PACKAGES = {
    "google.protobuf": "protobuf",
    "gguf": "gguf",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "PIL": "pillow",
    "safetensors": "safetensors",
    "sinew_client": "sinew-vla-client",
    "tokenizers": "tokenizers",
}

# Key: name of an optional extra of the package. Value: (the modules that it installs, the feature that needs them).
FEATURES = {
    "hub": (("huggingface_hub",), "checkpoint names on the Hugging Face hub in `sinew convert`"),
    "sim": (("mujoco", "gymnasium"), "the built-in simulation tasks"),
}


def installation(engine: str = "") -> list[Check]:
    """Run all checks that need no bundle, and report the progress.

    Args:
        engine: The engine that the user wants to run, or "". torch may be missing if that engine does not need it, or
            if no engine is named and an installed engine does not need it.
    """
    results: list[Check] = []
    without_torch = not installed("torch") and (
        installed("onnxruntime") if engine in ("", AUTO) else "torch" not in BACKENDS[engine].packages
    )
    with progress.task("checking the installation", len(INSTALLATION)) as advance:
        for index, check in enumerate(INSTALLATION):
            if without_torch and check in NEED_TORCH:
                results.append(Check(NEED_TORCH[check], "ok", f"skipped: {SKIPPED}"))
            else:
                results += _guarded(check)
            following = [each.__name__.replace("_", " ") for each in INSTALLATION[index + 1 :]]
            advance(f"checking the installation: {following[0]}" if following else "")
    return results


def _guarded(check: Callable[[], Check | list[Check]]) -> list[Check]:
    try:
        result = check()
    except ImportError as error:
        return [
            Check(
                check.__name__,
                "fail",
                f"cannot run: {error}",
                "install the packages that the lines `packages` and `torch` name",
            )
        ]
    except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, not the end of the report
        return [Check(check.__name__, "fail", f"{type(error).__name__}: {error}", "report this as a bug")]
    return result if isinstance(result, list) else [result]


def python() -> Check:
    version = platform.python_version()
    detail = f"Python {version}, sinew {__version__}"
    if sys.version_info < MINIMUM_PYTHON:
        required = ".".join(map(str, MINIMUM_PYTHON))
        return Check("python", "fail", detail, f"install Python {required} or newer")
    return Check("python", "ok", detail)


def packages() -> Check:
    missing = [distribution for module, distribution in PACKAGES.items() if not installed(module)]
    if missing:
        advice = f"pip install --force-reinstall {DISTRIBUTION}"
        return Check("packages", "fail", f"missing: {', '.join(missing)}", advice)
    return Check("packages", "ok", f"all {len(PACKAGES)} found")


def torch_build() -> Check:
    try:
        import torch
    except ImportError as error:
        without_torch = either([name for name, each in BACKENDS.items() if "torch" not in each.packages])
        return Check(
            "torch", "fail", f"does not import: {error}", f"{install('torch')}, or --engine {without_torch}"
        )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda = torch.version.cuda
    detail = f"torch {torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "CPU build")
    if version < MINIMUM_TORCH:
        required = ".".join(map(str, MINIMUM_TORCH))
        return Check("torch", "fail", detail, f"install torch {required} or newer")
    return Check("torch", "ok", detail)


def devices() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        detail = ", ".join(f"cuda:{i} {p.name} {p.total_memory >> 20} MiB" for i, p in enumerate(names))
        return Check("devices", "ok", detail)
    if torch.version.cuda:
        detail = f"cpu only: torch was built for CUDA {torch.version.cuda}, but finds no usable device"
        return Check("devices", "warn", detail, "check the NVIDIA driver with nvidia-smi")
    return Check("devices", "ok", "cpu only, because this build of torch has no CUDA")


def threads() -> Check:
    import torch

    advised, reason = machine.recommended_threads()
    count = torch.get_num_threads()
    cores = machine.cores()
    quota = "no quota" if cores.quota is None else f"quota {cores.quota:g}"
    detail = (
        f"torch computes with {count}; advised {advised} ({reason});"
        f" {cores.physical} cores, {cores.logical} logical processors, {quota};"
        f" {machine.spinning()}"
    )
    if count > advised:
        # With more threads than cores, threads that wait for each other spin and slow down the others.
        return Check("threads", "warn", detail, f"set OMP_NUM_THREADS={advised} or pass --threads {advised}")
    if count < advised:
        cause = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's own choice"
        return Check(
            "threads", "warn", f"{detail}; fewer because of {cause}", f"set OMP_NUM_THREADS={advised}"
        )
    return Check("threads", "ok", detail)


def onnxruntime() -> Check:
    """Report the ONNX Runtime engine's providers and number of threads, and the reason for each choice."""
    if not installed("onnxruntime"):
        return Check("onnxruntime", "ok", f"absent: the onnx engine needs it ({install('onnxruntime')})")
    from sinew.engine.onnx.providers import choose, runtime
    from sinew.engine.onnx.quantize import weight_bits

    selected, why = choose()
    offered = runtime().get_available_providers()
    count, reason = machine.recommended_threads()
    bits, because = weight_bits()
    return Check(
        "onnxruntime",
        "ok",
        f"onnxruntime {runtime().__version__} offers {', '.join(offered)}; chosen {', '.join(selected)} ({why});"
        f" {count} threads ({reason}), not bound to cores, and sleeping while they wait, because a thread that spins on"
        f" a shared core slows down the thread that it waits for; int8 weights of {bits} bits ({because})",
    )


def cuda_engine() -> Check:
    """Report the device that the engine for GPUs would use."""
    import torch

    from sinew.engine.cuda.device import describe, require
    from sinew.engine.cuda.options import CudaOptions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return Check("cuda engine", "ok", f"no GPU: it would run {describe(device)}")
    try:
        require(device, CudaOptions())
    except SinewError as error:
        return Check("cuda engine", "warn", str(error), "omit --engine, and Sinew selects another one")
    return Check("cuda engine", "ok", f"with --device cuda, it would use {describe(device)}")


def cpu_kernels() -> Check:
    """Report the kernels for low-bit weights. The first call compiles them."""
    from sinew.engine.cpu.kernels.library import extension

    kernels = extension()
    if not kernels.compiled:
        advice = "install a C++ compiler; until then omit --engine, and Sinew selects a faster one"
        return Check("cpu kernels", "warn", f"low-bit products by PyTorch, slowly: {kernels.reason}", advice)
    halves = (
        f"low-bit and bf16 products (sums in the order {kernels.halves})"
        if kernels.halves
        else "low-bit products"
    )
    attention = f"attention over such layers in {kernels.attention}"
    return Check(
        "cpu kernels", "ok", f"{halves} and {attention} by {kernels.kernels} kernels ({kernels.reason})"
    )


def memory() -> Check:
    limit, available = machine.memory()
    detail = f"{gib(available)} available of {gib(limit)}"
    if available < 3 << 30:
        advice = "a 450M-parameter policy in fp32 needs about 3 GiB; close programs or raise the limit"
        return Check("memory", "warn", detail, advice)
    return Check("memory", "ok", f"{detail}; a 450M-parameter policy in fp32 needs about 3 GiB")


def simd() -> Check:
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    unit = machine.half_units("bf16")
    advice = (
        f"bf16 in hardware ({unit}): try --dtype bf16 with `sinew bench`"
        if unit
        else "no bf16 in hardware: --dtype bf16 only saves memory, because weights become fp32 for each product"
    )
    return Check("simd", "ok", f"{machine.cpu_model()}, torch uses {level}; {advice}")


def extras() -> list[Check]:
    results = []
    for extra, (modules, enables) in FEATURES.items():
        missing = [module for module in modules if not installed(module)]
        detail = f"absent: {enables} need it" if missing else f"present: {enables}"
        results.append(
            Check(f"extra {extra}", "ok", detail + (f" ({install(missing[0])})" if missing else ""))
        )
    return results


def temporary_disk() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    detail = f"{gib(free)} free in {folder}"
    if free < MINIMUM_TEMPORARY_BYTES:
        return Check("temporary disk", "warn", detail, "conversions need space: free some, or set TMPDIR")
    return Check("temporary disk", "ok", detail)


def loopback() -> Check:
    """Measure the time of a round trip over ZeroMQ on 127.0.0.1, with a message of an observation's size. A server adds
    at least this time to an inference.
    """
    from sinew_client.addresses import ServerAddress
    from sinew_client.link import Link

    payload, samples = bytes(2 * 224 * 224 * 3), []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_echo, args=(listening,), daemon=True).start()
        try:
            server = ServerAddress.parse(f"127.0.0.1:{listening.getsockname()[1]}")
            link = Link(server, time.monotonic() + LOOPBACK_S)
            try:
                for _ in range(ROUND_TRIPS):
                    started = time.perf_counter()
                    if link.ask([payload], time.monotonic() + LOOPBACK_S) is None:
                        raise ConnectionLost("no answer in time; check the firewall of this machine")
                    samples.append(time.perf_counter() - started)
            finally:
                link.close()
        except OSError:
            return Check(
                "loopback", "fail", "no answer on 127.0.0.1 in 2 s", "check the firewall of this machine"
            )
    samples.sort()
    median, worst = samples[len(samples) // 2] * 1e3, samples[-1] * 1e3
    detail = f"ZeroMQ, {len(payload) >> 10} KiB round trip: p50 {median:.2f} ms, max {worst:.2f} ms"
    return Check("loopback", "ok", detail)


def _echo(listening: socket.socket) -> None:
    """Answer each request on the first connection with an empty message."""
    from sinew_client import zmtp

    with contextlib.suppress(OSError, zmtp.ZmtpError), listening.accept()[0] as peer:
        framing = zmtp.Framing(1 << 20)
        peer.settimeout(LOOPBACK_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while framing.replies:
                peer.sendall(framing.replies.pop(0))
            if not (count := peer.recv_into(framing.room())):
                return
            framing.take(count)
            while framing.next() is not None:
                peer.sendall(zmtp.message([b"", b""]))


def golden() -> list[Check]:
    """Run a small test policy of each policy family that has one, and compare its outputs with the stored outputs of
    the reference implementation.
    """
    checks = [family.load(family.golden) for family in families() if family.golden]
    if not checks:
        return [Check("golden", "warn", "this installation contains no golden fixture", "reinstall sinew")]
    return [
        Check(name, "ok" if ok else "fail", detail, "" if ok else "do not trust actions of this install")
        for check in checks
        for name, ok, detail in check()
    ]


INSTALLATION: tuple[Callable[[], Check | list[Check]], ...] = (
    python,
    packages,
    torch_build,
    devices,
    threads,
    onnxruntime,
    cuda_engine,
    cpu_kernels,
    memory,
    simd,
    extras,
    temporary_disk,
    loopback,
    golden,
)
# These checks need torch. Key: function of the check. Value: name of its line in the report.
NEED_TORCH: dict[Callable[[], Check | list[Check]], str] = {
    cpu_kernels: "cpu kernels",
    torch_build: "torch",
    devices: "devices",
    threads: "threads",
    cuda_engine: "cuda engine",
    simd: "simd",
    golden: "golden",
}
SKIPPED = (
    f"no torch, which the onnx engine does not need; eager, plan and `sinew export` do ({install('torch')})"
)

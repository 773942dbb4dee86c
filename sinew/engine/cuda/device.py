"""Check the devices of the CUDA engine, and describe the libraries that the engine would use."""

from __future__ import annotations

import torch

from sinew.core import SinewError
from sinew.engine.cuda.kernels.lang import triton
from sinew.engine.cuda.options import CudaOptions

OLDEST = (8, 0)  # oldest compute capability with bfloat16 tensor cores and asynchronous copies


def require(device: torch.device, options: CudaOptions) -> None:
    """Check that a device can run the engine with these options.

    Raises:
        SinewError: The device cannot run the engine.
    """
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise SinewError(f"engine cuda: expected device cuda:N (or cpu, for tests), got {device}")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise SinewError(
            f"engine cuda on {device}: torch {torch.__version__} ({built}) finds no CUDA device;"
            " run `sinew doctor` to find the cause, or choose another engine"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise SinewError(
            f"engine cuda on {device}: this machine has {torch.cuda.device_count()} CUDA devices;"
            " choose a smaller number"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise SinewError(
            f"engine cuda on {device}: expected compute capability {_dotted(OLDEST)} or newer,"
            f" got {_dotted(capability)}; use engine plan or eager"
        )
    if options.kernels and triton is None:
        raise SinewError("engine cuda needs triton, which is not installed; run pip install 'triton>=3.6'")
    if options.fp8:
        from sinew.engine.cuda.fp8 import linear as fp8

        fine, reason = fp8.supported(device)
        if not fine:
            raise SinewError(f"fp8 on {device}: {reason}; use bf16")


def describe(device: torch.device) -> str:
    """Return one line about the libraries and precisions that the engine would use on ``device``."""
    if device.type != "cuda":
        return "the kernels' PyTorch references, no graph"
    from sinew.engine.cuda.fp8 import linear as fp8

    capability = torch.cuda.get_device_capability(device)
    parts = [f"capability {_dotted(capability)}", f"triton {triton.__version__ if triton else 'absent'}"]
    parts += ["bfloat16", "FP8 on request" if fp8.supported(device)[0] else "no FP8"]
    return ", ".join(parts)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

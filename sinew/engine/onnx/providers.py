"""Execution providers of ONNX Runtime: those that are asked for, and those that a session really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
# short name -> ONNX Runtime's
SHORT = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": OPENVINO,
    "coreml": "CoreMLExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "directml": "DmlExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}


def runtime() -> Any:
    """Return the onnxruntime package."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackageError("engine onnx", "onnxruntime") from None
    return onnxruntime


def choose(names: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Providers in order of preference, and why.

    Without names it is the CPU: what else an installation offers is not measured here and computes other
    bits, so it is taken when it is asked for. The CPU comes last for the operators that others lack.
    """
    offered = runtime().get_available_providers()
    if not names:
        others = ", ".join(name for name in offered if name != CPU)
        reason = f"the reference; by name there are {others}" if others else "the only one on offer"
        return (CPU,), reason
    wanted = [SHORT.get(name.lower(), name) for name in names]
    if missing := [name for name in wanted if name not in offered]:
        raise SinewError(f"provider {', '.join(missing)}: expected some of {', '.join(offered)}")
    reason = "asked for"
    if CPU not in wanted:
        wanted.append(CPU)
        reason += f"; {CPU} for operators that it lacks"
    return tuple(dict.fromkeys(wanted)), reason


def loaded(session: Any, wanted: Sequence[str]) -> list[str]:
    """Return the providers that a session really has. ONNX Runtime leaves out one whose libraries do not load and
    goes on; here that is an error."""
    found = session.get_providers()
    if lost := [name for name in wanted if name not in found]:
        raise SinewError(
            f"provider {', '.join(lost)}: offered, but it does not load (are its libraries there?)"
        )
    return found

"""Write a safetensors file of noise, tensor by tensor, with constant memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.checkpoints.plan import TensorPlan

# One block of noise serves every tensor, and each tensor starts at another offset. A prime length has no common factor
# with the width of a matrix, so two rows of a tensor are never the same slice.
NOISE_LENGTH = 4_194_301

Progress = Callable[[int, int], None]  # arguments: bytes written so far, bytes in total


def write_tensors(
    path: Path,
    plans: Sequence[TensorPlan],
    fixed: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a safetensors file of noise, with constant memory.

    Args:
        path: The file to write.
        plans: The tensors to fill with noise.
        fixed: float32 arrays that are written in addition to the noise, by name.
        metadata: Metadata of the file.
        progress: Called after each tensor with the bytes written so far and the total.

    Returns:
        The size of the file in bytes.
    """
    all_plans = [*plans, *(TensorPlan(name, values.shape, "bias") for name, values in fixed.items())]
    all_plans.sort(key=lambda plan: (plan.storage != "F32", plan.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for plan in all_plans:
        span = [offset, offset + plan.nbytes]
        header[plan.name] = {"dtype": plan.storage, "shape": list(plan.shape), "data_offsets": span}
        offset += plan.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    rng = np.random.default_rng(0)
    noise = rng.standard_normal(NOISE_LENGTH, dtype=np.float32)
    partial = path.with_name(path.name + ".partial")
    written = 0
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in all_plans:
            if plan.name in fixed:
                file.write(np.ascontiguousarray(fixed[plan.name], dtype="<f4").data)
            else:
                start = int(rng.integers(NOISE_LENGTH))
                _write_noise(file, noise, plan, start)
            written += plan.nbytes
            if progress is not None:
                progress(written, offset)
    # Rename at the end, so that an interrupted run leaves no file that looks complete.
    partial.replace(path)
    return 8 + len(text) + offset


def _write_noise(file: BinaryIO, noise: np.ndarray, plan: TensorPlan, start: int) -> None:
    scale, shift = _scale_and_shift(plan)
    remaining = plan.elements
    while remaining:
        piece = noise[start : start + remaining] * np.float32(scale) + np.float32(shift)
        file.write((piece if plan.storage == "F32" else _to_bfloat16(piece)).data)
        remaining -= piece.size
        start = 0


def _scale_and_shift(plan: TensorPlan) -> tuple[float, float]:
    if plan.init == "norm":
        return 0.1, 1.0
    if plan.init == "bias":
        return 0.1, 0.0
    if plan.init == "embedding":
        return plan.shape[1] ** -0.5, 0.0
    return (plan.elements / plan.shape[0]) ** -0.5, 0.0  # 1 / sqrt(fan_in)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 numbers to the nearest bfloat16, ties to even. Returns the bits as uint16."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        "<u2"
    )

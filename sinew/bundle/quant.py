"""The formats of low-bit weights in a bundle, and their conversion from float32.

| name | tensor of the bundle | scale |
|---|---|---|
| ``q8_0``, ``q4_0`` | the GGUF type of that name, [channels, k] | one float16 for each 32 weights, inside the tensor |
| ``int8`` | I8, [channels, k] | a tensor ``X.scale``, float32 [channels], for ``X.weight`` |
| ``ternary`` | I32, [channels, ceil(k / 64) * 4]: 16 weights in each word | ``X.scale``, float32 [1] or [channels] |

Here ``channels`` is the number of outputs of a linear layer, and ``k`` is the number of its inputs.

GGUF's TQ2_0 needs rows of 256 weights and stores float16 scales. BitNet has one float32 scale for a whole
matrix, which float16 would round. Ternary weights therefore have their own layout. Rows are padded to a
multiple of 64 weights of 2 bits. Byte j of 16 bytes contains the weights j, 16 + j, 32 + j and 48 + j. Each
weight is stored plus one, and the first of the four is in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize as gguf_quantize

LARGEST = 127  # largest int8 weight; the range is -127 to 127
WEIGHT = ".weight"
SCALE = ".scale"  # X.weight has its scales in the tensor X.scale


@dataclass(frozen=True)
class Format:
    """A format in which a weight is stored as an integer code. The weight is ``scale * (code - offset)``.

    Attributes:
        name: Name of the format in quantisation recipes.
        type: Storage type of the tensor.
        number: Number by which the compiled kernels identify the format.
        offset: Number that is subtracted from a stored code before it is multiplied by the scale.
        group: Number of neighbouring weights in a row that share a scale; 0 if the scales are a separate
            tensor.
        bits: Bits per weight, including the scales inside the tensor.
    """

    name: str
    type: GGMLQuantizationType
    number: int
    offset: int
    group: int
    bits: float

    def row_bytes(self, k: int) -> int:
        """Return the size in bytes of a stored row with k weights (the weights of one output channel).

        Raises:
            ValueError: k is not a multiple of ``group``.
        """
        if self.group and k % self.group:
            raise ValueError(f"rows of {k} weights do not divide into groups of {self.group}")
        if self.name == "ternary":
            return -(-k // 64) * 16
        return k // 32 * {"q8_0": 34, "q4_0": 18}[self.name] if self.group else k

    def stored_shape(self, channels: int, k: int) -> tuple[int, int]:
        """Return the tensor's shape in the bundle, in elements of its storage type."""
        return (channels, self.row_bytes(k) // 4) if self.name == "ternary" else (channels, k)


_TYPE = GGMLQuantizationType
FORMATS = {
    f.name: f
    for f in (
        Format("ternary", _TYPE.I32, 0, 1, 0, 2.0),
        Format("int8", _TYPE.I8, 1, 0, 0, 8.0),
        Format("q8_0", _TYPE.Q8_0, 2, 0, 32, 8.5),
        Format("q4_0", _TYPE.Q4_0, 3, 8, 32, 4.5),
    )
}
BY_TYPE = {f.type: f for f in FORMATS.values()}


def quantize(weights: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Quantise a matrix.

    ``q8_0`` and ``q4_0`` equal the ``gguf`` package's result, bit for bit. ``int8`` is symmetric about zero with one
    scale per channel. ``ternary`` is the format of BitNet b1.58: the scale is the mean absolute value of the matrix,
    and weights are rounded and clipped to -1, 0 and 1.

    Args:
        weights: float32 [channels, k].
        name: Name of the format, a key of :data:`FORMATS`.

    Returns:
        The stored rows, uint8 [channels, bytes], and float32 scales; None if the rows contain the scales.

    Raises:
        ValueError: k is not a multiple of the format's group, or a weight is not finite.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    if not np.isfinite(weights).all():
        raise ValueError("a weight is not finite")
    stored = FORMATS[name]
    stored.row_bytes(weights.shape[1])
    if stored.group:
        return gguf_quantize(weights, stored.type), None
    if name == "int8":
        largest = np.abs(weights).max(axis=1, initial=0.0)
        scale = (largest / np.float32(LARGEST)).astype(np.float32)
        # If all weights of a channel are almost zero, its scale would be a subnormal number, which is
        # imprecise. So the weights of this channel become zeros.
        scale[scale < np.finfo(np.float32).tiny] = 1
        values = np.clip(np.rint(weights / scale[:, None]), -LARGEST, LARGEST).astype(np.int8)
        return values.view(np.uint8), scale
    mean = np.maximum(np.abs(weights).mean(dtype=np.float32), np.float32(1e-5))
    values = np.clip(np.rint(weights * (np.float32(1) / mean)), -1, 1).astype(np.int8)
    return pack_ternary(values), np.array([mean], np.float32)


def pack_ternary(values: np.ndarray) -> np.ndarray:
    """Pack weights -1, 0 and 1, int8 [channels, k], into stored rows, uint8 [channels, bytes]."""
    channels, k = values.shape
    padded = np.zeros((channels, -(-k // 64) * 64), np.int8)
    padded[:, :k] = values
    spread = (padded + 1).astype(np.uint8).reshape(channels, -1, 4, 16)
    packed = spread[:, :, 0] | spread[:, :, 1] << 2 | spread[:, :, 2] << 4 | spread[:, :, 3] << 6
    return packed.reshape(channels, -1)


def unpack_ternary(stored: np.ndarray, k: int) -> np.ndarray:
    """Unpack ternary weights, whose rows are stored as an array of any type. Return -1, 0 and 1, int8 [channels, k]."""
    packed = np.ascontiguousarray(stored).view(np.uint8).reshape(len(stored), -1, 1, 16)
    spread = packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # [channels, k / 64, 4, 16]
    return spread.reshape(len(stored), -1)[:, :k].astype(np.int8) - 1

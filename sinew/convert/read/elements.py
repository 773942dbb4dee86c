"""A table that maps each storage type of a tensor to the numpy type with which its elements are read."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
ELEMENTS: dict[GGMLQuantizationType, np.dtype] = {
    F32: np.dtype("<f4"),
    F16: np.dtype("<f2"),
    BF16: np.dtype("<u2"),  # numpy has no bfloat16, so its bits are read as integers
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.I8: np.dtype("<i1"),
    GGMLQuantizationType.I16: np.dtype("<i2"),
    GGMLQuantizationType.I32: np.dtype("<i4"),
    GGMLQuantizationType.I64: np.dtype("<i8"),
}

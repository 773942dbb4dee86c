"""Tile sizes for each kernel and class of problem size ("regime"): one measured table, and one for all other GPUs.

The tiles for sm_90 are from sweeps on an H100 and an H200 over the problems of pi0, pi0.5 and SmolVLA, with weights
that were not in the cache (research/log/2026-11-26.md, 2026-11-27.md). Nobody has timed tiles on another architecture.
All other GPUs use one table of small tiles, which fit the shared memory and registers of every supported GPU.

The regimes are:

* ``few``: up to 64 rows. This is the iterative head, which is limited by reading weights and needs as many programs as
  the device has multiprocessors.
* ``some``: up to 256 rows, the prefix of a small model.
* ``many``: a prefix that is limited by arithmetic and needs large tiles.
* ``narrow``: a few rows of attention with heads of up to 64, whose prefixes are also short.

A tile's split is reduced until each program that shares an output block has work (:func:`has_work`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import torch

from sinew.engine.cuda.kernels.launch import Tile

Regime = Literal["few", "some", "many", "narrow"]
FEW_ROWS, SOME_ROWS = 64, 256
# A program of a split product multiplies at least this many elements of the weight. With fewer elements, joining the
# parts would take longer.
PART = 1 << 14
PROGRAMS = 128  # approximately the number of multiprocessors of a GPU
TOGETHER = (
    4  # the last program of a block of an attention joins up to this many parts; a kernel joins more parts
)
NARROW_HEAD = 64  # the largest size of a narrow head
MEASURED = 90  # the compute capability of the measured tiles, times 10
OLDEST = 80
# On machines without a GPU, tests use the tiles of all other GPUs.
NO_GPU = OLDEST

_SMALL = Tile(64, 32, 64, warps=8, stages=3)
_PAIRED = Tile(128, 64, 32, warps=8, stages=4)

TILES: dict[str, dict[str, Tile]] = {
    "norm_linear": {"few": _SMALL, "many": Tile(128, 128, 32, warps=8, stages=4)},
    "gated_mlp": {"few": _SMALL, "many": _PAIRED},
    # With heads of 64 columns, a program has 16 of the head's 32 pairs of columns. 15 heads then give 30 programs.
    "qkv_rope": {"few": Tile(64, 16, 64, stages=4), "many": _PAIRED},
    "splitk_linear": {
        "few": Tile(64, 64, 64, 8, warps=8, stages=4),
        "many": Tile(128, 128, 32, warps=8),
    },
    "packed_attention": {
        "few": Tile(32, 32, split=4, warps=4, stages=2),
        "many": Tile(64, 16, warps=8, stages=2),
        "narrow": Tile(32, 64, split=4, stages=2),
    },
    # k is a multiple of the 32 weights that share a scale. A tile has fewer rows if there are fewer. The blocks have
    # few columns, so that a layer of 1,024 columns keeps the 16 or 20 multiprocessors of a Jetson busy. On sm_80, a
    # depth of 128 does not fit the registers if a residual is added.
    "weight_only_linear": {
        "few": Tile(64, 32, stages=4),
        "many": Tile(128, 32, 64, warps=8, stages=4),
    },
    "row_norm": {"few": Tile(warps=4)},
    "activate": {"few": Tile(n=256, warps=2), "many": Tile(n=1024, warps=4)},  # n columns of one row
    "rope": {"few": Tile(1, warps=1), "many": Tile(8, warps=4)},  # m is a number of rows of one head
    "fp8_quantize": {"few": Tile(warps=8)},
    "preprocess": {"few": Tile(n=128, warps=2)},
}

# The kernels with other tiles on sm_90.
ON_90: dict[str, dict[str, Tile]] = {
    "norm_linear": {
        "few": Tile(64, 32, 128, stages=3),
        "many": Tile(128, 128, 64, warps=8, stages=4),
    },
    "gated_mlp": {
        "few": Tile(64, 32, 64, stages=8),
        "some": Tile(64, 64, 64, stages=6),
        "many": Tile(128, 128, 64, warps=8),
    },
    "qkv_rope": {
        "few": Tile(64, 16, 64, stages=8),
        "some": Tile(64, 32, 64, stages=6),
        "many": Tile(128, 64, 64, warps=8, stages=4),
    },
    "splitk_linear": {
        "few": Tile(64, 32, 128, 4, stages=4),
        "some": Tile(64, 32, 128, stages=6),
        "many": Tile(128, 128, 64, warps=8, stages=4),
    },
    "packed_attention": {
        "few": Tile(64, 64, split=17, warps=4, stages=2),
        "many": Tile(64, 32, split=2, warps=4, stages=2),
        "narrow": Tile(16, 64, split=4, stages=1),
    },
}

# A float32 product takes three tensor-core products and twice the memory, so every architecture uses small tiles.
FLOAT32: dict[str, dict[str, Tile]] = {
    "norm_linear": {  # the head's last projection, which has 32 columns
        "few": Tile(16, 32, 128, warps=4, stages=3),
        "many": Tile(16, 32, 64, warps=4, stages=2),
    },
    "gated_mlp": {"few": Tile(16, 32, 32, warps=4, stages=2)},
    "qkv_rope": {"few": Tile(16, 32, 32, warps=4, stages=2)},
    "splitk_linear": {"few": Tile(16, 32, 64, 4, warps=4, stages=3)},
    "packed_attention": {"few": Tile(16, 16, split=4, warps=4, stages=1)},
}


def tile_for(
    kernel: str, dims: Sequence[int], dtype: torch.dtype, device: torch.device, observations: int = 1
) -> Tile:
    """Return the tile for a launch with these sizes on a device.

    The arguments ``dims``, ``dtype`` and ``observations`` are those of :func:`default`.
    """
    return default(kernel, dims, dtype, capability(device), observations)


def capability(device: torch.device) -> int:
    """Return the compute capability of a device, major * 10 + minor."""
    if device.type != "cuda":
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def default(
    kernel: str, dims: Sequence[int], dtype: torch.dtype, capability: int, observations: int = 1
) -> Tile:
    """Return the tile for a problem.

    Args:
        kernel: Name of the kernel.
        dims: Sizes of the problem, rows first (packed rows for attention).
        dtype: Dtype of the weight.
        capability: Compute capability, major * 10 + minor.
        observations: Number of observations of an attention. ``dims`` are the sizes of one of them.

    Raises:
        ValueError: The capability is older than 8.0.
    """
    if capability < OLDEST:
        raise ValueError(f"compute capability: expected 8.0 or newer, got {capability / 10}")
    measured = capability == MEASURED
    wide = dtype == torch.float32 and kernel in FLOAT32
    regimes = FLOAT32[kernel] if wide else (measured and ON_90.get(kernel)) or TILES[kernel]
    tile = regimes[regime(kernel, dims, regimes)]
    if kernel in ("splitk_linear", "gated_mlp") and not wide and measured:
        tile = spread(dims, tile)
    if kernel == "weight_only_linear":
        tile = replace(tile, m=min(tile.m, max(16, 1 << (dims[0] - 1).bit_length())))
    if kernel == "packed_attention":
        # Several observations have so many more blocks of rows that fewer programs need to share a block. If a kernel
        # joins the parts, it still does, because the attention's program would need too many registers.
        split = max(-(-tile.split // observations), TOGETHER + 1 if tile.split > TOGETHER else 1)
        blocks = -(-dims[0] // tile.m) * dims[3] * observations
        tile = replace(tile, split=1 if blocks > 2 * PROGRAMS else split)  # enough for all multiprocessors
    while tile.split > 1 and not has_work(kernel, dims, tile):
        tile = replace(tile, split=tile.split - 1)
    return tile


def spread(dims: Sequence[int], tile: Tile) -> Tile:
    """Return a tile with fewer columns if few rows would leave multiprocessors idle, with a suitable split."""
    rows, columns, depth = dims
    while rows <= FEW_ROWS and tile.n > 16 and -(-columns // tile.n) * tile.split < PROGRAMS:
        tile = replace(tile, n=tile.n // 2)
    return replace(tile, split=max(1, min(tile.split, round(tile.n * depth / PART))))


def regime(kernel: str, dims: Sequence[int], regimes: Collection[str]) -> Regime:
    """Return the class of a problem's size, one of ``regimes`` (for example "few" for up to 64 rows)."""
    packed = kernel == "packed_attention"
    # In attention, each pair of a query and a head is one row: "few" then means 8 heads x 64 queries.
    few = FEW_ROWS * 8 if packed else FEW_ROWS
    if few < dims[0] <= SOME_ROWS and "some" in regimes:
        return "some"
    if dims[0] > few and "many" in regimes:
        return "many"
    return "narrow" if packed and dims[-1] <= NARROW_HEAD and "narrow" in regimes else "few"


def has_work(kernel: str, dims: Sequence[int], tile: Tile) -> bool:
    """Return True if each of the programs that share an output block has at least one part of the sum to compute."""
    if kernel in ("splitk_linear", "qkv_rope"):
        (_, _, extent, *_), size, own = dims, tile.k, 0
    elif kernel == "packed_attention":
        (_, extent, own, *_), size = (
            dims,
            tile.n,
        )  # the last program also reads the keys of the queries' own tokens
    else:
        return True
    blocks = -(-extent // size)
    busy = -(-blocks // -(-blocks // tile.split))
    return busy + (own > 0) >= tile.split

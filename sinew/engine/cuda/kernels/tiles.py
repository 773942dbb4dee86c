"""Tile configurations, as data: for each kernel, architecture and regime, the default first.

The other entries are what tuning tries. None of them has been timed yet: they were chosen by the shared memory
and registers that the compiler reports (``tests/engine/cuda/kernel_compile.py``) and by the number of programs.

``few``: up to 64 rows, the iterative head, which streams weights and wants as many programs as the device has
multiprocessors (132 on an H200), each with some 23 KB of weight on its way (4.3 TB/s for 700 ns, computed).
``many``: the prefix, limited by arithmetic, which wants large tiles. ``narrow``: a few rows of attention with heads of
up to 64, whose prefixes are short as well.

A tile is only offered for a problem where each of its programs has something to multiply (:func:`has_work`), and a
cooperative one, whose split is the number of its blocks of keys, where its programs run at once. None of these is a
default before one has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from sinew.engine.cuda.kernels.launch import Tile

Regime = Literal["few", "many", "narrow"]
FEW_ROWS = 64
NARROW_HEAD = 64
ARCHITECTURES = (80, 89, 90)
MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}  # of A100, RTX 4090, H200: for GPUs that are not there
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes that one program may have
LARGEST_SPLIT = 64  # a power of two: counters wrap at one (kernels/packed_attention.py)
# Compute capabilities that have another one's shared memory and instructions: A10, RTX 3090; Orin; B200; RTX 5090.
LIKE = {86: 89, 87: 80, 100: 90, 103: 90, 120: 89, 121: 89}

_ROWWISE = {"few": [Tile(warps=4), Tile(warps=8), Tile(warps=2)]}
_COLUMNS = {  # of one row; where its scale is to be found, all of them, and the warps that hold them
    "few": [Tile(n=256, warps=2), Tile(n=512, warps=4), Tile(n=128, warps=1)],
    "many": [Tile(n=1024, warps=4), Tile(n=512, warps=4), Tile(n=1024, warps=8), Tile(n=256, warps=2)],
}
_HEADS = {  # rows of one head
    "few": [Tile(1, warps=1), Tile(2, warps=1), Tile(4, warps=2)],
    "many": [Tile(8, warps=4), Tile(4, warps=2), Tile(16, warps=4), Tile(2, warps=1)],
}
_PIXELS = {"few": [Tile(n=128, warps=2), Tile(n=256, warps=4), Tile(n=64, warps=1)]}
_SKINNY = [Tile(64, 32, 128, stages=3), Tile(64, 16, 128, stages=4), Tile(64, 64, 64, stages=4)]
_PAIR_80 = [Tile(64, 32, 64, warps=8, stages=4), Tile(64, 32, 32, stages=4), Tile(64, 64, 64, stages=3)]
_PAIR_90 = [
    Tile(64, 32, 64, stages=4),
    Tile(64, 32, 128, stages=4),
    Tile(64, 32, 128, warps=8, stages=4),
    Tile(64, 16, 128, stages=4),
    Tile(64, 16, 64, stages=6),
    Tile(64, 64, 64, warps=8, stages=4),
]
# A head of 64 has 16 of its 32 pairs of columns per program, so that 15 heads are 30 programs. On sm_90 two kernels
# of 98 KB fit beside each other for dependent launch; six stages hold all of a depth of 720 and are left to tuning.
# Those in two parts are for SmolVLA, whose 25 or 15 heads of 64 and depth of 720 are 50 or 30 programs of 46 KB.
_QKV_80 = [Tile(64, 16, 128, stages=4), *_PAIR_80, Tile(64, 16, 128, 2, stages=3)]
_QKV_90 = [
    Tile(64, 16, 128, stages=4),
    Tile(64, 16, 128, stages=6),
    Tile(32, 16, 256, stages=3),
    Tile(64, 32, 64, stages=4),
    Tile(64, 32, 128, stages=4),
    Tile(64, 32, 128, warps=8, stages=4),
    Tile(64, 16, 128, 2, stages=3),
    Tile(64, 16, 128, 3, stages=2),
]
_AT_ONCE = [Tile(64, 64, warps=8, stages=1, cooperative=True)]
_NARROW_AT_ONCE = [Tile(32, 64, stages=1, cooperative=True), Tile(64, 64, stages=1, cooperative=True)]
_NARROW_HEADS = [
    Tile(32, 64, split=4, stages=2),
    Tile(32, 64, split=3, stages=2),
    Tile(32, 64, split=2, stages=2),
    Tile(16, 64, split=3, stages=2),
    *_NARROW_AT_ONCE,
]
_SPLIT = [Tile(64, 64, 64, 8, stages=4), Tile(64, 32, 128, 4, stages=3), Tile(64, 64, 128, 4, stages=3)]
_SKINNY_90 = [
    Tile(64, 32, 128, stages=3),
    Tile(64, 32, 128, stages=5),
    Tile(64, 16, 128, stages=5),
    Tile(64, 16, 256, stages=4),
    Tile(64, 64, 64, stages=4),
]
_SPLIT_90 = [  # the first joins four parts in two dependent round trips to L2; (64, 64, 64, 8) took 28 in SASS
    Tile(64, 32, 128, 4, stages=4),
    Tile(64, 64, 64, 8, stages=4),
    Tile(64, 16, 128, 2, stages=5),
    Tile(64, 16, 256, 4, stages=3),
    Tile(64, 32, 128, 8, stages=3),
    Tile(64, 64, 128, 4, stages=3),
]
_SMALL = [Tile(64, 32, 64, warps=8, stages=3), Tile(64, 16, 64, stages=4), Tile(64, 32, 64, stages=3)]
_QKV_89 = [_SMALL[1], _SMALL[0], _SMALL[2], Tile(64, 16, 64, 2, stages=4)]
_WHOLE_ROWS = {"few": [Tile(warps=8), Tile(warps=4), Tile(warps=16)]}
_FP8_MANY_89 = [Tile(128, 128, 64, warps=8, stages=4), Tile(64, 128, 64, warps=4, stages=4)]
_FP8_FEW_89 = [Tile(64, 32, 128, stages=4), Tile(64, 16, 128, stages=4), Tile(64, 64, 64, stages=4)]
_FP8_89 = {"few": _FP8_FEW_89, "many": _FP8_MANY_89}

TILES: dict[str, dict[int, dict[str, list[Tile]]]] = {
    "norm_linear": {
        80: {"few": _SKINNY, "many": [Tile(128, 128, 32, warps=8, stages=4), Tile(128, 64, 64, warps=4)]},
        89: {"few": _SMALL, "many": [Tile(128, 128, 32, warps=8, stages=4), Tile(64, 128, 32, warps=4)]},
        90: {
            "few": _SKINNY_90,
            "many": [
                Tile(128, 128, 64, warps=8, stages=4),
                Tile(128, 256, 64, warps=8),
                Tile(128, 64, 64, warps=8, stages=4),
                Tile(64, 128, 64, warps=4, stages=4),
            ],
        },
    },
    "gated_mlp": {
        80: {"few": _PAIR_80, "many": [Tile(128, 64, 32, warps=8, stages=4), Tile(64, 64, 64, warps=4)]},
        89: {"few": _SMALL, "many": [Tile(128, 64, 32, warps=8, stages=4), Tile(64, 64, 32, warps=4)]},
        90: {
            "few": _PAIR_90,
            "many": [
                Tile(128, 128, 64, warps=8),
                Tile(128, 128, 64, warps=8, stages=4),
                Tile(128, 64, 64, warps=8, stages=4),
                Tile(64, 128, 64, warps=8, stages=4),
                Tile(64, 128, 64, warps=4, stages=4),
                Tile(256, 64, 64, warps=8),
            ],
        },
    },
    "qkv_rope": {
        80: {"few": _QKV_80, "many": [Tile(128, 64, 32, warps=8, stages=4), Tile(64, 64, 64, warps=4)]},
        89: {"few": _QKV_89, "many": [Tile(128, 64, 32, warps=8, stages=4), Tile(64, 64, 32, warps=4)]},
        90: {
            "few": _QKV_90,
            "many": [
                Tile(128, 64, 64, warps=8, stages=4),
                Tile(64, 64, 64, warps=4, stages=4),
                Tile(64, 64, 64, warps=8, stages=4),
                Tile(64, 128, 64, warps=8),
                Tile(128, 32, 64, warps=4, stages=4),
            ],
        },
    },
    "splitk_linear": {
        80: {"few": _SPLIT, "many": [Tile(128, 128, 32, warps=8, stages=4)]},
        89: {
            "few": [Tile(64, 64, 64, 8, warps=8, stages=4), Tile(64, 32, 64, 8)],
            "many": [Tile(128, 128, 32, warps=8)],
        },
        90: {
            "few": _SPLIT_90,
            "many": [
                Tile(128, 128, 64, warps=8, stages=4),
                Tile(128, 128, 128, warps=8, stages=3),
                Tile(128, 256, 64, warps=8, stages=4),
                Tile(64, 128, 64, warps=4, stages=4),
                Tile(128, 64, 64, 2, warps=4),
            ],
        },
    },
    "packed_attention": {
        80: {
            "few": [
                Tile(32, 32, split=8, warps=4, stages=2),
                Tile(32, 32, split=7, warps=4, stages=2),
                Tile(64, 32, split=8, warps=8, stages=2),
                *_AT_ONCE,
            ],
            "many": [Tile(64, 32, warps=8, stages=2), Tile(64, 16, warps=8, stages=3)],
            "narrow": _NARROW_HEADS,
        },
        89: {
            "few": [
                Tile(32, 32, split=4, warps=4, stages=2),
                Tile(16, 32, split=4, warps=4, stages=2),
                *_AT_ONCE,
            ],
            "many": [Tile(64, 16, warps=8, stages=2), Tile(64, 32, warps=8, stages=1)],
            "narrow": _NARROW_HEADS,
        },
        90: {
            "few": [
                Tile(32, 32, split=8, warps=4, stages=2),
                Tile(32, 32, split=7, warps=4, stages=2),  # 513 keys: the eighth would have none
                Tile(16, 32, split=4, warps=4, stages=2),
                Tile(64, 32, split=8, warps=8, stages=2),
                Tile(64, 32, split=16, warps=8, stages=2),
                *_AT_ONCE,
            ],
            "many": [  # the second fits where the mask is one of keys alone
                Tile(64, 64, warps=8, stages=2),
                Tile(128, 64, warps=8, stages=2),
                Tile(128, 32, warps=8, stages=2),
            ],
            "narrow": _NARROW_HEADS,
        },
    },
    "row_norm": dict.fromkeys(ARCHITECTURES, _ROWWISE),
    "activate": dict.fromkeys(ARCHITECTURES, _COLUMNS),
    "rope": dict.fromkeys(ARCHITECTURES, _HEADS),
    "fp8_quantize": dict.fromkeys(ARCHITECTURES, _WHOLE_ROWS),
    "fp8_product": {
        **dict.fromkeys((80, 89), _FP8_89),  # sm_80 cannot; launches on the meta device are made with its row
        90: {
            "few": [
                Tile(64, 32, 128, stages=4),
                Tile(64, 32, 256, stages=4),
                Tile(64, 16, 256, stages=5),
                Tile(64, 16, 512, stages=4),
                Tile(64, 64, 256, stages=4),
            ],
            "many": [
                Tile(128, 128, 128, warps=8, stages=4),
                Tile(128, 256, 128, warps=8, stages=3),
                Tile(128, 256, 128, warps=8, stages=4),
                Tile(256, 128, 128, warps=8, stages=3),
                Tile(64, 128, 128, warps=4, stages=4),
            ],
        },
    },
    "preprocess": dict.fromkeys(ARCHITECTURES, _PIXELS),
}

# Float32 multiplies without tensor cores and takes twice the memory: small tiles, on every architecture.
FLOAT32: dict[str, dict[str, list[Tile]]] = {
    "norm_linear": {  # the head's last projection, of 32 columns: blocks of 16 rows and 32 columns are 4 programs
        "few": [
            Tile(16, 16, 64, warps=4, stages=4),
            Tile(16, 8, 128, warps=4, stages=3),
            Tile(8, 16, 128, warps=4, stages=3),
            Tile(16, 32, 64, warps=4, stages=2),
        ],
        "many": [Tile(16, 32, 64, warps=4, stages=2)],
    },
    "gated_mlp": {"few": [Tile(16, 32, 32, warps=4, stages=2)]},
    "qkv_rope": {"few": [Tile(16, 32, 32, warps=4, stages=2)]},
    "splitk_linear": {  # a depth of 32, as the first projection of the head has, is not worth splitting
        "few": [
            Tile(16, 32, 64, 4, warps=4, stages=2),
            Tile(16, 32, 32, 1, warps=4, stages=2),
            Tile(16, 16, 32, 1, warps=4, stages=2),
        ]
    },
    "packed_attention": {"few": [Tile(16, 16, split=4, warps=4, stages=1)]},
}


def architecture(capability: int) -> int:
    """The row of the table for a compute capability (major * 10 + minor)."""
    if capability in LIKE:
        return LIKE[capability]
    known = [row for row in ARCHITECTURES if row <= capability]
    if not known:
        raise ValueError(f"compute capability: expected 8.0 or newer, got {capability / 10}")
    return known[-1]


def candidates(
    kernel: str,
    dims: Sequence[int],
    dtype: torch.dtype,
    capability: int,
    multiprocessors: int | None = None,
) -> list[Tile]:
    """Return the tiles for a problem, the default first.

    dims: the key of the problem, rows first (packed rows for attention). dtype: the weight's. multiprocessors: of the
    device; None takes :data:`MULTIPROCESSORS`.
    """
    wide = dtype == torch.float32 and kernel in FLOAT32
    regimes = FLOAT32[kernel] if wide else TILES[kernel][architecture(capability)]
    listed = regimes[_regime(kernel, dims, regimes)]
    found = [tile for tile in listed if not tile.cooperative]
    unsplit = dict.fromkeys(
        replace(tile, split=1) for tile in found
    )  # for depths and keys shorter than any split
    most = MULTIPROCESSORS[architecture(capability)] if multiprocessors is None else multiprocessors
    together = [_over_all_keys(tile, dims) for tile in listed if tile.cooperative]
    return [
        *([tile for tile in found if has_work(kernel, dims, tile)] or unsplit),
        *(tile for tile in together if 1 < tile.split <= LARGEST_SPLIT and _programs(tile, dims) <= most),
    ]


def _over_all_keys(tile: Tile, dims: Sequence[int]) -> Tile:
    """Return a cooperative tile of attention with a program for each of a problem's blocks of keys."""
    _, prefix, own, *_ = dims
    return replace(tile, split=-(-(prefix + own) // tile.n))


def _programs(tile: Tile, dims: Sequence[int]) -> int:
    rows, *_, heads, _ = dims
    return -(-rows // tile.m) * heads * tile.split


def _regime(kernel: str, dims: Sequence[int], regimes: Mapping[str, list[Tile]]) -> Regime:
    packed = kernel == "packed_attention"
    few = FEW_ROWS * 8 if packed else FEW_ROWS  # attention packs the heads of a group into its rows: 8 x 64
    if dims[0] > few and "many" in regimes:
        return "many"
    return "narrow" if packed and dims[-1] <= NARROW_HEAD and "narrow" in regimes else "few"


def has_work(kernel: str, dims: Sequence[int], tile: Tile) -> bool:
    """Return True if none of the programs that share an output block is left without depth or keys."""
    if kernel in ("splitk_linear", "qkv_rope"):
        (_, _, extent, *_), size, own = dims, tile.k, 0
    elif kernel == "packed_attention":
        (_, extent, own, *_), size = dims, tile.n  # the last program has the queries' own keys
    else:
        return True
    blocks = -(-extent // size)
    busy = -(-blocks // -(-blocks // tile.split))
    return busy + (own > 0) >= tile.split

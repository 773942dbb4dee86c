"""One check for each kernel: run it on unusual tensors, compare it with the reference, and check the memory around
it.

``module`` is the file of the kernel, or a copy with an error. The reference is always the real one. The checks of
kernels that process whole rows are in ``kernel_row_checks.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sinew.engine.cuda.kernels import KERNELS, Workspace
from sinew.engine.cuda.kernels.fp8_quantize import NEEDS
from sinew.engine.cuda.kernels.lang import triton
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.kernels.splitk_linear import statistics_reference
from sinew.engine.cuda.kernels.tiles import capability
from sinew.processing.image import prepare_frame
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox
from tests.engine.cuda import kernel_row_checks
from tests.engine.cuda.kernel_tensors import (
    DEVICE,
    EPS,
    SENTINEL,
    Source,
    close,
    guarded_parts,
    target,
    untouched,
)

try:
    import pytest
# Without Pillow, a check is skipped. On a machine with a GPU, `make gpu` runs the checks without Pillow.
except ImportError:
    pytest = None  # type: ignore[assignment]

needs_triton = pytest and pytest.mark.skipif(
    triton is None, reason="triton is not installed; it supports only Linux"
)
SMALL = Tile(16, 16, 16, stages=2)
DEEPER = Tile(16, 16, 32, stages=2)
SPLIT = Tile(16, 16, 16, 3)
GROUPS = Tile(16, 16, 64, stages=2)  # two groups of low-bit weights that share a scale


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm_of(s: Source, M: int, columns: int, affine: bool, given: int) -> dict[str, Any]:
    """Return the options of a product after a norm.

    Args:
        s: Source of random tensors.
        M: Rows.
        columns: Columns of the input.
        affine: Add scale and offset of the norm.
        given: Number of columns of precomputed squares, which differ from those of x. 0: no norm.
    """
    options: dict[str, Any] = {"bias": s.random(columns)} if affine else {}
    return options | ({"eps": EPS, "squares": s.parts(M, given)} if given else {})


def norm_linear(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=50,
    N=37,
    affine=True,
    wide=False,
    given=4,
    silu=False,
    tile=SMALL,
) -> None:
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(N, K)
    weight = weight.float() if wide else weight
    options = norm_of(s, M, N, affine, given) | {"silu": silu}
    out = target(M, N, dtype=weight.dtype, device=device)
    module.norm_linear(x, weight, out=out, tile=tile, **options)
    close(module, "norm_linear", out, KERNELS["norm_linear"].reference(x, weight, **options))
    untouched(out)


def gated_mlp(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=50,
    N=37,
    activation="gelu_tanh",
    affine=True,
    given=4,
    tile=SMALL,
) -> None:
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(2 * N, K)
    options = {"activation": activation, **norm_of(s, M, 2 * N, affine, given)}
    out = target(M, N, dtype=dtype, device=device)
    module.gated_mlp(x, weight, out=out, tile=tile, **options)
    close(module, "gated_mlp", out, KERNELS["gated_mlp"].reference(x, weight, **options))
    untouched(out)


def qkv_rope(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=50,
    H=3,
    KV=2,
    D=24,
    affine=True,
    given=4,
    tile=SMALL,
) -> None:
    s = Source(dtype, device)
    columns = (H + 2 * KV) * D
    x, weight = s.rows(M, K), s.weight(columns, K)
    angle = s.random(M, D // 2, dtype=torch.float32) * 3
    options = norm_of(s, M, columns, affine, given)
    workspace, runs = Workspace(1 << 16, 64, device), []
    workspace.parts.fill_(float("nan"))
    references = KERNELS["qkv_rope"].reference(x, weight, angle.cos(), angle.sin(), (H, KV), **options)
    for _ in range(1 if tile.split == 1 else 2):
        runs.append([target(M, heads, D, dtype=dtype, device=device) for heads in (H, KV, KV)])
        module.qkv_rope(
            x, weight, angle.cos(), angle.sin(), *runs[-1], workspace=workspace, tile=tile, **options
        )
        for got, want in zip(runs[-1], references, strict=True):
            if want.numel():
                close(module, "qkv_rope", got, want)
            untouched(got)
    assert all(map(torch.equal, runs[0], runs[-1])), "two launches differ"
    assert not workspace.arrivals.any(), "counters are not zero after the launch"


def splitk_linear(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=150,
    N=37,
    full=True,
    norm=False,
    scaled=False,
    to=None,
    tile=SPLIT,
) -> None:
    """Check the product whose depth is split over several programs.

    Args:
        norm: Also return the sums of squares of the written values.
        scaled: Also multiply the written values by a scale.
        to: Type of the output. Both options use the values as they were stored in this type.
    """
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(N, K)
    options = {"bias": s.random(N), "gate": s.random(N), "residual": s.rows(M, N)} if full else {}
    workspace = Workspace(1 << 16, 64, device)
    workspace.parts.fill_(float("nan"))
    to = to or dtype
    want, outs = KERNELS["splitk_linear"].reference(x, weight, **options, dtype=to), []
    scale = s.vector(N) if scaled else None
    for _ in range(
        2
    ):  # A graph would replay the launch, so the counters must be zero again after each launch.
        outs.append(target(M, N, dtype=to, device=device))
        again = target(M, N, dtype=to, device=device) if scaled else None
        squares = guarded_parts(M, module.blocks(N, tile), device) if norm else None
        extra = {"squares": squares, "scale": scale, "scaled": again}
        module.splitk_linear(x, weight, workspace=workspace, out=outs[-1], tile=tile, **options, **extra)
        close(module, "splitk_linear", outs[-1], want)
        untouched(outs[-1])
        total, other = statistics_reference(outs[-1], scale)
        if squares is not None:
            sums = squares.sum(-1, keepdim=True)
            assert torch.allclose(sums, total, rtol=2e-6, atol=0), "squares"
            around = squares._base
            assert (around[0] == SENTINEL).all(), "squares: wrote before the output"
            assert (around[M + 1 :] == SENTINEL).all(), "squares: wrote behind the output"
        if again is not None:
            close(module, "splitk_linear", again, other)
            untouched(again)
    assert torch.equal(outs[0], outs[1]), "two launches differ"
    assert not workspace.arrivals.any(), "counters are not zero after the launch"


def weight_only_linear(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=160,
    N=37,
    form="q4_0",
    bias=True,
    residual=True,
    to=None,
    tile=GROUPS,
) -> None:
    """Random codes of the format ``form``, and scales of which no two are equal."""
    s = Source(dtype, device)
    codes, scales = s.codes(N, K, form)
    x = s.rows(M, K)
    options = {"bias": s.random(N)} if bias else {}
    options |= {"residual": s.random(M, N)} if residual else {}
    out = target(M, N, dtype=to or dtype, device=device)
    module.weight_only_linear(x, codes, scales, out=out, tile=tile, **options)
    reference = KERNELS["weight_only_linear"].reference
    close(module, "weight_only_linear", out, reference(x, codes, scales, dtype=to, **options))
    untouched(out)


def packed_attention(
    module: ModuleType,
    dtype,
    device,
    B=1,
    M=5,
    H=6,
    KV=2,
    D=16,
    P=37,
    S=5,
    loud=1.0,
    key_mask=False,
    hidden=0,
    tile=SPLIT,
) -> None:
    """Check attention over packed keys. ``hidden`` is the number of first keys that no query may use."""
    s = Source(dtype, device)

    def rows(
        count: int, heads: int
    ) -> torch.Tensor:  # rows of all observations take turns, so that both axes are strided
        return s.rows(count * B, heads, D).unflatten(0, (count, B)).transpose(0, 1)

    q = (rows(M, H).float() * loud).to(dtype)
    kv = rows(P, KV), rows(P, KV)
    own = (rows(S, KV), rows(S, KV)) if S else None
    mask = s.random(B, M, P + S, dtype=torch.float32) > -0.5
    mask[:, M // 2] = False  # this query may use no key
    if key_mask:  # the mask is one row in memory, and the byte after it would allow another key
        mask = (s.random(B, 1, P + S, dtype=torch.float32) > 0.0).expand(-1, M, -1)
    mask = mask & (torch.arange(P + S, device=mask.device) >= hidden) if hidden else mask
    workspace = Workspace(1 << 16, 64, device)
    workspace.parts.fill_(float("nan"))
    want, outs = KERNELS["packed_attention"].reference(q, kv, mask, own=own), []
    for _ in range(2):
        outs.append(target(B * M, H, D, dtype=dtype, device=device))
        out = outs[-1].unflatten(0, (B, M))
        module.packed_attention(q, kv, mask, own=own, workspace=workspace, out=out, tile=tile)
        close(module, "packed_attention", out, want)
        untouched(outs[-1])
    assert torch.equal(outs[0], outs[1]), "two launches differ"
    assert not workspace.arrivals.any(), "counters are not zero after the launch"


def preprocess(
    module: ModuleType, dtype, device, size=(11, 14), to=(8, 12), exact=True, pad="center", patch=4, views=1
) -> None:
    """Compare the resize kernel with its reference and with ``sinew.processing``. The bound for float32 is 1e-6 for
    values in [0, 1]."""
    box = Letterbox(*to, "pil_bilinear" if exact else "bilinear", pad, 0.0 if exact else -1.0)
    recipe = ImageRecipe(*to, (box,), mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    frames = np.random.default_rng(0).integers(0, 256, (views, *size, 3), dtype=np.uint8)
    resize = ResizeTables.of(*size, recipe, device)
    images = torch.from_numpy(frames).to(device)
    for patches in (None, patch):
        reference = KERNELS["preprocess"].reference(images, resize, dtype=dtype, patch=patches)
        out = target(*reference.shape, dtype=dtype, device=device)
        module.preprocess(images, resize, out=out, patch=patches, tile=Tile(n=16))
        close(module, "preprocess", out, reference)
        untouched(out)
        if patches is None and dtype == torch.float32:
            reference = np.stack([prepare_frame(frame, recipe) for frame in frames])
            error = np.abs(out.cpu().numpy() - reference).max()
            assert error <= 1e-6, f"preprocess: {error} from sinew.processing"


CHECKS = {
    "norm_linear": norm_linear,
    "gated_mlp": gated_mlp,
    "qkv_rope": qkv_rope,
    "splitk_linear": splitk_linear,
    "weight_only_linear": weight_only_linear,
    "packed_attention": packed_attention,
    "preprocess": preprocess,
    **kernel_row_checks.CHECKS,
}

DTYPES = [torch.float32, torch.bfloat16]
# The default sizes do not divide into tiles. These sizes are the special cases of every kernel.
EDGES = {
    "norm_linear": [
        {"M": 1, "K": 16, "N": 16},  # one row, and whole tiles
        {"given": 0, "affine": False},
        {"wide": True},
        {"M": 33, "tile": Tile(16, 32, 64)},  # tiles that are larger than the product
        {"given": 5},
        {"given": 1, "affine": False},
        {"given": 0, "affine": False, "silu": True},
    ],
    "gated_mlp": [
        {"M": 1, "activation": "silu"},
        {"given": 0, "affine": False, "K": 32, "N": 32},
        {"given": 3},
    ],
    "qkv_rope": [
        {"KV": 0, "H": 2, "D": 32},  # only queries
        {"H": 0, "KV": 1, "D": 32},  # only keys and values
        {"M": 1, "given": 0, "affine": False},
        {"tile": SPLIT, "K": 90},
        {"tile": SPLIT, "given": 3, "KV": 0, "D": 32},
        {"K": 20, "M": 1, "tile": Tile(16, 16, 16, 4)},  # some programs get no part of the depth
    ],
    "splitk_linear": [
        {"norm": True, "scaled": True},
        # the input layer, whose output has a narrower type
        {"norm": True, "scaled": True, "to": torch.bfloat16, "K": 32},
        {"norm": True, "M": 33, "N": 16, "full": False, "tile": Tile(16, 16, 16)},
        {"scaled": True, "tile": Tile(16, 32, 32, 1)},
        {"M": 1, "full": False},
        {"K": 20, "tile": Tile(16, 16, 16, 4)},  # some programs get no part of the depth
        {"tile": Tile(16, 32, 32, 1)},
    ],
    "weight_only_linear": [
        *({"form": form, "M": M, "K": K} for form in ("int8", "q8_0", "q4_0") for M, K in ((1, 96), (5, 64))),
        {"form": "int8", "M": 50, "K": 50},  # rows that divide into nothing
        {"form": "int8", "M": 1, "K": 720, "N": 16, "bias": False, "residual": False},
        {"form": "q8_0", "M": 50, "K": 352},
        {"form": "q4_0", "M": 50, "K": 352, "bias": False},
        {"form": "q8_0", "tile": Tile(16, 32, 32, stages=2)},
        {"form": "q4_0", "tile": Tile(32, 16, 128, stages=2), "residual": False},
        {"form": "q4_0", "K": 32, "to": torch.bfloat16},  # one group, onto a narrower stream
        # The rows of four observations, with the tile that the engine chooses for them.
        *({"form": form, "M": 200, "K": 64, "tile": None} for form in ("int8", "q8_0", "q4_0")),
    ],
    "packed_attention": [
        {"S": 0, "tile": Tile(16, 16)},
        {"P": 7, "S": 3, "tile": Tile(16, 16, split=4)},  # some programs get no key
        {"tile": Tile(16, 16, split=5)},  # another kernel joins the parts
        {"M": 9, "key_mask": True, "D": 32, "hidden": 20, "tile": Tile(16, 16, split=6)},
        {"loud": 40.0},  # exponentials overflow unless the largest score is subtracted
        {"M": 1, "H": 3, "KV": 1, "D": 64, "P": 16, "S": 16},
        {"key_mask": True},
        {"key_mask": True, "S": 0, "D": 32, "tile": Tile(16, 32)},
        {"S": 0, "P": 33},  # one key in the last part
        {"M": 9, "hidden": 20, "loud": 40.0},  # a part in which every key is hidden, and two blocks of rows
        {"B": 3, "M": 9},  # observations with keys and masks of their own
        {"B": 2, "M": 9, "tile": Tile(16, 16, split=5)},
        {"B": 3, "key_mask": True, "S": 0, "tile": Tile(16, 16)},
    ],
    "preprocess": [
        {"exact": False, "pad": "top_left", "views": 2},
        {"exact": False, "size": (5, 5), "to": (12, 8)},  # enlarges the frame
        {"size": (8, 12)},  # the frame already has the requested size
        {"size": (1, 1)},
    ],
    **kernel_row_checks.EDGES,
}


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"sinew.engine.cuda.kernels.{name}")


def all_checks() -> Iterator[tuple[str, torch.dtype, dict[str, Any]]]:
    """Yield (kernel, dtype, sizes) of every check that some machine supports."""
    for name in CHECKS:
        for dtype in DTYPES:
            yield name, dtype, {}
            for sizes in EDGES[name]:
                # run only float32 in the interpreter, because it is slow
                if DEVICE == "cuda" or dtype == torch.float32:
                    yield name, dtype, sizes


def run(name: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    """Run one check.

    Raises:
        AssertionError: The kernel differs from its reference.
    """
    CHECKS[name](module_of(name), dtype, DEVICE, **sizes)


def runs_here(name: str, sizes: dict[str, Any]) -> bool:
    """Return True if this device has the instructions that a check needs. The interpreter has all instructions."""
    needed = NEEDS if sizes.get("eighths") else KERNELS[name].capability
    return DEVICE == "cpu" or capability(torch.device(DEVICE)) >= needed

"""One check per kernel: run it on awkward tensors, compare with the twin, look at what it should not have touched.

Inputs lie inside memory full of NaN, outputs inside memory full of a sentinel, so a load or a store that misses
its mask shows. ``module`` is the kernel's file, or a broken copy of it; the twin is always the real one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinew.bundle.schema import ImageRecipe
from sinew.engine.kernels import KERNELS, Workspace
from sinew.engine.kernels.fp8_quantize import E4M3
from sinew.engine.kernels.lang import interpreted, triton
from sinew.engine.kernels.launch import Tile
from sinew.engine.kernels.resize_tables import Resize
from sinew.engine.kernels.tuning import capability
from sinew.processing.image import prepare_frame

try:
    import pytest
except ImportError:  # on a machine with a GPU, `make gpu` runs the checks without it
    pytest = None  # type: ignore[assignment]

# Largest error over the twin's largest value; relative L2. The interpreter cuts bfloat16 off where a GPU rounds
# it to nearest: up to 2^-7 of each scaled input and of the result, all downwards.
BOUNDS = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2**-5, 2**-6)}
ON_A_GPU = {torch.float32: (5e-6, 2e-6), torch.bfloat16: (2**-7, 2**-8)}
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
needs_triton = pytest and pytest.mark.skipif(
    triton is None, reason="triton is not installed (it exists for Linux alone)"
)
SENTINEL = 1024.0
EPS = 1e-6
SMALL = Tile(16, 16, 16, stages=2)
DEEPER = Tile(16, 16, 32, stages=2)
SPLIT = Tile(16, 16, 16, 3)


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Source:
    """Random tensors on a device, the same for the same seed."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(dtype or self.dtype).to(self.device)

    def rows(self, *shape: int) -> Tensor:
        """[M, ...] with M strided rows, NaN between and behind them."""
        return inside(self.random(*shape), float("nan"))

    def weight(self, N: int, K: int) -> Tensor:
        """[N, K] contiguous, NaN before and after, scaled so that products are of order one."""
        flat = torch.full((N * K + 64,), float("nan"), dtype=self.dtype, device=self.device)
        flat[32:-32] = (self.random(N, K, dtype=torch.float32) * K**-0.5).to(self.dtype).flatten()
        return flat[32:-32].view(N, K)


def inside(values: Tensor, filling: float) -> Tensor:
    """The same values as a view of a larger buffer: two rows around it, rows 24 elements apart."""
    M, *rest = values.shape
    size = int(np.prod(rest))
    buffer = torch.full((M + 2, size + 24), filling, dtype=values.dtype, device=values.device)
    view = buffer[1 : M + 1, :size]
    view.copy_(values.reshape(M, size))
    return view.unflatten(1, rest) if len(rest) > 1 else view


def target(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return inside(torch.full(shape, SENTINEL, dtype=dtype, device=device), SENTINEL)


def untouched(view: Tensor) -> None:
    """Nothing around an output of :func:`target` was written."""
    M, size = view.shape[0], int(np.prod(view.shape[1:]))
    buffer = view.new_empty(0).set_(view.untyped_storage()).view(M + 2, size + 24).clone()
    buffer[1 : M + 1, :size] = SENTINEL
    assert (buffer == SENTINEL).all(), "written outside of the output"


def close(module: ModuleType, name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    bounds = BOUNDS if interpreted(getattr(module, f"{name}_kernel")) else ON_A_GPU
    # Hopper's tensor cores add e4m3 products with some 14 bits: float32 out of them is no float32.
    in_eighths = name == "fp8_product" and bounds is ON_A_GPU
    highest, relative = bounds[torch.bfloat16 if in_eighths else want.dtype]
    error, scale = (got.double() - want.double()), want.double()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    assert error.abs().max() <= highest * scale.abs().max(), (
        f"{name}: {error.abs().max() / scale.abs().max()}"
    )
    assert error.norm() <= relative * scale.norm(), f"{name}: relative L2 {error.norm() / scale.norm()}"


def norm_linear(
    module: ModuleType, dtype, device, M=17, K=50, N=37, norm=True, affine=True, wide=False, tile=SMALL
) -> None:
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(N, K)
    weight = weight.float() if wide else weight
    options: dict[str, Any] = {"eps": EPS} if norm else {}
    options |= {"scale": s.random(K), "bias": s.random(N)} if affine else {}
    out = target(M, N, dtype=weight.dtype, device=device)
    module.norm_linear(x, weight, out=out, tile=tile, **options)
    close(module, "norm_linear", out, KERNELS["norm_linear"].twin(x, weight, **options))
    untouched(out)


def gated_mlp(
    module: ModuleType,
    dtype,
    device,
    M=17,
    K=50,
    N=37,
    activation="gelu_tanh",
    norm=True,
    affine=True,
    tile=SMALL,
) -> None:
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(2 * N, K)
    options: dict[str, Any] = {"activation": activation} | ({"eps": EPS} if norm else {})
    options |= {"scale": s.random(K), "bias": s.random(2 * N)} if affine else {}
    out = target(M, N, dtype=dtype, device=device)
    module.gated_mlp(x, weight, out=out, tile=tile, **options)
    close(module, "gated_mlp", out, KERNELS["gated_mlp"].twin(x, weight, **options))
    untouched(out)


def qkv_rope(
    module: ModuleType, dtype, device, M=17, K=50, H=3, KV=2, D=24, norm=True, affine=True, tile=SMALL
) -> None:
    s = Source(dtype, device)
    columns = (H + 2 * KV) * D
    x, weight = s.rows(M, K), s.weight(columns, K)
    angle = s.random(M, D // 2, dtype=torch.float32) * 3
    options: dict[str, Any] = {"eps": EPS} if norm else {}
    options |= {"scale": s.random(K), "bias": s.random(columns)} if affine else {}
    q, k, v = (target(M, heads, D, dtype=dtype, device=device) for heads in (H, KV, KV))
    module.qkv_rope(x, weight, angle.cos(), angle.sin(), q, k, v, tile=tile, **options)
    twins = KERNELS["qkv_rope"].twin(x, weight, angle.cos(), angle.sin(), (H, KV), **options)
    for got, want in zip((q, k, v), twins, strict=True):
        if want.numel():
            close(module, "qkv_rope", got, want)
        untouched(got)


def splitk_linear(module: ModuleType, dtype, device, M=17, K=150, N=37, full=True, tile=SPLIT) -> None:
    s = Source(dtype, device)
    x, weight = s.rows(M, K), s.weight(N, K)
    options = {"bias": s.random(N), "gate": s.random(N), "residual": s.rows(M, N)} if full else {}
    workspace = Workspace(1 << 16, 64, device)
    workspace.parts.fill_(float("nan"))
    want, outs = KERNELS["splitk_linear"].twin(x, weight, **options), []
    for _ in range(2):  # a graph replays the launch: the counters have to be zero again
        outs.append(target(M, N, dtype=dtype, device=device))
        module.splitk_linear(x, weight, workspace=workspace, out=outs[-1], tile=tile, **options)
        close(module, "splitk_linear", outs[-1], want)
        untouched(outs[-1])
    assert torch.equal(outs[0], outs[1]), "two launches differ"
    assert not workspace.arrivals.any(), "counters are not zero after the launch"


def packed_attention(
    module: ModuleType, dtype, device, M=5, H=6, KV=2, D=16, P=37, S=5, loud=1.0, tile=SPLIT
) -> None:
    s = Source(dtype, device)
    q = (s.rows(M, H, D).float() * loud).to(dtype)
    kv = s.rows(P, KV, D), s.rows(P, KV, D)
    own = (s.rows(S, KV, D), s.rows(S, KV, D)) if S else None
    mask = s.random(M, P + S, dtype=torch.float32) > -0.5
    mask[M // 2] = False  # a query that may see nothing
    workspace = Workspace(1 << 16, 64, device)
    workspace.parts.fill_(float("nan"))
    want, outs = KERNELS["packed_attention"].twin(q, kv, mask, own=own), []
    for _ in range(2):
        outs.append(target(M, H, D, dtype=dtype, device=device))
        module.packed_attention(q, kv, mask, own=own, workspace=workspace, out=outs[-1], tile=tile)
        close(module, "packed_attention", outs[-1], want)
        untouched(outs[-1])
    assert torch.equal(outs[0], outs[1]), "two launches differ"
    assert not workspace.arrivals.any(), "counters are not zero after the launch"


def ada_rms(module: ModuleType, dtype, device, M=5, C=37, branch=True, gate=True) -> None:
    s = Source(dtype, device)
    stream, scale, shift = s.rows(M, C), s.random(C), s.random(C)
    options: dict[str, Any] = {"eps": EPS}
    if branch:
        options |= {"branch": s.rows(M, C)} | ({"gate": s.random(C)} if gate else {})
    normed = target(M, C, dtype=dtype, device=device)
    total = target(M, C, dtype=dtype, device=device) if branch else None
    got = module.ada_rms(stream, scale, shift, normed=normed, total=total, **options)
    for a, b in zip(got, KERNELS["ada_rms"].twin(stream, scale, shift, **options), strict=True):
        close(module, "ada_rms", a, b)
    untouched(normed)
    if total is not None:
        untouched(total)


def preprocess(
    module: ModuleType, dtype, device, size=(11, 14), to=(8, 12), exact=True, pad="center", patch=4, views=1
) -> None:
    """Against the twin and against ``sinew.processing``: for float32 the bound there is 1e-6 of a unit range."""
    recipe = ImageRecipe(
        height=to[0],
        width=to[1],
        interpolation="pil_bilinear" if exact else "bilinear",
        pad=pad,
        pad_value=0.0 if exact else -1.0,
        mean=(0.5, 0.4, 0.3),
        std=(0.5, 0.6, 0.7),
    )
    frames = np.random.default_rng(0).integers(0, 256, (views, *size, 3), dtype=np.uint8)
    resize = Resize.of(*size, recipe, device)
    images = torch.from_numpy(frames).to(device)
    for patches in (None, patch):
        twin = KERNELS["preprocess"].twin(images, resize, dtype=dtype, patch=patches)
        out = target(*twin.shape, dtype=dtype, device=device)
        module.preprocess(images, resize, out=out, patch=patches, tile=Tile(n=16))
        close(module, "preprocess", out, twin)
        untouched(out)
        if patches is None and dtype == torch.float32:
            reference = np.stack([prepare_frame(frame, recipe) for frame in frames])
            error = np.abs(out.cpu().numpy() - reference).max()
            assert error <= 1e-6, f"preprocess: {error} from sinew.processing"


def fp8_quantize(module: ModuleType, dtype, device, M=7, K=50, scale: float | None = None, loud=1.0) -> None:
    """To the bit: both divide exactly and round to nearest. A row of zeros among them."""
    s = Source(dtype, device)
    x = inside(s.random(M, K), 1e30)  # a largest value is blind to NaN
    x *= loud
    x[M // 2] = 0
    x_scale = None if scale is None else torch.tensor(scale, device=device)
    data, scales = guarded(M, K, device), torch.full((M + 2,), SENTINEL, device=device)
    module.fp8_quantize(x, data=data.view(E4M3), scales=scales[1:-1], x_scale=x_scale)
    want, wanted = KERNELS["fp8_quantize"].twin(x, x_scale=x_scale)
    assert torch.equal(scales[1:-1], wanted), "scales"
    assert torch.equal(data.view(E4M3).float(), want.float()), "values differ"
    assert torch.isfinite(data.view(E4M3).float()).all(), "not finite"
    assert scales[0] == scales[-1] == SENTINEL, "written outside of the scales"
    around = data._base  # the buffer that it lies in
    assert (around[:16] == 77).all(), "written before the output"
    assert (around[-16:] == 77).all(), "written behind the output"


def guarded(M: int, K: int, device: str) -> Tensor:
    """Bytes [M, K], contiguous, in a buffer of 77s."""
    return torch.full((M * K + 32,), 77, dtype=torch.uint8, device=device)[16:-16].view(M, K)


def fp8_product(module: ModuleType, dtype, device, M=17, K=80, N=37, bias=True, tile=DEEPER) -> None:
    s = Source(dtype, device)
    x, weight = (around_nan(s.random(size, K, dtype=torch.float32) * 8) for size in (M, N))
    scales = [inside(s.random(1, size, dtype=torch.float32), float("nan"))[0] for size in (M, N)]
    options = {"bias": s.random(N)} if bias else {}
    out = target(M, N, dtype=dtype, device=device)
    module.fp8_product(x, scales[0], weight, scales[1], out=out, tile=tile, **options)
    close(
        module,
        "fp8_product",
        out,
        KERNELS["fp8_product"].twin(x, scales[0], weight, scales[1], dtype=dtype, **options),
    )
    untouched(out)


def around_nan(values: Tensor) -> Tensor:
    """e4m3, contiguous, NaN (0x7F) before and behind."""
    flat = torch.full((values.numel() + 64,), 0x7F, dtype=torch.uint8, device=values.device)
    flat[32:-32] = values.to(E4M3).view(torch.uint8).flatten()
    return flat[32:-32].view(values.shape).view(E4M3)


CHECKS = {
    "norm_linear": norm_linear,
    "gated_mlp": gated_mlp,
    "qkv_rope": qkv_rope,
    "splitk_linear": splitk_linear,
    "packed_attention": packed_attention,
    "ada_rms": ada_rms,
    "preprocess": preprocess,
    "fp8_quantize": fp8_quantize,
    "fp8_product": fp8_product,
}

DTYPES = [torch.float32, torch.bfloat16]
# Beside the default shapes, none of whose sizes divides into tiles: the edges of every kernel.
EDGES = {
    "norm_linear": [
        {"M": 1, "K": 16, "N": 16},  # one row, whole tiles
        {"norm": False, "affine": False},
        {"wide": True},
        {"M": 33, "tile": Tile(16, 32, 64)},  # tiles larger than the problem
    ],
    "gated_mlp": [{"M": 1, "activation": "silu"}, {"norm": False, "affine": False, "K": 32, "N": 32}],
    "qkv_rope": [
        {"KV": 0, "H": 2, "D": 32},  # queries alone
        {"H": 0, "KV": 1, "D": 32},  # keys and values alone
        {"M": 1, "norm": False, "affine": False},
    ],
    "splitk_linear": [
        {"M": 1, "full": False},
        {"K": 20, "tile": Tile(16, 16, 16, 4)},  # programs without any depth
        {"tile": Tile(16, 32, 32, 1)},
    ],
    "packed_attention": [
        {"S": 0, "tile": Tile(16, 16)},
        {"P": 7, "S": 3, "tile": Tile(16, 16, split=4)},  # programs without any key
        {"loud": 40.0},  # scores whose exponentials overflow unless the largest is taken off
        {"M": 1, "H": 3, "KV": 1, "D": 64, "P": 16, "S": 16},
    ],
    "ada_rms": [{"branch": False}, {"gate": False, "C": 64}, {"M": 1, "C": 1}],
    "preprocess": [
        {"exact": False, "pad": "top_left", "views": 2},
        {"exact": False, "size": (5, 5), "to": (12, 8)},  # enlarged
        {"size": (8, 12)},  # already of the size
        {"size": (1, 1)},
    ],
    "fp8_quantize": [
        {"scale": 0.005},  # many values are beyond 448 of it, some below the 480 that would be NaN
        {"scale": 3.0, "K": 64},  # most are below the smallest normal number
        {"loud": 1e30, "M": 1, "K": 1},
        {"loud": 1e-30},
    ],
    "fp8_product": [
        {"M": 1, "N": 16, "bias": False},
        {"M": 33, "K": 48, "tile": Tile(16, 32, 128)},  # tiles larger than the problem
    ],
}


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"sinew.engine.kernels.{name}")


def all_checks() -> Iterator[tuple[str, torch.dtype, dict[str, Any]]]:
    """(kernel, dtype, sizes) of every check that can hold on any machine."""
    for name in CHECKS:
        for dtype in DTYPES:
            yield name, dtype, {}
            for sizes in EDGES[name]:
                if DEVICE == "cuda" or dtype == torch.float32:  # the interpreter takes its time
                    yield name, dtype, sizes


def run(name: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    """Raise AssertionError where the kernel is not its twin."""
    CHECKS[name](module_of(name), dtype, DEVICE, **sizes)


def runs_here(name: str) -> bool:
    """Whether the device has the kernel's instructions; the interpreter has all of them."""
    return DEVICE == "cpu" or capability(torch.device(DEVICE)) >= KERNELS[name].capability

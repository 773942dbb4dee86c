"""The problems that pi0, pi0.5 and SmolVLA put to the kernels, per action chunk, and what each one costs.

pi0.5: 3 views, prompt of 200 tokens, chunk 50, 10 steps; pi0: 2 views, empty prompt, chunk 63; SmolVLA: 2 views of
512, prompt of 48. Widths are those of the published checkpoints. ``fewer``: how many launches the fusion saves;
``spared``: bytes of intermediate results that it neither writes nor reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinew.engine.cuda.kernels import KERNELS
from sinew.engine.cuda.kernels.fp8_quantize import E4M3, NEEDS
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.kernels.workspace import BLOCKS, PARTS, Workspace

if TYPE_CHECKING:
    from sinew.bundle.schema import ImageRecipe

STEPS = 10


@dataclass(frozen=True)
class Problem:
    """One call of one kernel. ``runs``: how often per chunk."""

    model: str
    where: str
    kernel: str
    runs: int
    sizes: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.model} {self.where}"


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost of one call in bfloat16: a multiply-add counts as two FLOPs, each tensor's bytes once."""

    flops: int
    bytes: int
    fewer: int
    spared: int


@cache
def problems() -> tuple[Problem, ...]:
    pi05 = _pi("pi0.5", views=3, prompt=200, rows=50, adaptive=True)
    pi0 = _pi("pi0", views=2, prompt=0, rows=63, adaptive=False)
    return (*pi05, *pi0, *_smolvla(views=2, prompt=48, rows=50))


def _pi(model: str, views: int, prompt: int, rows: int, adaptive: bool) -> list[Problem]:
    prefix, heads = views * 256 + prompt, {"H": 8, "KV": 1, "D": 256}
    seen = prefix if adaptive else prefix + 1  # pi0's state token lies behind the prefix
    head = STEPS * 18
    norm = {"norm": not adaptive}
    language = [
        Problem(model, "language qkv", "qkv_rope", 17, {"M": prefix, "K": 2048, **heads, "norm": True}),
        Problem(
            model, "language last kv", "qkv_rope", 1, {"M": prefix, "K": 2048, **heads, "H": 0, "norm": True}
        ),
        Problem(
            model,
            "language attention",
            "packed_attention",
            17,
            {"M": prefix, **heads, "P": prefix, "key_mask": True},
        ),
        Problem(model, "language o", "splitk_linear", 17, {"M": prefix, "N": 2048, "K": 2048}),
        Problem(
            model, "language gate up", "gated_mlp", 17, {"M": prefix, "N": 16384, "K": 2048, "norm": True}
        ),
        Problem(model, "language down", "splitk_linear", 17, {"M": prefix, "N": 2048, "K": 16384}),
    ]
    expert = [
        Problem(model, "head qkv", "qkv_rope", head, {"M": rows, "K": 1024, **heads, **norm}),
        Problem(
            model,
            "head attention",
            "packed_attention",
            head,
            {"M": rows, **heads, "P": seen, "S": rows, "key_mask": adaptive},
        ),
        Problem(model, "head o", "splitk_linear", head, {"M": rows, "N": 1024, "K": 2048, "gate": adaptive}),
        Problem(model, "head gate up", "gated_mlp", head, {"M": rows, "N": 4096, "K": 1024, **norm}),
        Problem(
            model, "head down", "splitk_linear", head, {"M": rows, "N": 1024, "K": 4096, "gate": adaptive}
        ),
    ]
    if adaptive:  # either the norm has a pass of its own, or its scale goes into the products above
        expert += [
            Problem(
                model,
                "head norm",
                "row_norm",
                2 * head + STEPS,
                {"M": rows, "C": 1024, "branch": True, "gate": True, "affine": 1.0},
            ),
            Problem(
                model,
                "head qkv, scaled",
                "qkv_rope",
                head,
                {"M": rows, "K": 1024, **heads, "norm": True, "scale": True},
            ),
            Problem(
                model,
                "head gate up, scaled",
                "gated_mlp",
                head,
                {"M": rows, "N": 4096, "K": 1024, "norm": True, "scale": True},
            ),
        ]
    # All but the first layer get the squares of their input from the kernel that wrote it, 16 blocks of columns.
    known = {"norm": True, "given": 16}
    expert += [
        Problem(model, "head qkv, given", "qkv_rope", head, {"M": rows, "K": 1024, **heads, **known}),
        Problem(model, "head gate up, given", "gated_mlp", head, {"M": rows, "N": 4096, "K": 1024, **known}),
        Problem(
            model, "language gate up, given", "gated_mlp", 17, {"M": prefix, "N": 16384, "K": 2048, **known}
        ),
    ]
    eighths = _fp8(model, "vision", 27, views * 256, (1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152))
    eighths += _fp8(model, "language", 17, prefix, (2048, 2560), (2048, 2048), (2048, 32768), (16384, 2048))
    eighths += _fp8(model, "head", head, rows, (1024, 2560), (2048, 1024), (1024, 8192), (4096, 1024))
    out = {"M": rows, "N": 32, "K": 1024, "wide": True, "norm": True, "scale": adaptive}
    frames = {"V": views, "h": 480, "w": 640, "side": 224, "patch": 14, "exact": True}
    return [
        Problem(model, "frames", "preprocess", 1, frames),
        *language,
        *expert,
        Problem(model, "head out", "norm_linear", STEPS, out),
        *_rowwise(model, "vision", 27, views * 256, 1152, 4304),
        *_rowwise(model, "language", 17, prefix, 2048, 16384, heads),
        *eighths,
    ]


def _rowwise(
    model: str,
    stage: str,
    layers: int,
    rows: int,
    width: int,
    hidden: int,
    heads: dict[str, int] | None = None,
    activation: str = "gelu_tanh",
) -> list[Problem]:
    """Between products of a library: norms, activations and rotations, in bfloat16 and for products in FP8.

    Norms of the language model are unit norms: their weights are in the products.
    """
    vision = heads is None
    norm = {"M": rows, "C": width, "branch": True} | ({"kind": "layer", "affine": 0.0} if vision else {})
    active = {"M": rows, "N": hidden, "gated": not vision, "activation": activation}
    norms = 2 * layers + vision  # one behind the vision tower
    found = [
        Problem(model, f"{stage} norm", "row_norm", norms, norm),
        Problem(model, f"{stage} norm, to fp8", "row_norm", 2 * layers, norm | {"eighths": True}),
        Problem(model, f"{stage} activation", "activate", layers, active),
        Problem(model, f"{stage} activation, to fp8", "activate", layers, active | {"eighths": True}),
    ]
    if heads is not None:
        found.append(Problem(model, f"{stage} rotation", "rope", layers, {"M": rows, **heads}))
    return found


def _fp8(model: str, stage: str, runs: int, rows: int, *products: tuple[int, int]) -> list[Problem]:
    """The same products in FP8, as (depth, columns) of qkv, o, up and down, and the conversion of their inputs."""
    names = ("qkv", "o", "fc1" if stage == "vision" else "gate up", "fc2" if stage == "vision" else "down")
    found = []
    for name, (K, N) in zip(names, products, strict=True):
        found += [
            Problem(model, f"{stage} {name}, fp8 input", "fp8_quantize", runs, {"M": rows, "C": K}),
            Problem(model, f"{stage} {name}, fp8", "fp8_product", runs, {"M": rows, "N": N, "K": K}),
        ]
    return found


def _smolvla(views: int, prompt: int, rows: int) -> list[Problem]:
    model, prefix, heads = "smolvla", views * 64 + prompt + 1, {"H": 15, "KV": 5, "D": 64}
    each = STEPS * 8  # eight self and eight cross layers
    frames = {"V": views, "h": 480, "w": 640, "side": 512, "patch": 16, "exact": False}
    silu = {"activation": "silu", "norm": True}
    return [
        Problem(model, "frames", "preprocess", 1, frames),
        Problem(model, "language qkv", "qkv_rope", 15, {"M": prefix, "K": 960, **heads, "norm": True}),
        Problem(model, "language attention", "packed_attention", 15, {"M": prefix, **heads, "P": prefix}),
        Problem(model, "language o", "splitk_linear", 15, {"M": prefix, "N": 960, "K": 960}),
        Problem(model, "language gate up", "gated_mlp", 15, {"M": prefix, "N": 2560, "K": 960, **silu}),
        Problem(model, "language down", "splitk_linear", 15, {"M": prefix, "N": 960, "K": 2560}),
        Problem(model, "head qkv", "qkv_rope", each, {"M": rows, "K": 720, **heads, "norm": True}),
        Problem(model, "head q", "qkv_rope", each, {"M": rows, "K": 720, **heads, "KV": 0, "norm": True}),
        Problem(
            model, "head attention", "packed_attention", each, {"M": rows, **heads, "P": prefix, "S": rows}
        ),
        Problem(
            model, "head cross", "packed_attention", each, {"M": rows, **heads, "P": prefix, "key_mask": True}
        ),
        Problem(model, "head o", "splitk_linear", 2 * each, {"M": rows, "N": 720, "K": 960}),
        Problem(model, "head gate up", "gated_mlp", 2 * each, {"M": rows, "N": 2048, "K": 720, **silu}),
        Problem(model, "head down", "splitk_linear", 2 * each, {"M": rows, "N": 720, "K": 2048}),
        Problem(
            model,
            "head out",
            "norm_linear",
            STEPS,
            {"M": rows, "N": 32, "K": 720, "wide": True, "norm": True},
        ),
        *_rowwise(model, "vision", 12, views * 1024, 768, 3072),
        *_rowwise(model, "language", 15, prefix, 960, 2560, heads, "silu"),
        *_fp8(model, "vision", 12, views * 1024, (768, 2304), (768, 768), (768, 3072), (3072, 768)),
        *_fp8(model, "language", 15, prefix, (960, 1600), (960, 960), (960, 5120), (2560, 960)),
    ]


@cache
def _workspace(device: str) -> Workspace:
    """One for all problems of a device: their launches are on one stream."""
    return Workspace(PARTS, BLOCKS, device)


def arguments(
    problem: Problem, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the kernel's ``prepare``: tensors of this problem, random where the device has memory."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype) * 0.05

    s, workspace = problem.sizes, _workspace(str(device))
    M, K, N = (s.get(name, 0) for name in "MKN")
    options: dict[str, Any] = {"eps": 1e-6} if s.get("norm") else {}
    if s.get("given"):
        options["squares"] = torch.rand(M, s["given"], device=device) * K / s["given"]
    if problem.kernel in ("norm_linear", "gated_mlp"):
        outputs = 2 * N if problem.kernel == "gated_mlp" else N
        weight_type = torch.float32 if s.get("wide") else dtype
        if s.get("scale"):
            options |= {"scale": new(K), "bias": new(outputs)}
        if problem.kernel == "gated_mlp":
            options["activation"] = s.get("activation", "gelu_tanh")
        return [new(M, K), new(outputs, K, dtype=weight_type), new(M, N, dtype=weight_type)], options
    if problem.kernel == "qkv_rope":
        H, KV, D = s["H"], s["KV"], s["D"]
        tables = [new(M, D // 2, dtype=torch.float32) for _ in "cs"]
        if s.get("scale"):
            options |= {"scale": new(K), "bias": new((H + 2 * KV) * D)}
        return [
            new(M, K), new((H + 2 * KV) * D, K), *tables, new(M, H, D), new(M, KV, D), new(M, KV, D), workspace
        ], options  # fmt: skip
    if problem.kernel == "splitk_linear":
        options = {"residual": new(M, N)} | ({"gate": new(N)} if s.get("gate") else {})
        return [new(M, K), new(N, K), new(M, N), workspace], options
    if problem.kernel == "packed_attention":
        H, KV, D, P, S = (s.get(name, 0) for name in ("H", "KV", "D", "P", "S"))
        cache = new(2, P + S, KV, D)
        options = {"own": (cache[0, P:], cache[1, P:])} if S else {}
        mask = torch.ones(1 if s.get("key_mask") else M, P + S, dtype=torch.bool, device=device).expand(M, -1)
        return [new(M, H, D), (cache[0, :P], cache[1, :P]), mask, new(M, H, D), workspace], options
    if problem.kernel == "fp8_quantize":
        eighth = torch.zeros(M, s["C"], dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return [new(M, s["C"]), eighth, new(M, dtype=torch.float32)], {}
    if problem.kernel == "fp8_product":
        x, weight = (new(size, K).to(torch.float8_e4m3fn) for size in (M, N))
        scales = [torch.rand(size, device=device) for size in (M, N)]
        return [x, scales[0], weight, scales[1], new(M, N)], {}
    if problem.kernel in ("row_norm", "activate"):
        size = s.get("C") or N
        out = new(M, size)
        if s.get("eighths"):
            out, options = out.to(E4M3), {"scales": new(M, dtype=torch.float32)}
        if problem.kernel == "activate":
            options |= {"activation": s["activation"], "gated": s["gated"]}
            return [new(M, 2 * N if s["gated"] else N), out], options
        options |= {"eps": 1e-6, "kind": s.get("kind", "rms")}
        if "affine" in s:
            options |= {"weight": new(size), "offset": s["affine"], "shift": new(size)}
        if s.get("branch"):
            options |= {"branch": new(M, size), "total": new(M, size)}
        return [new(M, size), out], options | ({"gate": new(size)} if s.get("gate") else {})
    if problem.kernel == "rope":
        H, KV, D = s["H"], s["KV"], s["D"]
        tables = [new(M, D // 2, dtype=torch.float32) for _ in "cs"]
        return [new(M, (H + 2 * KV) * D), *tables, *(new(M, count, D) for count in (H, KV, KV))], options
    V, h, w, side, patch = (s[name] for name in ("V", "h", "w", "side", "patch"))
    resize = ResizeTables.of(h, w, recipe(problem), device)
    frames = torch.zeros(V, h, w, 3, dtype=torch.uint8, device=device)
    patches = torch.zeros(V, (side // patch) ** 2, -(-3 * patch**2 // 16) * 16, dtype=dtype, device=device)
    return [frames, resize, patches], {"patch": patch}


def recipe(problem: Problem) -> ImageRecipe:
    from sinew.bundle.image_recipe import ImageRecipe
    from sinew.steps.image.letterbox import Letterbox

    s = problem.sizes
    side = s["side"]
    box = Letterbox(side, side, "pil_bilinear", "center") if s["exact"] else Letterbox(side, side)
    return ImageRecipe(side, side, (box,))


def dims(problem: Problem) -> tuple[int, ...]:
    """Return what tiles of a problem are chosen by, as ``tiles.default`` takes it."""
    s = problem.sizes
    if problem.kernel == "packed_attention":
        return s["M"] * s["H"] // s["KV"], s["P"], s.get("S", 0), s["KV"], s["D"]
    return s.get("M", 1), s.get("N", 0), s.get("K", 0)


def launch(
    problem: Problem,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    **dependent: bool,
) -> Launch:
    """dependent: ``pdl``, and ``prefetch`` of the kernels that have it."""
    positional, options = arguments(problem, device, dtype)
    options |= dependent
    return KERNELS[problem.kernel].prepare(*positional, **options, tile=tile)


def capability_of(problem: Problem) -> int:
    """The first compute capability, times ten, that has the instructions of its launch."""
    return NEEDS if problem.sizes.get("eighths") else KERNELS[problem.kernel].capability


def cost(problem: Problem) -> KernelCost:
    s = problem.sizes
    M, K, N, wide = s.get("M", 0), s.get("K", 0), s.get("N", 0), 4 if s.get("wide") else 2
    H, KV, D, P, S = (s.get(name, 0) for name in ("H", "KV", "D", "P", "S"))
    # A norm apart writes and reads the input again; so do gate and residual with the output.
    norm = (1, 2 * 2 * M * K) if s.get("norm") else (0, 0)
    if problem.kernel == "norm_linear":
        return KernelCost(2 * M * N * K, 2 * M * K + wide * (N * K + M * N), *norm)
    if problem.kernel == "gated_mlp":  # apart: 2 N columns written and read by the pass that multiplies them
        bytes_ = 2 * (M * K + 2 * N * K + M * N)
        return KernelCost(4 * M * N * K, bytes_, 1 + norm[0], 2 * 2 * M * 2 * N + norm[1])
    if problem.kernel == "qkv_rope":  # apart: rotation of q and k, copy of k and v into the cache
        columns, turned = (H + 2 * KV) * D, (H + KV) * D
        bytes_ = 2 * (M * K + columns * K + M * columns) + 4 * M * D
        fewer = (1 if KV == 0 else 3) + norm[0]
        return KernelCost(2 * M * columns * K, bytes_, fewer, 2 * 2 * M * (turned + 2 * KV * D) + norm[1])
    if problem.kernel == "splitk_linear":
        extra = 2 if s.get("gate") else 1
        return KernelCost(2 * M * N * K, 2 * (M * K + N * K + 2 * M * N), extra, extra * 2 * 2 * M * N)
    if problem.kernel == "packed_attention":  # apart, with scores in memory: two products and a softmax
        keys = P + S
        scores = 4 * M * H * keys
        bytes_ = 2 * (2 * M * H * D + 2 * keys * KV * D) + (1 if s.get("key_mask") else M) * keys
        return KernelCost(4 * M * H * keys * D, bytes_, 2, 2 * scores + scores // 2 * 2)
    if problem.kernel == "fp8_quantize":  # apart: the largest values, division and clamp, conversion
        return KernelCost(0, 3 * M * s["C"] + 4 * M, 2, (2 + 2 * 2) * M * s["C"])
    if problem.kernel == "fp8_product":  # apart: the scales
        return KernelCost(2 * M * N * K, (M + N) * K + 4 * (M + N) + 2 * M * N, 1, 2 * 2 * M * N)
    eighths = bool(s.get("eighths"))  # apart: the conversion
    if problem.kernel == "row_norm":  # apart: gate and residual, whose result is read again; a modulation
        branch, modulated = bool(s.get("branch")), s.get("affine") == 1.0
        size, vectors = M * s["C"], s["C"] * (s.get("gate", 0) + 2 * ("affine" in s))
        bytes_ = 2 * (size + 2 * size * branch + vectors) + (size + 4 * M if eighths else 2 * size)
        return KernelCost(
            0, bytes_, branch + modulated + eighths, 2 * size * (branch + 2 * modulated + 2 * eighths)
        )
    if problem.kernel == "activate":  # apart: the product of the halves
        size, gated = M * N, bool(s["gated"])
        bytes_ = 2 * size * (1 + gated) + (size + 4 * M if eighths else 2 * size)
        return KernelCost(0, bytes_, gated + eighths, 2 * 2 * size * (gated + eighths))
    if problem.kernel == "rope":  # apart: copy of k and v into the cache
        bytes_ = 2 * 2 * M * (H + 2 * KV) * D + 4 * M * D
        return KernelCost(0, bytes_, 2 if KV else 0, 2 * 2 * M * KV * D)
    V, h, w, side = (s[name] for name in ("V", "h", "w", "side"))
    pixels = 3 * side * side * V  # apart: resized bytes, normalised floats, patches
    return KernelCost(0, 3 * h * w * V + 2 * pixels, 3, 2 * (1 + 4 + 4) * pixels)

"""The Triton kernels against their references, without a GPU in Triton's interpreter; that the checks can fail; the
references against the models' own layers.

``conftest.py`` sets TRITON_INTERPRET; with TRITON_INTERPRET=0 on a machine with a GPU the same checks
run there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.engine.cuda.kernels import KERNELS
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.kernels.splitk_linear import statistics_reference
from sinew.layers.attention import attend
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderConfig, GatedMLP
from sinew.layers.norm import AdaRMSNorm, Modulation, rms_normalize
from sinew.layers.rope import Rotation
from sinew.processing.image import prepare_frame
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox
from tests.covering import some
from tests.engine.cuda.kernel_checks import (
    CHECKS,
    DEVICE,
    DTYPES,
    EDGES,
    SPLIT,
    loaded,
    module_of,
    needs_triton,
)

pytestmark = pytest.mark.kernels

few = settings(max_examples=4, deadline=None, derandomize=True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_kernel_equals_reference(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](module_of(name), dtype, DEVICE)


@needs_triton
@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name, edges in EDGES.items() for sizes in edges], ids=str
)
def test_kernel_equals_reference_at_the_edges(name: str, sizes: dict) -> None:
    CHECKS[name](module_of(name), torch.float32, DEVICE, **sizes)


@needs_triton
@few
@given(M=st.integers(1, 40), K=st.integers(1, 70), N=st.integers(1, 40), split=st.integers(1, 4))
def test_linear_kernels_of_any_size(M: int, K: int, N: int, split: int) -> None:
    tile = Tile(16, 32, 32, split, stages=2)
    for name in ("norm_linear", "gated_mlp", "splitk_linear"):
        CHECKS[name](module_of(name), torch.float32, DEVICE, M=M, K=K, N=N, tile=tile)
    check, kernel = CHECKS["weight_only_linear"], module_of("weight_only_linear")
    check(kernel, torch.float32, DEVICE, M=M, K=K, N=N, form="int8", tile=tile)
    for form in ("q8_0", "q4_0"):
        check(kernel, torch.float32, DEVICE, M=M, K=32 * (1 + K // 16), N=N, form=form, tile=tile)


@needs_triton
@few
@given(
    M=st.integers(1, 9),
    KV=st.integers(1, 2),
    G=st.integers(1, 4),
    P=st.integers(1, 50),
    S=st.integers(0, 9),
    key_mask=st.booleans(),
)
def test_attention_of_any_size(KV: int, G: int, **sizes: int) -> None:
    CHECKS["packed_attention"](module_of("packed_attention"), torch.float32, DEVICE, H=KV * G, KV=KV, **sizes)


# A line of a kernel, what it is changed into, and the sizes that show it.
MUTANTS = [
    ("norm_linear", "squares / K + eps", "squares / BLOCK_K + eps", {}),
    ("norm_linear", "mask=row_ok[:, None] & k_ok[None, :]", "mask=row_ok[:, None]", {}),
    ("norm_linear", "mask=row_ok[:, None] & col_ok[None, :])", "mask=row_ok[:, None])", {}),
    ("gated_mlp", "1.5957691216057308", "1.702", {}),
    ("gated_mlp", "gate_tile + N * K + k", "gate_tile + k", {}),
    ("gated_mlp", "inner = gate\n", "inner = up\n", {"activation": "silu"}),
    ("qkv_rope", "rows, cols, ok, head, q_row", "rows, cols, ok, 0, q_row", {}),
    ("qkv_rope", "weight + ((head * D + cols)", "weight + ((cols)", {}),
    ("qkv_rope", "low_tile + HALF * K + i", "low_tile + K + i", {}),
    ("qkv_rope", "in tl.static_range(SPLIT)", "in tl.static_range(SPLIT - 1)", {"tile": SPLIT, "K": 90}),
    ("qkv_rope", "(2 * part + 1)", "(2 * part)", {"tile": SPLIT}),
    ("qkv_rope", "tl.store(arrivals + block, 0)", "tl.store(arrivals + block, 1)", {"tile": SPLIT}),
    ("splitk_linear", "for s in tl.static_range(SPLIT)", "for s in tl.static_range(SPLIT - 1)", {}),
    ("splitk_linear", "tl.store(arrivals + tile, 0)", "tl.store(arrivals + tile, 1)", {}),
    ("splitk_linear", "acc *= gate_row", "acc += gate_row", {}),
    ("splitk_linear", "factor = 1.0 + tl.load(scale", "factor = tl.load(scale", {"scaled": True}),
    ("splitk_linear", "(wide * factor[None, :])", "(acc * 2.0 * factor[None, :])", {"scaled": True}),
    ("splitk_linear", "+ tile // blocks_m\n", "+ 0\n", {"norm": True}),
    (
        "splitk_linear",
        "tl.sum(wide * wide, axis=1), mask=row_ok)",
        "tl.sum(wide * wide, axis=1))",
        {"norm": True},
    ),
    ("norm_linear", "tl.exp(-acc)", "tl.exp(acc)", {"silu": True}),
    ("weight_only_linear", "(byte & 15).to(tl.int8) - 8", "(byte & 15).to(tl.int8) - 7", {}),
    ("weight_only_linear", "(byte >> 4).to(tl.int8)", "(byte & 15).to(tl.int8)", {}),
    ("weight_only_linear", "x_rows + at + 16 +", "x_rows + at +", {}),
    ("weight_only_linear", "cols * GROUPS + at // 32", "cols * GROUPS", {}),
    ("weight_only_linear", "cols * GROUPS + at // 32", "cols * GROUPS + k // 32", {"form": "q8_0"}),
    ("weight_only_linear", "scale_ok = col_ok & (WHOLE | (at < K))", "scale_ok = col_ok", {}),
    ("weight_only_linear", "inside = WHOLE | (depth < K)", "inside = depth >= 0", {"form": "int8", "K": 50}),
    ("weight_only_linear", "acc *= scale[None, :]", "acc += scale[None, :]", {"form": "int8"}),
    ("weight_only_linear", "acc += stream", "acc += 0 * stream", {}),
    ("weight_only_linear", "acc += bias_row", "acc += 0 * bias_row", {"form": "int8"}),
    ("weight_only_linear", "range(BLOCK_K // DEPTH)", "range(BLOCK_K // DEPTH - 1)", {}),
    (
        "weight_only_linear",
        "rows < M, cols < N\n",
        "rows < M, cols < N + 1\n",
        {"bias": False, "residual": False},
    ),
    ("norm_linear", "squares + rows[:, None] * columns", "squares + rows[:, None]", {"given": 3}),
    ("norm_linear", "(at < columns)[None, :]", "(at < columns + 1)[None, :]", {"given": 3}),
    (
        "gated_mlp",
        "given_squares(given, rows, row_ok",
        "given_squares(given, rows // 2, row_ok",
        {"given": 3},
    ),
    ("qkv_rope", "given_squares(given, rows, row_ok", "given_squares(given, rows // 2, row_ok", {"given": 3}),
    ("packed_attention", "v_tile, acc * fade[:, None], UPCAST", "v_tile, acc, UPCAST", {"loud": 4.0}),
    ("packed_attention", 'MASKED, float("-inf"))', "MASKED, MASKED)", {}),
    ("packed_attention", "tl.load(mask + keys,", "tl.load(mask + keys // 2,", {"key_mask": True}),
    ("packed_attention", "own_v + head * D, mask + P", "own_v + head * D, mask", {"key_mask": True}),
    ("packed_attention", "own_v + head * D, mask + P", "own_v + head * D, mask", {}),
    (
        "packed_attention",
        "numerator.to(tl.float32) * rise[:, None]",
        "numerator.to(tl.float32)",
        {"loud": 4.0},
    ),
    ("packed_attention", "q += observation * q_step", "q += 0 * q_step", {"B": 2}),
    ("packed_attention", "v += observation * kv_step", "v += 0 * kv_step", {"B": 2}),
    ("packed_attention", "mask += observation * mask_step", "mask += 0 * mask_step", {"B": 2}),
    ("packed_attention", "own_v += observation * own_step", "own_v += 0 * own_step", {"B": 2}),
    ("packed_attention", "tl.program_id(2) * blocks + tile", "tile", {"B": 2}),
    (
        "packed_attention",
        "out += block // own_tiles * out_step",
        "out += block * out_step",
        {"B": 2, "M": 9, "tile": Tile(16, 16, split=5)},
    ),
    (
        "packed_attention",
        "% (BLOCK_M // ROWS) * ROWS",
        "% (BLOCK_M // ROWS // 2) * ROWS",
        {"tile": Tile(16, 16, split=5)},
    ),
    (
        "packed_attention",
        "at = (tile % KV * GROUP",
        "at = (tile // KV * GROUP",
        {"tile": Tile(16, 16, split=5)},
    ),
    ("row_norm", "added *= tl.load(gate", "added += tl.load(gate", {}),
    ("row_norm", "added += tl.load(branch_bias", "added += 0 * tl.load(branch_bias", {}),
    (
        "row_norm",
        "tl.load(branch_bias + cols, mask=ok, other=0.0)",
        "tl.load(branch_bias + cols, mask=ok, other=0.0) / tl.load(gate + cols, mask=ok, other=1.0)",
        {},
    ),
    ("row_norm", "h = rounded.to(tl.float32)", "h = h * 1.0", {}),
    (
        "row_norm",
        "tl.rsqrt(power / C + eps)",
        "(tl.rsqrt(power / C) + eps)",
        {"affine": False, "quiet": 1e-4, "branch": False},
    ),
    ("row_norm", "power / C + eps", "power / BLOCK_C + eps", {}),
    ("row_norm", "h - tl.sum(h, axis=0) / C, 0.0)", "h, 0.0)", {"kind": "layer"}),
    (
        "row_norm",
        "tl.where(ok, h - tl.sum(h, axis=0) / C, 0.0)",
        "h - tl.sum(h, axis=0) / C",
        {"kind": "layer"},
    ),
    ("row_norm", "y *= offset + tl.load", "y *= tl.load", {}),
    ("row_norm", "y += tl.load(shift", "y += tl.load(weight", {}),
    ("row_norm", "y = h * tl.rsqrt(", "h = h.to(tl.bfloat16).to(tl.float32)\n    y = h * tl.rsqrt(", {}),
    (
        "row_norm",
        "tl.store(scales + row, scale)",
        "tl.store(scales + row * 0, scale)",
        {"eighths": True},
    ),
    (
        "row_norm",
        "to_e4m3(y, scale",
        "to_e4m3(y.to(tl.bfloat16).to(tl.float32), scale",
        {"eighths": True, "M": 40, "C": 100},
    ),
    ("row_norm", "normed_row + cols", "normed_row + cols + 1", {"eighths": True}),
    ("activate", "1.5957691216057308", "1.702", {}),
    ("activate", "y *= up", "y *= up * 0 + gate", {}),
    ("activate", "tl.load(x + row * x_row + N + cols", "tl.load(x + row * x_row + cols", {}),
    (
        "activate",
        "y = gate / (1.0 + tl.exp(-inner))\n    if GATED:\n        up =",
        """if GATED:
        y = tl.load(x + row * x_row + N + cols, mask=ok, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y))
        up = gate
        gate =""",
        {"activation": "silu", "bias": False},
    ),
    ("activate", "up += tl.load(bias + N + cols", "up += 0 * tl.load(bias + N + cols", {}),
    ("activate", "bias + N + cols", "bias + cols", {}),
    ("activate", "gate += tl.load(bias", "gate += 0 * tl.load(bias", {"gated": False}),
    ("activate", "inner = gate\n", "inner = 2 * gate\n", {"activation": "silu"}),
    ("activate", "tl.program_id(0) % BLOCKS", "0 * BLOCKS", {}),
    ("activate", "tl.store(scales + row, scale)", "tl.store(scales + row * 0, scale)", {"eighths": True}),
    ("activate", "if block == 0:", "if block == 99:", {"eighths": True}),
    ("activate", "ok = cols < N", "ok = cols < BLOCK_N * BLOCKS", {}),
    (
        "activate",
        "to_e4m3(y, scale",
        "to_e4m3(y.to(tl.bfloat16).to(tl.float32), scale",
        {"eighths": True, "M": 40, "N": 100},
    ),
    ("rope", "high * c + low * s", "high * c - low * s", {}),
    ("rope", "low * c - high * s", "low * c + high * s", {}),
    ("rope", "tl.store(to_k, turned_low", "tl.store(to_k, low", {}),
    ("rope", "(head - H) * D", "head * D", {}),
    ("rope", "((head - H - KV) * D + cols)", "cols", {}),
    ("rope", "table = rows[:, None] * HALF", "table = rows[:, None] * D", {}),
    ("rope", "bias + head * D + HALF + cols", "bias + head * D + cols", {}),
    ("rope", "cols < HALF)[None, :]", "cols < BLOCK_N)[None, :]", {}),
    ("preprocess", "y_first + ty", "y_first", {}),
    ("preprocess", "value.to(tl.float32) * factor", "(value.to(tl.float32) + 0.5) * factor", {}),
    (
        "fp8_quantize",
        "tl.maximum(tl.div_rn(wide, scale), -448.0)",
        "tl.div_rn(wide, scale)",
        {"scale": 0.005},
    ),
    ("fp8_quantize", ", -448.0), 448.0)", ", -448.0), 512.0)", {"scale": 0.005}),
    ("fp8_quantize", "tl.store(scales + row, scale)", "tl.store(scales + row, 2 * scale)", {}),
    ("preprocess", "across = tl.full((BLOCK,), HALF", "across = tl.full((BLOCK,), 0", {}),
]

FIRST = {name: (name, *rest) for name, *rest in reversed(MUTANTS)}  # of each kernel
CAUGHT = [*FIRST.values(), *MUTANTS[::4]]


@needs_triton
@pytest.mark.parametrize(
    ("name", "line", "wrong", "sizes"), some(MUTANTS, *CAUGHT), ids=lambda value: str(value)[:40]
)
def test_a_wrong_kernel_is_caught(name: str, line: str, wrong: str, sizes: dict, tmp_path: Path) -> None:
    text = Path(module_of(name).__file__ or "").read_text()
    assert text.count(line) >= 1, "the kernel no longer has this line"
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(line, wrong))
    broken = loaded(f"broken_{name}", path)
    with pytest.raises(AssertionError, match=r"\w"):
        CHECKS[name](broken, torch.float32, DEVICE, **sizes)


# The references against the layers that they stand for, in float32: the same mathematics in another order.


def test_references_of_products_are_the_layers() -> None:
    torch.manual_seed(0)
    x, gamma = torch.randn(7, 24), torch.rand(24) + 0.5
    norm = rms_normalize(x, 1e-6)
    weight = torch.randn(10, 24)
    squares = x.pow(2).sum(-1, keepdim=True)
    folded = KERNELS["norm_linear"].reference(x, weight * gamma, eps=1e-6, squares=squares)
    torch.testing.assert_close(folded, (norm * gamma) @ weight.T)
    for activation in ("gelu_tanh", "silu"):
        mlp = GatedMLP(DecoderConfig(24, 40, 1, 2, 1, 12, 1e-6, 1e4, activation=activation))
        packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        hidden = KERNELS["gated_mlp"].reference(x, packed, activation=activation, eps=1e-6, squares=squares)
        out = KERNELS["splitk_linear"].reference(hidden, mlp.down_proj.weight, residual=x)
        torch.testing.assert_close(out, x + mlp(norm))
    q_and_k = torch.randn(7, 3, 8)
    rotate = Rotation.at(torch.arange(7)[None], 8, 1e4)
    tables = rotate.cos[0, :, 0], rotate.sin[0, :, 0]
    unprojected = torch.cat([q_and_k.flatten(1), torch.zeros(7, 8)], 1)  # two query heads, a key, a value
    q, k, _ = KERNELS["qkv_rope"].reference(unprojected, torch.eye(32), *tables, (2, 1))
    torch.testing.assert_close(torch.cat([q, k], 1), rotate(q_and_k[None])[0])


def test_reference_of_the_adaptive_norm_is_the_layer_and_folds_into_the_product() -> None:
    torch.manual_seed(0)
    stream, branch, weight = torch.randn(7, 24), torch.randn(7, 24), torch.randn(10, 24)
    m = Modulation.of(torch.randn(1, 72))
    scale, shift, gate = (part.flatten() for part in m)
    total, normed, _ = KERNELS["row_norm"].reference(
        stream, eps=1e-6, weight=scale, offset=1.0, shift=shift, branch=branch, gate=gate
    )
    torch.testing.assert_close(total, stream + branch * gate)
    torch.testing.assert_close(normed, AdaRMSNorm(24, 1e-6)(total[None], m)[0])
    squares, scaled = statistics_reference(total, scale)
    norm = {"eps": 1e-6, "squares": squares, "bias": weight @ shift}
    folded = KERNELS["norm_linear"].reference(scaled, weight, **norm)
    torch.testing.assert_close(folded, normed @ weight.T)


def test_five_references_in_a_row_are_a_layer_of_the_head() -> None:
    """pi0.5: both norms inside the products, their modulation from a table; nothing else between the launches."""
    torch.manual_seed(0)
    config = DecoderConfig(24, 40, 1, 4, 1, 16, 1e-6, 1e4, "gemma_rms", "gelu_tanh")
    layer = AdaptiveDecoderLayer(config).requires_grad_(False)
    x, prefix = torch.randn(5, 24), (torch.randn(11, 1, 16), torch.randn(11, 1, 16))
    mask = torch.rand(5, 16) > 0.3
    modulations = [Modulation.of(torch.randn(1, 72)) for _ in "ab"]
    rotate = Rotation.at(11 + torch.arange(5)[None], 16, 1e4)
    q, k, v = layer.project(x[None], rotate, *modulations)
    keys, values = (torch.cat([a[None], b], dim=1) for a, b in zip(prefix, (k, v), strict=True))
    want = layer.finish(x[None], attend(q, keys, values, mask[None]), *modulations)[0]

    def table(stream: torch.Tensor, weight: torch.Tensor, m: Modulation) -> tuple[torch.Tensor, dict]:
        squares, scaled = statistics_reference(stream, m.scale.flatten())
        return scaled, {"eps": 1e-6, "squares": squares, "bias": weight @ m.shift.flatten()}

    before, after = modulations
    qkv = torch.cat([layer.attn.q_proj.weight, layer.attn.k_proj.weight, layer.attn.v_proj.weight])
    gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    references = {name: kernel.reference for name, kernel in KERNELS.items()}
    cos, sin = rotate.cos[0, :, 0], rotate.sin[0, :, 0]
    scaled, norm = table(x, qkv, before)
    q, k, v = references["qkv_rope"](scaled, qkv, cos, sin, (4, 1), **norm)
    one = [(a[None], b[None]) for a, b in (prefix, (k, v))]
    attended = references["packed_attention"](q[None], one[0], mask[None], own=one[1])[0].flatten(1)
    linear = references["splitk_linear"]
    h = linear(attended, layer.attn.o_proj.weight, gate=before.gate.flatten(), residual=x)
    scaled, norm = table(h, gate_up, after)
    hidden = references["gated_mlp"](scaled, gate_up, activation="gelu_tanh", **norm)
    got = linear(hidden, layer.mlp.down_proj.weight, gate=after.gate.flatten(), residual=h)
    torch.testing.assert_close(got, want)


def test_reference_of_the_attention_is_the_layer() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 6, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    mask = torch.rand(2, 5, 12) > 0.4
    mask[:, 2] = False
    got = KERNELS["packed_attention"].reference(q, (k[:, :7], v[:, :7]), mask, own=(k[:, 7:], v[:, 7:]))
    torch.testing.assert_close(got.flatten(2), attend(q, k, v, mask))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [(480, 640), (720, 1280), (37, 21), (224, 224), (5, 300)])
def test_reference_of_the_preprocessing_is_the_processor(size: tuple[int, int], exact: bool) -> None:
    """Pillow's part to the bit: an error of one in 255 would be 8e-3."""
    interpolation = "pil_bilinear" if exact else "bilinear"
    box = Letterbox(224, 224, interpolation, pad_value=0.0 if exact else 0.25)  # type: ignore[arg-type]
    recipe = ImageRecipe(224, 224, (box,))
    frame = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    reference = KERNELS["preprocess"].reference(torch.from_numpy(frame[None]), ResizeTables.of(*size, recipe))
    assert np.abs(reference[0].numpy() - prepare_frame(frame, recipe)).max() <= 1e-6

"""Kernels without a product: beside their checks (test_kernels.py), the dtypes that they go between, their references
against the models' own layers, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinew.engine.cuda.kernels import KERNELS, fp8_quantize, row_norm
from sinew.engine.cuda.kernels.fp8_quantize import E4M3, LONGEST_ROW
from sinew.layers.decoder import DecoderConfig, GatedMLP
from sinew.layers.norm import AdaRMSNorm, GemmaRMSNorm, LayerNorm, Modulation, RMSNorm
from sinew.layers.rope import Rotation
from sinew.layers.vit import ViTConfig, ViTMLP
from tests.engine.cuda.kernel_checks import CHECKS, DEVICE, module_of, needs_triton

pytestmark = pytest.mark.kernels

references = {name: kernel.reference for name, kernel in KERNELS.items()}
SCALE = torch.tensor(0.01)


@needs_triton
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("row_norm", {"to": torch.float32}),
        ("row_norm", {"eighths": True}),
        ("row_norm", {"eighths": True, "kind": "layer", "offset": 0.0}),
        ("activate", {"to": torch.float32}),
        ("activate", {"eighths": True}),
        ("rope", {"to": torch.float32}),
    ],
    ids=str,
)
def test_from_bfloat16_to_another_dtype(name: str, sizes: dict) -> None:
    CHECKS[name](module_of(name), torch.bfloat16, DEVICE, **sizes)


@needs_triton
@settings(max_examples=8, deadline=None, derandomize=True)
@given(M=st.integers(1, 9), N=st.integers(1, 70), pairs=st.integers(1, 20), eighths=st.booleans())
def test_rows_of_any_size(M: int, N: int, pairs: int, eighths: bool) -> None:
    for name, sizes in (
        ("row_norm", {"C": N, "eighths": eighths}),
        ("activate", {"N": N, "eighths": eighths}),
        ("rope", {"D": 2 * pairs}),
    ):
        CHECKS[name](module_of(name), torch.float32, DEVICE, M=M, **sizes)


@needs_triton
def test_a_row_as_long_as_the_language_models() -> None:
    sizes = {"M": 2, "N": 16384, "eighths": True}
    CHECKS["activate"](module_of("activate"), torch.bfloat16, DEVICE, **sizes)


@needs_triton
def test_the_stream_and_the_branch_may_be_written_over() -> None:
    torch.manual_seed(0)
    stream, branch = torch.randn(2, 5, 24, device=DEVICE)
    wanted = references["row_norm"](stream, eps=1e-6, branch=branch)
    got = row_norm.row_norm(stream, eps=1e-6, branch=branch, total=stream, normed=branch)
    assert got[0] is stream
    assert got[1] is branch
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_triton
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_a_norm_by_squares_that_are_given(parts: int) -> None:
    """Of a stream that was multiplied after its squares were taken, as a split product leaves them."""
    torch.manual_seed(0)
    stream, scale = torch.randn(5, 48, device=DEVICE), torch.randn(48, device=DEVICE)
    squares = stream.view(5, parts, -1).pow(2).sum(-1)
    for got in (
        row_norm.row_norm(stream * scale, eps=1e-6, squares=squares)[1],
        references["row_norm"](stream * scale, eps=1e-6, squares=squares)[1],
    ):
        wanted = stream * scale * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["row_norm", "activate"])
def test_results_are_allocated_in_the_dtype_asked_for(name: str) -> None:
    x = torch.randn(3, 32, device=DEVICE)
    options = {"eps": 1e-6} if name == "row_norm" else {"activation": "silu", "gated": True}
    for dtype in (None, torch.bfloat16, E4M3):
        extra = {"x_scale": torch.tensor(0.05, device=DEVICE)} if dtype == E4M3 else {}
        *_, out, scales = KERNELS[name].launch(x, dtype=dtype, **options, **extra)
        assert out.dtype == (dtype or x.dtype)
        assert out.shape == (3, 32 if name == "row_norm" else 16)
        if dtype != E4M3:
            assert scales is None
        else:
            wide = references[name](x, dtype=torch.float32, **options)[-2]
            torch.testing.assert_close(out.float() * scales[:, None], wide, rtol=2**-4, atol=1e-2)


# The references against the layers that they stand for.


def norms() -> dict[str, tuple[Tensor, Tensor]]:
    """What the reference makes of a stream and what the layer makes of it."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 24), torch.randn(24), torch.randn(24)
    m = Modulation.of(torch.randn(1, 72))
    found = {}
    layer = LayerNorm(24, eps=0.1)
    layer.load_state_dict({"weight": weight, "bias": bias})
    reference = references["row_norm"]
    found["layer"] = reference(x, eps=0.1, kind="layer", weight=weight, shift=bias)[1], layer(x)
    for kind, offset in ((RMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        norm = kind(24, 0.1)
        norm.load_state_dict({"weight": weight})
        found[kind.__name__] = reference(x, eps=0.1, weight=weight, offset=offset)[1], norm(x)
    scale, shift, _ = (part.flatten() for part in m)
    got = reference(x, eps=0.1, weight=scale, offset=1.0, shift=shift)[1]
    found["adaptive"] = got, AdaRMSNorm(24, 0.1)(x[None], m)[0]
    return found


@pytest.mark.parametrize("name", ["layer", "RMSNorm", "GemmaRMSNorm", "adaptive"])
def test_reference_of_the_norm_is_the_layer(name: str) -> None:
    got, wanted = norms()[name]
    torch.testing.assert_close(got, wanted)


def test_the_reference_reads_the_total_as_it_was_rounded() -> None:
    torch.manual_seed(0)
    stream, branch = torch.randn(2, 7, 24).bfloat16()
    total, normed, scales = references["row_norm"](stream, eps=1e-6, branch=branch, dtype=torch.float32)
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, stream + branch)
    assert torch.equal(normed, references["row_norm"](total, eps=1e-6, dtype=torch.float32)[1])
    assert scales is None


def test_references_convert_to_e4m3_without_a_rounding_in_between() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 48).bfloat16()
    for name, options in (
        ("row_norm", {"eps": 1e-6}),
        ("activate", {"activation": "gelu_tanh", "gated": True}),
    ):
        wide = references[name](x, dtype=torch.float32, **options)[-2]
        data, scales = references[name](x, dtype=E4M3, x_scale=SCALE, **options)[-2:]
        wanted = fp8_quantize.reference(wide, x_scale=SCALE)
        assert torch.equal(data.float(), wanted[0].float())
        assert torch.equal(scales, wanted[1])
        rounded = fp8_quantize.reference(wide.bfloat16(), x_scale=SCALE)
        assert not torch.equal(data.float(), rounded[0].float())


def test_reference_of_the_activation_is_the_middle_of_an_mlp() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 24)
    vit = ViTMLP(ViTConfig(24, 40, 1, 2, 32, 16, 1e-6))
    for bias in (None, vit.fc1.bias):  # either the product adds the bias or this pass does
        product = vit.fc1(x) if bias is None else x @ vit.fc1.weight.T
        hidden, _ = references["activate"](product, activation="gelu_tanh", gated=False, bias=bias)
        torch.testing.assert_close(vit.fc2(hidden), vit(x))
    for activation in ("gelu_tanh", "silu"):
        mlp = GatedMLP(DecoderConfig(24, 40, 1, 2, 1, 12, 1e-6, 1e4, activation=activation))
        packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        hidden, _ = references["activate"](x @ packed.T, activation=activation, gated=True)
        torch.testing.assert_close(mlp.down_proj(hidden), mlp(x))
        norm = {"eps": 1e-6, "bias": torch.randn(80)}
        unfused = references["norm_linear"](x, packed, eps=1e-6)
        hidden, _ = references["activate"](unfused, activation=activation, gated=True, bias=norm["bias"])
        torch.testing.assert_close(hidden, references["gated_mlp"](x, packed, activation=activation, **norm))


@pytest.mark.parametrize("heads", [(3, 2), (2, 0), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_of_the_rotation_is_the_layer_and_the_fused_kernels(heads, dtype) -> None:
    torch.manual_seed(0)
    H, KV = heads
    columns = (H + 2 * KV) * 8
    x, weight, bias = torch.randn(7, 24).to(dtype), torch.randn(columns, 24).to(dtype), torch.randn(columns)
    rotate = Rotation.at(torch.arange(7)[None], 8, 1e4)
    tables = rotate.cos[0, :, 0], rotate.sin[0, :, 0]
    wanted = references["qkv_rope"](x, weight, *tables, heads, bias=bias)
    got = references["rope"](x.float() @ weight.float().T, *tables, heads, bias=bias, dtype=dtype)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)
    packed = torch.randn(7, columns)
    turned = rotate(packed.unflatten(1, (-1, 8))[None, :, : H + KV])[0]
    q, k, v = references["rope"](packed, *tables, heads)
    torch.testing.assert_close(torch.cat([q, k], 1), turned)
    assert torch.equal(v.flatten(1), packed[:, (H + KV) * 8 :])


# What is refused, and what is launched.

X, ROW = torch.zeros(3, 32), torch.zeros(32)
EIGHTHS, SCALES = torch.zeros(3, 32).to(E4M3), torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("row_norm", {"kind": "batch"}, "kind: expected one of rms, layer, got 'batch'"),
        ("row_norm", {"weight": X}, r"weight: expected shape \[32\], got \[3, 32\]"),
        ("row_norm", {"shift": ROW[1:]}, r"shift: expected shape \[32\], got \[31\]"),
        ("row_norm", {"gate": ROW}, "gate: can only be passed together with a branch"),
        ("row_norm", {"branch_bias": ROW}, "branch_bias: can only be passed together with a branch"),
        ("row_norm", {"branch_bias": X, "branch": X, "total": X}, r"branch_bias: expected shape \[32\]"),
        ("row_norm", {"squares": X, "kind": "layer"}, "squares: can only be passed for an RMS norm"),
        ("row_norm", {"squares": X[:2]}, r"squares: expected shape \[3, 32\], got \[2, 32\]"),
        ("row_norm", {"branch": X}, "total: total and branch must be passed together"),
        ("row_norm", {"total": X}, "total: total and branch must be passed together"),
        ("row_norm", {"branch": X, "total": X.bfloat16()}, "total: expected dtype torch.float32, got torch.bf"),
        ("row_norm", {"branch": X.int(), "total": X}, "branch: expected dtype float32, bfloat16 or float16"),
        ("row_norm", {"out": X[:2]}, r"normed: expected shape \[3, 32\], got \[2, 32\]"),
        ("row_norm", {"out": X.int()}, "normed: expected dtype float32, bfloat16, float16 or .*, got torch.int32"),
        ("row_norm", {"out": EIGHTHS}, "scales: must be passed if normed is torch.float8_e4m3fn"),
        ("row_norm", {"scales": SCALES}, "scales: can only be passed if normed is torch.float8_e4m3fn"),
        ("row_norm", {"x_scale": SCALES[0]}, "x_scale: can only be passed if normed is"),
        ("row_norm", {"out": EIGHTHS, "scales": SCALES}, "x_scale: must be passed if normed is"),
        ("row_norm", {"out": EIGHTHS, "scales": ROW}, r"scales: expected shape \[3\], got \[32\]"),
        ("row_norm", {"out": EIGHTHS, "scales": SCALES, "x_scale": ROW}, r"x_scale: expected shape \[1\]"),
        ("row_norm", {"out": EIGHTHS, "scales": SCALES.half()}, "scales: expected dtype torch.float32"),
        ("activate", {"activation": "relu"}, "activation: expected one of gelu_tanh, silu, got 'relu'"),
        ("activate", {"gated": True}, r"out: expected shape \[3, 16\], got \[3, 32\]"),
        ("activate", {"bias": ROW[:16]}, r"bias: expected shape \[32\], got \[16\]"),
        ("activate", {"out": EIGHTHS}, "scales: must be passed if out is"),
        ("activate", {"x": torch.zeros(3, 31), "gated": True}, "x: expected an even width for gate and up, got 31"),
        ("activate", {"x": X.int()}, "x: expected dtype float32, bfloat16 or float16, got torch.int32"),
        ("activate", {"x": X.T}, "x: expected contiguous memory"),
        ("rope", {"bias": ROW[1:]}, r"bias: expected shape \[32\], got \[31\]"),
        ("rope", {"x": X[:, :24]}, r"packed: expected shape \[3, 32\], got \[3, 24\]"),
        ("rope", {"cos": X[:, :4].double()}, "cos: expected dtype torch.float32, got torch.float64"),
        ("rope", {"sin": X[:, :8]}, r"sin: expected shape \[3, 4\], got \[3, 8\]"),
        ("rope", {"k": torch.zeros(2, 1, 8)}, r"k: expected shape \[3, 1, 8\], got \[2, 1, 8\]"),
        ("rope", {"v": torch.zeros(3, 1, 8).int()}, "v: expected dtype float32, bfloat16 or float16"),
        ("rope", {"q": torch.zeros(3, 2, 7)}, "q: rotation needs an even head size, got 7"),
    ],
)  # fmt: skip
def test_errors_name_the_tensor(name: str, options: dict, words: str) -> None:
    table, q, kv = torch.zeros(3, 4), torch.zeros(3, 2, 8), torch.zeros(3, 1, 8)
    tensors, others = {
        "row_norm": ({"x": X, "out": X}, {"eps": 1e-6}),
        "activate": ({"x": X, "out": X}, {"activation": "silu", "gated": False}),
        "rope": ({"x": X, "cos": table, "sin": table, "q": q, "k": kv, "v": kv}, {}),
    }[name]
    positional = [options.get(tensor, given) for tensor, given in tensors.items()]
    rest = {option: given for option, given in options.items() if option not in tensors}
    with pytest.raises(ValueError, match=words):
        KERNELS[name].prepare(*positional, **others | rest)


def test_rows_too_long_for_one_program_are_refused() -> None:
    """The activation splits rows into blocks of columns."""
    x, out = (torch.empty(2, size, device="meta") for size in (LONGEST_ROW + 2, LONGEST_ROW // 2 + 1))
    KERNELS["activate"].prepare(x, out, activation="silu", gated=True)
    with pytest.raises(ValueError, match="stream: expected rows of at most"):
        row_norm.prepare(x, x, eps=1e-6)


@pytest.mark.parametrize(("capability", "fine"), [((8, 0), False), ((8, 9), True)])
def test_e4m3_is_refused_where_a_gpu_cannot_convert(capability, fine: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    class OnGpu:
        dtype, device = E4M3, torch.device("cuda", 0)

        def __len__(self) -> int:
            return 3

    if fine:
        fp8_quantize.check_output("normed", OnGpu(), SCALES, SCALE)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=r"normed: .* needs compute capability 8\.9, got 8\.0"):
        fp8_quantize.check_output("normed", OnGpu(), SCALES, SCALE)  # type: ignore[arg-type]

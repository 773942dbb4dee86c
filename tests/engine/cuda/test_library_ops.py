"""Products of a library with row-wise passes around them, against the fused operations they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sinew.engine.cuda.fp8 import linear as fp8
from sinew.engine.cuda.fused.library import Library
from sinew.engine.cuda.fused.ops import PlainOps, References
from sinew.engine.cuda.fused.rows import RowReferences, Target
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.layers.linear import Linear
from tests.golden import relative_l2

M, K, N, H, KV, D = 9, 48, 40, 3, 1, 16
LIBRARY, REFERENCES = Library(RowReferences()), References()
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=random.generator).to(dtype)


random.generator = torch.Generator()


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.generator.manual_seed(3)


NORMS = {
    "none": {},
    "rms": {"eps": 1e-5},
    "modulated": {"eps": 1e-5, "scale": True, "bias": True},
    "biased": {"bias": True},
}


def norm(name: str, columns: int) -> dict:
    options = dict(NORMS[name])
    if "scale" in options:
        options["scale"] = random(K)
    if "bias" in options:
        options["bias"] = random(columns)
    return options


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", NORMS)
def test_products_with_a_norm(name, dtype):
    x = random(M, K, dtype=dtype) * 3
    cos, sin = random(M, D // 2).cos(), random(M, D // 2).sin()
    columns = (H + 2 * KV) * D
    cases = {
        "norm_linear": ((x, random(N, K, dtype=dtype)), norm(name, N)),
        "gated_mlp": ((x, random(2 * N, K, dtype=dtype), "gelu_tanh"), norm(name, 2 * N)),
        "qkv_rope": ((x, random(columns, K, dtype=dtype), cos, sin, (H, KV)), norm(name, columns)),
    }
    for method, (arguments, options) in cases.items():
        got, wanted = (getattr(ops, method)(*arguments, **options) for ops in (LIBRARY, REFERENCES))
        pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
        for ours, theirs in pairs:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), method
            assert relative_l2(ours.float(), theirs.float()) <= BOUNDS[dtype], method


def test_a_wide_projection_of_a_half_precision_stream():
    x, weight = random(M, K, dtype=torch.bfloat16), random(N, K)
    got, wanted = (ops.norm_linear(x, weight, eps=1e-5) for ops in (LIBRARY, REFERENCES))
    assert got.dtype == wanted.dtype == torch.float32
    assert relative_l2(got, wanted) <= 1e-6  # the normed rows are not rounded on the way


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("present", [(), ("residual",), ("bias", "residual"), ("bias", "gate", "residual")])
def test_linear_with_a_residual(present, dtype):
    x, weight = random(M, K, dtype=dtype), random(N, K, dtype=dtype)
    rest = {name: random(M, N, dtype=dtype) if name == "residual" else random(N) for name in present}
    got, wanted = (ops.splitk_linear(x, weight, **rest) for ops in (LIBRARY, REFERENCES))
    assert got.dtype == wanted.dtype
    assert relative_l2(got.float(), wanted.float()) <= BOUNDS[dtype]
    if present == ("residual",) and dtype == torch.bfloat16:  # rounded once, where torch's own adds twice
        exact = REFERENCES.splitk_linear(x.float(), weight.float(), residual=rest["residual"].float())
        twice = PlainOps().splitk_linear(x, weight, **rest)
        assert relative_l2(got.float(), exact) < relative_l2(twice.float(), exact)


def test_ada_rms():
    x, scale, shift = random(M, K, dtype=torch.bfloat16), random(K), random(K)
    got, wanted = (ops.ada_rms(x, scale, shift, 1e-5) for ops in (LIBRARY, REFERENCES))
    assert torch.equal(got, wanted)


def test_an_operand_is_what_the_layer_reads():
    rows, linear = RowReferences(), Linear(K, N)
    x = random(M, K, dtype=torch.bfloat16)
    assert Target.of(linear) == Target(torch.float32)
    plain = rows.convert(x, Target.of(linear))
    assert plain.scales is None
    wanted = linear(x)
    assert torch.equal(rows.product(plain, linear), wanted)
    bare = rows.product(plain, linear, bias=False)
    assert relative_l2(bare + linear.bias, wanted) <= 1e-6
    assert not torch.allclose(bare, wanted)
    for scale in (None, 0.02):
        narrow = fp8.Fp8Linear.of(linear, scale)
        operand = rows.convert(x, Target.of(narrow))
        assert operand.data.dtype == E4M3
        assert torch.equal(rows.product(operand, narrow), narrow(x))

"""Compiled attention and activations of every instruction set that this CPU has, and of emulated tiles, against
float64."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels import build, float_kernels
from sinew.engine.cpu.kernels import library as compiled
from sinew.engine.cpu.kernels.float_kernels import FloatKernels
from sinew.engine.plan.plan import Plan
from sinew.policy import load
from tests.engine.cpu.test_cpu_kernels import library_of_emulated_tiles
from tests.engines import run_one

# The error of rounded attention as a part of the largest value. Tiles and bfmmla round to the 8 bits of bfloat16: over
# 60 random cases of scores with a standard deviation of 4, the largest error of tiles was 1.1e-2.
ROUNDED = {"amx": 2e-2, "neon-i8mm": 2e-2}
ROUNDED_ELSEWHERE = 4e-3


@pytest.fixture(scope="module", params=["this CPU", pytest.param("tiles", marks=pytest.mark.kernels)])
def all_kernels(request, tmp_path_factory) -> dict[str, FloatKernels]:
    """The operations of every instruction set that this CPU has, or those of emulated tiles."""
    built = build.build()
    if built.path is None:
        pytest.skip(built.reason)
    path = built.path
    if request.param == "tiles":
        path = library_of_emulated_tiles(tmp_path_factory.mktemp("tiles"))
    library = compiled.load(str(path))
    names = compiled.kernel_names(library)
    return {name: FloatKernels.compiled(library, index) for name, index in zip(names, count())}


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 70),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.integers(1, 80),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_attention_is_that_of_float64(
    all_kernels, batch, queries, keys, key_heads, group, size, masked, seed
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = key_heads * group
    q = 4 * torch.randn(batch, queries, heads, size, generator=random)
    kv = torch.randn(batch, keys, 2 * key_heads, size, generator=random)  # as of one product: rows lie apart
    k, v = kv.split(key_heads, dim=2)
    mask = torch.rand(batch, queries, keys, generator=random) < 0.5 if masked else None
    if masked:
        mask[:, 0] = False  # a row that sees nothing averages everything
    seen = torch.ones(batch, queries, keys, dtype=torch.bool) if mask is None else mask
    shared = [t.double().repeat_interleave(group, dim=2) for t in (k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), shared[0]) * size**-0.5
    scores = scores.masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), shared[1]).flatten(2)
    before = seed % (keys + 1)  # the others lie in tensors of their own
    parted = k[:, :before], v[:, :before], k[:, before:].contiguous(), v[:, before:].contiguous()
    for name, each in all_kernels.items():
        for rounded, part in ((False, 4e-6), (True, ROUNDED.get(name, ROUNDED_ELSEWHERE))):
            made = each.attend(q, k, v, mask, rounded)
            error = (made.double() - wanted).abs().max()
            assert error <= part * v.abs().max(), (name, rounded, float(error))
            assert torch.equal(each.attend(q, *parted[:2], mask, rounded, *parted[2:]), made), name


def test_activations_are_those_of_float64(all_kernels) -> None:
    ends = torch.tensor([0.0, -0.0, 1e-38, -1e-38, 1e-20, 60.0, -60.0, 1e4, -1e4, 1e12, -1e12])
    x = torch.cat([torch.linspace(-20, 20, 200_003), ends])
    up = torch.linspace(-3, 5, x.numel())
    wide, other = x.double(), up.double()
    for name, each in all_kernels.items():
        made, gated = x.clone(), x.clone()
        each.gelu(made)
        each.silu_times(gated, up)
        assert ((made.double() - F.gelu(wide, approximate="tanh")).abs() <= 4e-7 * wide.abs()).all(), name
        assert ((gated.double() - F.silu(wide) * other).abs() <= 4e-7 * (wide * other).abs()).all(), name
        for size in range(20):  # ends of vectors; and nothing behind them is touched
            short = torch.full((32,), 2.0)
            each.gelu(short[:size])
            assert (short[size:] == 2).all()
            assert (short[:size] < 2).all()
        broken = torch.full((9,), torch.nan)
        each.gelu(broken)
        assert broken.isnan().all(), name


def test_a_value_that_is_not_finite_does_not_look_like_a_number(all_kernels) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    q[0, 3, 1, 2] = torch.nan
    broken = v.clone()
    broken[0, 5, 0, 7] = torch.inf
    hides = torch.ones(1, 20, 20, dtype=torch.bool)
    hides[:, ::2, 3] = False  # from every other row the key that is broken
    for name, each in all_kernels.items():
        for rounded in (False, True):
            out = each.attend(q, k, v, None, rounded).view(20, 2, 8)
            assert out[3, 1].isnan().all(), name
            assert out[3, 0].isfinite().all(), name
            assert not each.attend(k, q, v, None, rounded).view(20, 2, 8)[:, 1].isfinite().any(), name
            out = each.attend(k, q, v, hides, rounded).view(20, 2, 8)[:, 1]
            assert out[::2].isfinite().all(), (name, rounded)
            assert out[1::2].isnan().all(), (name, rounded)
            out = each.attend(k, k, broken, None, rounded).view(20, 2, 8)
            assert not out[:, 0, 7].isfinite().any(), name
            assert out[:, 0, :7].isfinite().all(), name


def test_rounded_attention_takes_any_size_of_numbers(all_kernels) -> None:
    q, k, v = (torch.randn(1, 30, 2, 64) for _ in range(3))
    mask = torch.rand(1, 30, 30) < 0.5
    plain = float_kernels.attend_reference(q, k, v, mask)
    for name, each in all_kernels.items():
        for factor in (1e-12, 1e12):  # scores stay as they are; so do weights
            made = each.attend(q * factor, k / factor, v * factor, mask, True) / factor
            bound = ROUNDED.get(name, ROUNDED_ELSEWHERE) * v.abs().max()
            assert (made - plain).abs().max() <= bound, (name, factor)
        zeros = torch.zeros_like(q)
        even = each.attend(zeros, zeros, v, mask, True)
        wanted = float_kernels.attend_reference(zeros, zeros, v, mask)
        assert (even - wanted).abs().max() <= 4e-3 * v.abs().max(), name
        same = torch.full_like(q, 3.0)  # the largest sum that the rounding allows
        made = each.attend(same, same, same, None, True)
        assert (made - 3).abs().max() <= 1e-4, name


def test_threads_do_not_change_a_bit(all_kernels) -> None:
    each = next(iter(all_kernels.values()))
    q, k, v = (torch.randn(2, 150, 3, 32) for _ in range(3))
    x = torch.randn(100_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            activated = x.clone()
            each.gelu(activated)
            results.append((each.attend(q, k, v, None), each.attend(q, k, v, None, True), activated))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tensors_that_do_not_fit_are_refused(all_kernels) -> None:
    each = next(iter(all_kernels.values()))
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 6, 2, 8)
    for wrong in (
        (q.double(), k, k, None),
        (q, k[..., :7], k[..., :7], None),
        (q[:, :, :3], k, k, None),
        (q, k, k[:, :5], None),
        (q, k, k, torch.ones(1, 5, 5, dtype=torch.bool)),
        (q, k, k, torch.ones(1, 5, 6)),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, k, None),  # heads lie apart
    ):
        with pytest.raises(ValueError, match="attention: expected float32 q, k, v and a bool mask"):
            each.attend(*wrong)
    with pytest.raises(ValueError, match="expected contiguous float32"):
        each.gelu(torch.randn(4, 6)[:, :3])
    with pytest.raises(ValueError, match="expected contiguous float32"):
        each.silu_times(torch.randn(4), torch.randn(5))


def test_operators_are_seen_by_tracers() -> None:
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 6, 2, 8)
    utils = ("test_schema", "test_faketensor")
    operators = torch.ops.sinew
    torch.library.opcheck(operators.cpu_attend.default, (q, k, k, None), test_utils=utils)
    torch.library.opcheck(operators.cpu_gelu_.default, (q,), test_utils=utils)
    torch.library.opcheck(operators.cpu_silu_times_.default, (q, q.clone()), test_utils=utils)


@pytest.mark.parametrize("name", ["smolvla-2cam", "pi05-2cam"])
def test_a_model_with_compiled_operators_gives_the_actions_of_one_without(
    all_kernels, name, smolvla_bundle, pi_bundle, monkeypatch
) -> None:
    policy = load((pi_bundle if name.startswith("pi") else smolvla_bundle)(name), engine="eager")
    inputs = policy.processor.inputs(policy.dummy_observation())
    noise = torch.randn(policy.engine.model.noise_shape, generator=torch.Generator().manual_seed(0)).numpy()
    wanted = run_one(policy.engine, inputs, noise, 4)[0]
    plan = compile_floats(Plan.of(policy.engine.model, 4, ["pack-qkv"]))
    compiled_kinds = {outcome.name for outcome in plan.outcomes if outcome.status == "applied"}
    assert {"compile ViTAttention", "compile DecoderAttention", "compile GatedMLP"} <= compiled_kinds
    policy.engine.model = plan.model
    monkeypatch.setattr(float_kernels, "_on_cpu", [next(iter(all_kernels.values()))])
    got = run_one(policy.engine, inputs, noise, 4)[0]
    assert 0 < abs(got - wanted).max() <= 1e-5 * abs(wanted).max()

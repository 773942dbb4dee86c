"""The halves of a layer of every instruction set that this CPU has: their parts one by one, in every bit; norms against
float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sinew.bundle.quant import FORMATS, pack_ternary
from sinew.engine.cpu.kernels import build, float_kernels, layer_kernels
from sinew.engine.cpu.kernels import library as compiled
from sinew.engine.cpu.kernels.float_kernels import FloatKernels
from sinew.engine.cpu.kernels.layer_kernels import (
    ACTIONS,
    PANELS_NUMBERS,
    Finish,
    LayerKernels,
    NormOf,
    Projection,
)
from sinew.engine.cpu.open import lay_out_codes
from sinew.layers.linear import Linear, hold
from sinew.layers.rope import Rotation
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import codes


class Kernels(NamedTuple):
    layers: LayerKernels
    floats: FloatKernels
    panels: str | None


@pytest.fixture(scope="module")
def all_kernels() -> dict[str, Kernels]:
    """The halves of every instruction set that this CPU has, its activations, and its order of int8 weights."""
    built = build.build()
    if built.path is None:
        pytest.skip(built.reason)
    library = compiled.load(str(built.path))
    return {
        name: Kernels(
            LayerKernels.compiled(library, index),
            FloatKernels.compiled(library, index),
            next((o for o in lowbit.INTEGERS if library.lowbit_takes_panels(index, PANELS_NUMBERS[o])), None),
        )
        for name, index in zip(compiled.kernel_names(library), count())
    }


@pytest.fixture(autouse=True)
def products_of_the_reference():
    """Let parts one by one be computed by PyTorch."""
    before = lowbit.installed()
    lowbit.install(lowbit.reference_all)
    yield
    lowbit.install(before)


def layer(kind: str, out: int, k: int, bias: bool, random: torch.Generator) -> Linear:
    """A linear layer of random codes of a format; results are as large as the input."""
    made, stored = Linear(k, out, bias=bias), FORMATS[kind]
    hold(made, codes(kind, k, 0 if stored.group else out))
    weight = torch.randint(0, 256, (out, stored.row_bytes(k)), generator=random, dtype=torch.uint8)
    if kind == "ternary":
        values = torch.randint(-1, 2, (out, k), generator=random, dtype=torch.int8)
        weight = torch.from_numpy(pack_ternary(values.numpy()))
    if stored.group:  # halves of any bits may be infinite
        scales = torch.rand(out, k // 32, 1, generator=random) / 50
        weight.view(out, k // 32, -1)[..., :2] = scales.half().view(torch.uint8)
    else:
        made.scale = nn.Parameter(torch.rand(out, generator=random) / 500, requires_grad=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made.requires_grad_(False)


def norm_of(width: int, centred: bool, affine: int, random: torch.Generator) -> NormOf:
    tensors = torch.randn(2, width, generator=random).unbind()
    return NormOf(centred, 1e-5, *tensors[:affine])


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 700),
    centred=st.booleans(),
    affine=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_norms_are_those_of_float64(all_kernels, rows, width, centred, affine, seed) -> None:
    random = torch.Generator().manual_seed(seed)
    norm = norm_of(width, centred, affine, random)
    x = 3 + 20 * torch.randn(rows, width, generator=random)
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    wide = wide if norm.weight is None else wide * norm.weight.double()
    wide = wide if norm.bias is None else wide + norm.bias.double()
    # A mean is known to a rounding of the row's values, which is divided by their spread as they are.
    spread = x.double().var(-1, keepdim=True, correction=0) if centred else 0
    mean = 2.0**-22 * x.double().abs().amax(-1, keepdim=True) * (spread + norm.eps) ** -0.5 if centred else 0
    mean = mean if norm.weight is None else mean * norm.weight.double().abs()
    for name, each in all_kernels.items():
        error = (each.layers.norm(norm, x).double() - wide).abs()
        assert (error <= 2e-6 * wide.abs().max() + mean).all(), (name, float(error.max()))


def part_by_part(each: Kernels, call: str, *arguments) -> list[Tensor]:
    """What a half's parts give one by one: the norm and activations of ``each``, everything else by PyTorch."""
    floats, layers = float_kernels._on_cpu[:], layer_kernels._on_cpu[:]
    try:
        float_kernels.install(each.floats)
        layer_kernels.install(replace(layer_kernels.REFERENCES, norm=each.layers.norm))
        made = getattr(layer_kernels, call)(*arguments)
    finally:
        float_kernels._on_cpu[:], layer_kernels._on_cpu[:] = floats, layers
    return made if isinstance(made, list) else [made]


KINDS = st.sampled_from(["int8", "q8_0", "q4_0", "ternary"])


@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 30),
    k=st.integers(1, 4),
    heads=st.integers(1, 3),
    turned=st.integers(0, 2),
    shared=st.booleans(),
    normed=st.booleans(),
    bias=st.booleans(),
    kind=KINDS,
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_what_stands_before_an_attention(
    all_kernels, batch, rows, k, heads, turned, shared, normed, bias, kind, seed
) -> None:
    random, head = torch.Generator().manual_seed(seed), 16
    sizes = [heads * head, 2 * head, 48]
    norm = norm_of(32 * k, seed % 2 == 0, seed % 3, random) if normed else None
    projection = Projection(norm, [layer(kind, out, 32 * k, bias, random) for out in sizes], turned, head)
    x = torch.randn(batch, rows, 32 * k, generator=random)
    positions = torch.randint(0, 500, (1 if shared else batch, rows), generator=random)
    rotate = Rotation.at(positions, head, 10_000.0) if turned else None
    for name, each in all_kernels.items():
        wanted = part_by_part(each, "project", projection, x, rotate)
        for got, want in zip(each.layers.project(projection, x, rotate), wanted, strict=True):
            assert torch.equal(got, want), name


@given(
    batch=st.integers(1, 2),
    rows=st.sampled_from([1, 2, 13, 50, 505, 700]),  # on both sides of a slice
    k=st.integers(1, 3),
    width=st.integers(1, 3),
    inner=st.integers(1, 5),
    action=st.sampled_from(sorted(ACTIONS)),
    gates=st.booleans(),
    bias=st.booleans(),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_what_stands_behind_an_attention(
    all_kernels, batch, rows, k, width, inner, action, gates, bias, kinds, seed
) -> None:
    random = torch.Generator().manual_seed(seed)
    k, width, inner = 32 * k, 32 * width, 32 * inner
    up = [layer(kinds[1], inner, width, bias, random) for _ in range(1 + action.endswith("times"))]
    behind = Finish(
        layer(kinds[0], width, k, bias, random),
        norm_of(width, seed % 2 == 0, seed % 3, random),
        up,
        action,
        layer(kinds[2], width, inner, bias, random),
        *(torch.randn(2, width, generator=random).unbind() if gates else (None, None)),
    )
    x, attended = (torch.randn(batch, rows, n, generator=random) for n in (width, k))
    for name, each in all_kernels.items():
        (wanted,) = part_by_part(each, "finish", behind, x, attended)
        assert torch.equal(each.layers.finish(behind, x, attended), wanted), name


@given(
    batch=st.integers(1, 3),
    rows=st.sampled_from([1, 7, 30, 506]),
    heads=st.integers(1, 3),
    turned=st.sampled_from(["", "alike", "each"]),
    gates=st.booleans(),
    rounded=st.booleans(),
    kind=KINDS,
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=30)
def test_a_whole_layer(all_kernels, batch, rows, heads, turned, gates, rounded, kind, seed) -> None:
    random, head = torch.Generator().manual_seed(seed), 32
    width = heads * head
    norms = [norm_of(width, seed % 2 == 0, seed % 3, random) for _ in range(2)]
    q, k, v, out, down = (layer(kind, width, width, True, random) for _ in range(5))
    before = Projection(norms[0], [q, k, v], 2 * bool(turned), head)
    up = [layer(kind, width, width, True, random)]
    scales = torch.randn(2, width, generator=random).unbind() if gates else (None, None)
    behind = Finish(out, norms[1], up, "gelu_tanh", down, *scales)
    x = torch.randn(batch, rows, width, generator=random)
    at = torch.arange(rows)[None] if turned == "alike" else torch.arange(batch * rows).view(batch, rows)
    rotate = Rotation.at(at, head, 10_000.0) if turned else None
    for name, each in all_kernels.items():
        (wanted,) = part_by_part(each, "encode", before, behind, x, rotate, rounded)
        assert torch.equal(each.layers.encode(before, behind, x, rotate, rounded), wanted), name


def test_weights_in_panels_and_threads_do_not_change_a_bit(all_kernels) -> None:
    random = torch.Generator().manual_seed(3)
    norm = norm_of(64, True, 2, random)
    layers = [layer("int8", out, k, True, random) for out, k in ((64, 96), (128, 64), (64, 128))]
    behind = Finish(layers[0], norm, layers[1:2], "gelu_tanh", layers[2])
    before = Projection(norm, layers[1:2], 1, 32)
    x, attended = torch.randn(1, 600, 64, generator=random), torch.randn(1, 600, 96, generator=random)
    rotate = Rotation.at(torch.arange(600)[None], 32, 10_000.0)

    def both(each: Kernels) -> list[Tensor]:
        return [*each.layers.project(before, x, rotate), each.layers.finish(behind, x, attended)]

    wanted = {name: both(each) for name, each in all_kernels.items()}
    plain = [(one.weight, one.store) for one in layers]
    threads = torch.get_num_threads()
    try:
        for name, each in all_kernels.items():
            if each.panels is None:
                continue
            for one, (weight, store) in zip(layers, plain, strict=True):
                one.weight, one.store = weight, store
            lay_out_codes(
                nn.ModuleList(layers), each.panels
            )  # a half notices that its weights were exchanged
            for torch_threads in (1, 3):
                torch.set_num_threads(torch_threads)
                assert all(map(torch.equal, both(each), wanted[name])), (name, torch_threads)
    finally:
        torch.set_num_threads(threads)


def test_a_row_that_is_not_finite_does_not_look_like_numbers(all_kernels) -> None:
    random = torch.Generator().manual_seed(4)
    layers = [layer("int8", 32, 32, False, random) for _ in range(3)]
    behind = Finish(layers[0], norm_of(32, False, 1, random), layers[1:2], "gelu_tanh", layers[2])
    for broken in (torch.nan, torch.inf):
        x, attended = torch.randn(2, 1, 20, 32, generator=random).unbind()
        x[0, 3, 5] = attended[0, 7, 2] = broken
        for name, each in all_kernels.items():
            made = each.layers.finish(behind, x, attended)[0]
            assert made[3].isnan().any(), name
            assert made[7].isnan().all(), name
            assert made[[0, 1, 2, 4, 5, 6]].isfinite().all(), name
            (q,) = each.layers.project(Projection(behind.norm, layers[:1]), x)
            assert q[0, 3].isnan().all(), name
            assert q[0, :3].isfinite().all(), name


def test_tensors_that_do_not_fit_are_refused(all_kernels) -> None:
    random = torch.Generator().manual_seed(5)
    each = next(iter(all_kernels.values())).layers
    layers = [layer("int8", 32, 32, False, random) for _ in range(3)]
    norm = norm_of(32, False, 1, random)
    before, behind = (
        Projection(norm, layers[:1], 1, 16),
        Finish(layers[0], norm, layers[1:2], "gelu_tanh", layers[2]),
    )
    x = torch.randn(1, 5, 32)
    with pytest.raises(ValueError, match=r"projection: expected float32 \[..., 32\] on cpu"):
        each.project(before, x[..., :31])
    with pytest.raises(ValueError, match=r"finish: expected float32 \[..., 32\] on cpu, got torch.float64"):
        each.finish(behind, x.double(), x)
    with pytest.raises(ValueError, match="finish: expected the same rows in both inputs"):
        each.finish(behind, x, x[:, :4])
    with pytest.raises(ValueError, match="expected a rotation with 5 or 5 rows for heads of 16"):
        each.project(before, x, Rotation.at(torch.arange(4)[None], 16, 100.0))
    with pytest.raises(ValueError, match=r"norm: expected a float32 weight and bias of shape \[32\]"):
        each.project(Projection(norm_of(31, False, 1, random), layers[:1]), x)
    with pytest.raises(ValueError, match=r"gate: expected float32 \[32\]"):
        each.finish(replace(behind, down_gate=torch.ones(31), _given=None), x, x)
    with pytest.raises(RuntimeError, match="projection: the kernel rejected its arguments"):
        each.project(Projection(norm, layers[:1], 1, 24), x, Rotation.at(torch.arange(5)[None], 24, 100.0))
    wrong = layer("int8", 48, 32, False, random)  # the perceptron's result has another width than the stream
    with pytest.raises(RuntimeError, match="finish: the kernel rejected its arguments"):
        each.finish(Finish(layers[0], norm, layers[1:2], "gelu_tanh", wrong), x, x)
    with pytest.raises(ValueError, match=r"layer: expected an input of shape \[B, L, 32\], got \[5, 32\]"):
        each.encode(before, behind, x[0])
    with pytest.raises(
        RuntimeError, match="layer: the kernel rejected its arguments"
    ):  # one layer, not three
        each.encode(before, behind, x)

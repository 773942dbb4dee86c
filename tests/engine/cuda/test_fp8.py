"""FP8: conversion at its edges, the layer and its product, calibration, and what it costs a chunk.

The kernels' own checks and wrong variants are in test_kernels.py, what the compiler makes of them in
test_kernel_launches.py.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.core import SinewError
from sinew.engine.clone import clone_model
from sinew.engine.cuda.fp8 import linear as fp8
from sinew.engine.cuda.fp8 import scales as calibration
from sinew.engine.cuda.kernels.fp8_quantize import E4M3, fp8_quantize, reference
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Linear
from sinew.models.base import Model
from sinew.policy import load
from tests.engine.cuda.kernel_checks import DEVICE, needs_triton
from tests.engines import run_one
from tests.golden import Golden

CPU = torch.device("cpu")
PRINT = "0123456789abcdef" * 4
# Largest relative L2 of the chunk with the language model in FP8. The random pi0 fixture multiplies any error.
BOUNDS = {"smolvla-2cam": 6e-3, "pi0-2cam": 0.2, "pi05-2cam": 8e-3}


def relative(a, b) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ----------------------------------------------------------------------------- conversion


def every_number() -> torch.Tensor:
    """All finite numbers of e4m3, what lies a quarter, half and three quarters between two of them, and beyond."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    steps = codes[1:] - codes[:-1]
    between = [codes[:-1] + steps * part for part in (0.25, 0.5, 0.75)]
    positive = torch.cat([codes, *between, torch.tensor([449.0, 463.9, 464.0, 465.0, 480.0, 1e4, 3e38])])
    return torch.cat([positive, -positive])


@needs_triton
def test_conversion_is_to_nearest_even_and_saturates() -> None:
    x = every_number()[None].to(DEVICE)
    one = torch.ones((), device=DEVICE)
    wanted = x.clamp(-448, 448).to(E4M3).float()
    assert wanted.abs().max() == 448
    for convert in (fp8_quantize, reference):
        data, scales = convert(x, x_scale=one)
        assert torch.equal(data.float(), wanted)
        assert scales.tolist() == [1.0]


def test_rows_of_zeros_and_tiny_rows_stay_finite() -> None:
    weight = torch.randn(16, 32)
    weight[1] = 0
    weight[3] *= 1e-42  # numbers that float32 itself holds imprecisely
    made = fp8.quantize_weight(weight)
    assert torch.isfinite(made.wide()).all()
    assert not made.wide()[1].any()
    out = fp8.fp8_linear(torch.zeros(3, 32), made, torch.tensor(0.5))
    assert out.dtype == torch.float32
    assert not out.any()


@given(st.integers(0, 2**31), st.floats(-12, 12))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_error_of_each_weight(seed: int, exponent: float) -> None:
    """Half a step of the mantissa, or of the subnormals."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 48, generator=generator) * 10**exponent
    made = fp8.quantize_weight(weight)
    assert made.data.is_contiguous()
    assert made.data.shape == weight.shape
    largest = weight.abs().amax(1, keepdim=True)
    bound = torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10) * 1.00001
    assert ((made.wide() - weight).abs() <= bound).all()
    assert (made.data.float().abs().amax(1) == 448).all()


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(16, 24), "weight: expected an input size that is a multiple of 16, got 24"),
        (torch.zeros(24, 16), "weight: expected an output size that is a multiple of 16, got 24"),
        (torch.zeros(4), r"weight: expected \[out, in\], got 1 axes"),
        (torch.zeros(16, 1 << 16), "weight: expected an input size of at most 32768, got 65536"),
        (torch.full((16, 32), float("nan")), "weight: expected finite numbers"),
        (torch.full((16, 32), float("inf")), "weight: expected finite numbers"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fp8.quantize_weight(weight)


def test_arguments_are_checked() -> None:
    weight = fp8.quantize_weight(torch.randn(16, 32))
    with pytest.raises(ValueError, match=r"x: expected shape \[rows, 32\], got \[3, 16\]"):
        fp8.fp8_linear(torch.zeros(3, 16), weight, torch.tensor(0.5))
    with pytest.raises(ValueError, match="x: expected bfloat16, float16 or float32, got torch.int64"):
        fp8.fp8_linear(torch.zeros(3, 32, dtype=torch.int64), weight, torch.tensor(0.5))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="x_scale: expected a finite number above 0"):
            fp8.Fp8Linear.of(Linear(32, 8), scale)


@pytest.mark.parametrize(
    ("capability", "fine"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_devices_without_fp8_are_refused(
    capability: tuple[int, int], fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda:0")
    assert fp8.supported(device)[0] is fine
    assert f"{capability[0]}.{capability[1]}" in fp8.supported(device)[1]
    if not fine:
        with pytest.raises(
            ValueError,
            match=rf"FP8 needs compute capability 8\.9, and this device has {capability[0]}\.{capability[1]}",
        ):
            fp8._require(device)


# ----------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_stands_in_for_a_linear_layer(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = Linear(64, 32, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(2, 5, 64) * torch.logspace(-4, 2, 5)[:, None]  # rows of very different size
    wanted = linear(x)
    layer = fp8.Fp8Linear.of(linear, float(x.abs().max()) / 448)
    got = layer(x)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert layer.weight.dtype == dtype
    assert 1e-3 < relative(got.float(), wanted.float()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_librarys_product_is_the_reference(dtype: torch.dtype) -> None:
    """As a GPU is called: rows of very different size, channels too, and a number of rows that divides by nothing."""
    torch.manual_seed(0)
    sizes = torch.logspace(-2, 2, 9, device=DEVICE)[:, None]
    x, bias = torch.randn(9, 64, device=DEVICE) * sizes, torch.randn(32, device=DEVICE).to(dtype)
    weight = fp8.quantize_weight((torch.randn(32, 64, device=DEVICE) * sizes.repeat(4, 1)[:32]).to(dtype))
    data, scales = reference(x, x_scale=torch.tensor(0.02, device=DEVICE))
    for added in (None, bias):
        got = fp8.library_product(data, scales, weight, added)
        wanted = fp8.reference(data, scales, weight, added)
        assert got.dtype == wanted.dtype == dtype
        for ours, theirs in zip(got, wanted, strict=True):  # bfloat16, of either dtype
            assert relative(ours.float().cpu(), theirs.float().cpu()) < 2**-8


@pytest.fixture
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# ----------------------------------------------------------------------------- calibration


class Layers(torch.nn.Module):
    """Modules named as a model's, with what a model says of its components."""

    components, float32_modules = Model.components, ()
    component_of = Model.component_of


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    model = Layers()
    model.vision = torch.nn.Sequential(Linear(32, 32), Linear(32, 16))
    model.language = torch.nn.ModuleList([Linear(32, 32), Linear(32, 16), Linear(16, 16), Linear(24, 8)])
    return model.requires_grad_(False)


def test_calibration_takes_the_largest_input_of_all_observations(cache) -> None:
    model = two_layers()
    layers = calibration.linears(model, ("language",))
    assert list(layers) == ["language.0", "language.1", "language.2"]  # 24 inputs do not fit
    inputs = [torch.randn(3, 32) * size for size in (1, 5, 2)]
    first, second, unused, odd = model.language
    made = calibration.calibrate(layers, [lambda x=x: second(first(x)) for x in inputs], PRINT, "noise")
    assert made.observations == 3
    assert made.amax["language.0"] == float(max(x.abs().max() for x in inputs))
    assert made.amax["language.1"] == float(max(first(x).abs().max() for x in inputs))
    assert "language.2" not in made.scales
    assert made.scales["language.0"] == pytest.approx(made.amax["language.0"] * calibration.HEADROOM / 448)
    assert not first._forward_pre_hooks
    assert calibration.store(made).is_relative_to(cache)
    assert calibration.load(PRINT) == made
    assert calibration.use_fp8(model, layers, made.scales) == {"language.2": unused}
    assert float(model.language[0].x_scale) == pytest.approx(made.scales["language.0"])
    assert (model.language[2], model.language[3]) == (unused, odd)


def test_headroom_saturates_late_and_costs_nothing() -> None:
    linear, x = Linear(64, 16), torch.randn(20, 64)
    wanted = linear(x)
    tight = float(x.abs().max()) / 448
    errors = {
        name: relative(
            fp8.Fp8Linear.of(linear, scale)(x * size).detach(),
            (wanted * size - linear.bias * (size - 1)).detach(),
        )
        for name, scale, size in (
            ("seen", tight, 1),
            ("room", 2 * tight, 1),
            ("twice", 2 * tight, 2),
            ("cut", tight, 2),
        )
    }
    assert errors["room"] < 1.05 * errors["seen"]
    assert errors["twice"] < 0.05 < errors["cut"]


def test_calibration_says_what_is_wrong(cache) -> None:
    model = two_layers()
    layers = calibration.linears(model, ("language",))
    with pytest.raises(SinewError, match="expected runs of 3 layers, but none ran in 1 observations"):
        calibration.calibrate(layers, [lambda: None], PRINT, "nothing")
    with pytest.raises(SinewError, match=r"expected finite inputs of language\.0, got nan"):
        calibration.calibrate(
            layers, [lambda: model.language[0](torch.full((1, 32), float("nan")))], PRINT, "nan"
        )
    with pytest.raises(SinewError, match=r"fp8: expected language or language\.mlp, got visoin"):
        calibration.linears(model, ("visoin",))
    with pytest.raises(SinewError, match="fp8: vision: FP8 is for the language model only: an H200 took"):
        calibration.linears(model, ("language", "vision"))
    foreign = calibration.Fp8Calibration(PRINT, {"vision.7": 1.0}, 1, "another model")
    with pytest.raises(SinewError, match=r"this model has no layer vision\.7"):
        calibration.use_fp8(model, layers, foreign.scales)
    with pytest.raises(SinewError, match=r"fp8: none of 3 layers has a scale.*sinew quantize"):
        calibration.use_fp8(model, layers, {"vision.0": 1.0})
    for bad in ("../../etc", "", "XYZ"):
        with pytest.raises(SinewError, match="expected a hexadecimal fingerprint"):
            calibration.load(bad)
    assert calibration.load(PRINT) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: "{", "expected JSON"),
        (lambda d: "[1]", "expected an object, got list"),
        (lambda d: d | {"version": 2}, "version: expected 1, got 2"),
        (lambda d: d | {"fingerprint": "f" * 64}, "fingerprint: expected 0123"),
        (lambda d: d | {"amax": {}}, "amax: expected values by layer"),
        (
            lambda d: d | {"amax": {"vision.0": -1.0}},
            r"amax\.vision\.0: expected a finite number of at least 0",
        ),
        (lambda d: d | {"amax": {"vision.0": float("inf")}}, "expected finite numbers, got inf"),
        (lambda d: d | {"amax": {"vision.0": "1"}}, r"amax\.vision\.0: expected a finite number"),
        (lambda d: d | {"observations": 0}, "observations: expected 1 or more"),
        (lambda d: d | {"source": None}, "source: expected text"),
    ],
)
def test_damaged_and_foreign_files_are_refused(cache, change, words: str) -> None:
    path = calibration.store(calibration.Fp8Calibration(PRINT, {"vision.0": 1.0}, 4, "frames"))
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(SinewError, match=words) as caught:
        calibration.load(PRINT)
    assert str(path) in str(caught.value)


# ----------------------------------------------------------------------------- what it costs a chunk


@pytest.fixture(scope="module", params=BOUNDS)
def case(request, golden, smolvla_bundle, pi_bundle):
    """(name, policy in float32, its inputs, noise, its chunk)."""
    name = request.param
    policy = load(
        (pi_bundle if name.startswith("pi") else smolvla_bundle)(name), device="cpu", engine="eager"
    )
    g = Golden(golden / name)
    inputs = policy.processor.inputs(replace(policy.dummy_observation(), **g.observation()))
    noise = g.numpy("noise")[0]
    return name, policy, inputs, noise, run_one(policy.engine, inputs, noise, 10)[0]


def engine_in_fp8(policy, inputs, noise, planned: bool = False) -> EagerEngine:
    model = policy.engine.model
    engine = PlannedEngine(Plan.of(model, 10), CPU) if planned else EagerEngine(clone_model(model), CPU)
    layers = calibration.linears(engine.model, ("language",))
    runs = [lambda: run_one(engine, inputs, noise, 10)]
    scales = calibration.calibrate(layers, runs, PRINT, "the fixture").scales
    calibration.use_fp8(engine.model, layers, scales)
    return engine


@pytest.mark.parametrize("planned", [False, True], ids=["eager", "plan"])
def test_a_chunk_with_the_language_model_in_fp8(case, planned: bool) -> None:
    name, policy, inputs, noise, wanted = case
    engine = engine_in_fp8(policy, inputs, noise, planned)
    error = relative(run_one(engine, inputs, noise, 10)[0], wanted)
    assert 1e-4 < error < BOUNDS[name]  # not at all would mean that nothing was converted


def test_a_wrong_scale_of_one_channel_is_seen(case, monkeypatch: pytest.MonkeyPatch) -> None:
    name, policy, inputs, noise, wanted = case
    right = fp8.quantize_weight

    def wrong(weight: torch.Tensor) -> fp8.Fp8Weight:
        made = right(weight)
        made.scale[0] *= 4
        return made

    monkeypatch.setattr(fp8, "quantize_weight", wrong)
    engine = engine_in_fp8(policy, inputs, noise)
    assert relative(run_one(engine, inputs, noise, 10)[0], wanted) > BOUNDS[name]

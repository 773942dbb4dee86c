"""The CUDA engine as its callers meet it, on a CPU: stages, cancelling, memory, FP8, and what it refuses."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from sinew.bundle.schema import Normalization
from sinew.core import CancelledError, SinewError
from sinew.engine.backend import BACKENDS
from sinew.engine.cuda.calibrate import calibrate
from sinew.engine.cuda.device import require
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fp8.linear import Fp8Linear
from sinew.engine.cuda.fused.fuse import LEFT_OUT, ON_CUDA
from sinew.engine.cuda.fused.layers import FusedAdaptiveLayer, FusedKeyValueLayer, FusedLayer
from sinew.engine.cuda.fused.ops import References
from sinew.engine.cuda.open import cuda_engine
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.cuda.program import Key
from sinew.engine.cuda.units import RobotUnits
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.policy import load
from sinew.processing.normalize import Normalizer
from tests.engine.cuda.cuda_cases import (
    ASSETS,
    BOUND,
    CPU,
    ONE_PER_MODEL,
    Frozen,
    asset_case,
    golden_case,
    shaken,
)
from tests.engines import run_one
from tests.golden import relative_l2


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str, dtype: str = "float32"):
        bundle = pi_bundle if name.startswith("pi") else smolvla_bundle
        return golden_case(golden, bundle, name, dtype)

    return make


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_stages_are_the_whole_to_the_bit(open_case, name):
    case = open_case(name)
    engine = case.engine()
    whole, timing = run_one(engine, case.inputs(), case.noise, 4)
    assert len(timing.step_ms) == 1
    assert timing.vision_ms == timing.prefix_ms == 0
    apart, timing = run_one(engine, case.inputs(), case.noise, 4, apart=True)
    assert len(timing.step_ms) == 4
    assert min(timing.vision_ms, timing.prefix_ms, *timing.step_ms) > 0
    assert np.array_equal(whole, apart)


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "stages"])
def test_cancelling(open_case, apart):
    case = open_case("pi05-2cam")
    engine, cancel = case.engine(), threading.Event()
    run_one(engine, case.inputs(), case.noise, 3, cancel, apart=apart)
    steps = []
    step = engine.model.act

    def counting(*arguments):
        steps.append(1)
        cancel.set()
        return step(*arguments)

    engine.model.act = counting
    with pytest.raises(CancelledError):
        run_one(engine, case.inputs(), case.noise, 3, cancel, apart=apart)
    assert len(steps) == (1 if apart else 3)  # a whole graph is not stopped, its result is dropped
    with pytest.raises(CancelledError):
        run_one(engine, case.inputs(), case.noise, 3, cancel, apart=apart)
    assert len(steps) == (1 if apart else 3)


def test_the_plan_is_left_as_it_is(open_case):
    case = open_case("pi05-2cam")
    plan = Plan.of(case.model, 4, ON_CUDA)
    kinds = [type(module) for module in plan.model.modules()]
    table = plan.time_embeddings(4)
    engine = CudaEngine(plan, CPU, processing=case.policy.manifest.processing)
    run_one(engine, case.inputs(), case.noise, 4)
    assert [type(module) for module in plan.model.modules()] == kinds
    assert plan.time_embeddings(4) is table
    assert engine.plan.time_embeddings(4)[0].shape != table[0].shape
    mine = {id(p) for p in engine.model.parameters()}
    assert mine == {id(p) for p in plan.model.parameters()}
    assert engine.facts.weights_nbytes == sum(p.nbytes for p in plan.model.parameters())
    assert (engine.facts.recipe, engine.threads) == ({}, torch.get_num_threads())


def test_outcomes_say_what_was_fused(open_case):
    assert set(ON_CUDA) | set(LEFT_OUT) == set(REWRITES)
    case = open_case("pi0-2cam")
    outcomes = {o.name: o for o in case.engine().plan.outcomes}
    assert outcomes["constant-kv"].status == "off"
    assert outcomes["fuse DecoderLayer"].where == ("language.layers.0,1", "expert.layers.0-2")
    assert outcomes["fuse AdaptiveDecoderLayer"].status == "not applicable"
    bare = CudaEngine(Plan.of(case.model, rewrites=()), CPU, processing=case.policy.manifest.processing)
    outcomes = {o.name: o for o in bare.plan.outcomes}
    assert outcomes["fuse DecoderLayer"].status == "not applicable"
    assert "not packed" in outcomes["fuse DecoderLayer"].reason
    assert case.gap(bare) <= BOUND  # what is not fused runs all the same


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_layers_of_many_rows_compute_the_same(open_case, monkeypatch, name):
    """A library's products with passes between them, in language model and head; prefixes beyond 256 rows have them."""
    case = shaken(open_case(name))
    for layer in (FusedLayer, FusedAdaptiveLayer, FusedKeyValueLayer):
        monkeypatch.setattr(layer, "fused_rows", 0)
    monkeypatch.setattr(References, "qkv_rope", None)  # nor is there another way
    monkeypatch.setattr(References, "gated_mlp", None)
    assert case.gap(case.engine()) <= BOUND


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_the_language_model_in_fp8(open_case, name):
    """Emulated by the reference. The fixtures' weights are random, so errors do not average out as trained ones do."""
    case = open_case(name, "bfloat16")
    exact = torch.from_numpy(open_case(name).eager())
    engine = case.engine(fp8=("language",))
    assert engine.facts.recipe == {"language": "fp8"}
    got, _ = run_one(engine, case.inputs(), case.noise, 10)
    error = relative_l2(torch.from_numpy(got), exact)
    plain, _ = run_one(case.engine(), case.inputs(), case.noise, 10)
    assert relative_l2(torch.from_numpy(plain), exact) < error < 0.2
    assert engine.facts.weights_nbytes < case.engine().facts.weights_nbytes
    outcome = next(o for o in engine.plan.outcomes if o.name == "fp8")
    assert all(where.startswith("language") for where in outcome.where)


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_only_the_mlps_of_the_language_model_in_fp8(open_case, name):
    """Its attention keeps its bits, and the chunk is nearer to the exact one than with the whole language model in
    FP8."""
    case = open_case(name, "bfloat16")
    exact = torch.from_numpy(open_case(name).eager())
    engine = case.engine(fp8=("language.mlp",))
    narrow = {part for part, module in engine.model.named_modules() if isinstance(module, Fp8Linear)}
    layers = range(len(case.model.language.layers) - 1)  # the last one only computes keys and values
    assert narrow == {f"language.layers.{n}.mlp.{end}_proj" for n in layers for end in ("gate_up", "down")}
    assert engine.facts.recipe == {"language.mlp": "fp8"}
    errors = []
    for fp8 in ((), ("language.mlp",), ("language",)):
        got, _ = run_one(case.engine(fp8=fp8), case.inputs(), case.noise, 10)
        errors.append(relative_l2(torch.from_numpy(got), exact))
    assert errors[0] < errors[1] < 1.1 * errors[2] < 0.2


def test_a_bundle_runs_in_fp8_once_it_is_calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case, options = asset_case("pen"), CudaOptions(fp8=("language",))
    bundle = case.policy.bundle
    with pytest.raises(SinewError, match="pen.gguf: not calibrated for FP8; .*--recipe language=fp8"):
        cuda_engine(bundle, CPU, "bf16", options)
    made, path = calibrate(bundle, case.model, [(case.inputs(pixels=True), case.noise)], "grey frames")
    assert path.is_relative_to(tmp_path)
    assert made.observations == 1
    engine = cuda_engine(bundle, CPU, "bf16", options)
    layers = {name for name, module in engine.model.named_modules() if isinstance(module, Fp8Linear)}
    assert layers == made.scales.keys()
    exact = torch.from_numpy(case.policy.processor.action_normalizer.unnormalize(case.eager()[:, :2]))
    got, _ = run_one(engine, case.inputs(), case.noise, 10)
    assert relative_l2(torch.from_numpy(got), exact) < 0.1


def test_warm_up_prepares_every_length_of_prompt():
    policy = load(ASSETS / "blocks.gguf", engine="cuda", device="cpu")
    policy.warm_up()
    sizes = tuple((camera.height, camera.width) for camera in policy.spec.cameras)
    longest, kept = policy.spec.max_prompt_tokens, policy.engine.programs.keys()
    assert {key.tokens for key in kept} == set(policy.engine.options.buckets(longest))
    assert {(key.sizes, key.steps) for key in kept} == {(sizes, policy.spec.solver_steps)}
    before = len(kept)
    policy.infer(replace(policy.dummy_observation(), prompt="put the green block into the right bin"))
    assert len(policy.engine.programs) == before


def test_lengths_of_prompts():
    options = CudaOptions(prompt_buckets=(16, 32, 48))
    assert [options.bucket(n) for n in (0, 1, 16, 17, 48, 49, 97)] == [0, 16, 16, 32, 48, 96, 144]
    assert options.buckets(40) == [16, 32, 48]
    assert options.buckets(48) == [16, 32, 48]
    assert options.buckets(10) == [16]
    assert options.buckets(50) == [16, 32, 48, 96]


# ----------------------------------------------------------------------------- refusals


def test_devices_that_cannot_run_it_are_refused(monkeypatch):
    bundle = ASSETS / "pen.gguf"
    if not torch.cuda.is_available():
        with pytest.raises(SinewError, match="engine cuda on cuda:0: torch .* finds no CUDA device"):
            load(bundle, device="cuda:0", engine="cuda")
    with pytest.raises(SinewError, match="expected device cuda:N .* got mps"):
        load(bundle, device="mps", engine="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(SinewError, match="expected compute capability 8.0 or newer, got 7.5"):
        load(bundle, device="cuda:0", engine="cuda")
    with pytest.raises(SinewError, match="on cuda:3: this machine has 1 CUDA devices"):
        load(bundle, device="cuda:3", engine="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(
        SinewError, match="fp8 on cuda:0: FP8 needs compute capability 8.9, and this device has 8.0"
    ):
        require(torch.device("cuda", 0), CudaOptions(fp8=("language",)))
    monkeypatch.setattr("sinew.engine.cuda.device.triton", None)
    with pytest.raises(SinewError, match="engine cuda needs triton"):
        load(bundle, device="cuda:0", engine="cuda")


def test_options_that_cannot_be_are_refused(open_case):
    with pytest.raises(SinewError, match=r"fp8: expected language or language\.mlp, got expert"):
        CudaOptions(fp8=("expert",))
    with pytest.raises(
        SinewError, match="fp8: vision: .* an H200 took 2.25 ms .* use the recipe language=fp8"
    ):
        CudaOptions(fp8=("vision", "language"))
    with pytest.raises(SinewError, match="fp8: head: .* no measurement shows a gain"):
        CudaOptions(fp8=("head",))
    with pytest.raises(SinewError, match="prompt_buckets: expected rising lengths"):
        CudaOptions(prompt_buckets=(32, 16))
    with pytest.raises(SinewError, match="max_graphs: expected 1 or more, got 0"):
        CudaOptions(max_graphs=0)
    options = CudaOptions(prompt_buckets=(16, 48))
    assert [options.bucket(n) for n in (1, 16, 17, 48, 49, 97)] == [16, 16, 48, 48, 96, 144]


def test_bfloat16_is_the_engines_own_choice_on_a_gpu():
    assert BACKENDS["cuda"].dtype("cuda")[0] == "bf16"
    assert BACKENDS["eager"].dtype("cuda")[0] == "native"
    assert BACKENDS["cuda"].dtype("cpu")[0] == "fp32"


def test_two_times_of_the_solver_are_refused(open_case):
    engine = open_case("pi0-2cam").engine()
    model, time = engine.model, engine.plan.time_embeddings(2)[0]
    x = torch.zeros(2, *model.noise_shape)
    assert model.embed_actions(x, time).shape[:2] == x.shape[:2]
    with pytest.raises(ValueError, match="time: expected one time for all observations of a batch, got 2"):
        model.embed_actions(x, torch.cat([time, time]))


def test_eager_is_still_what_nobody_asked_to_change(open_case):
    """The engine is chosen by name alone, and the loaded model is not touched."""
    case = asset_case("pen")
    assert isinstance(case.policy.engine, EagerEngine)
    before = case.eager()
    run_one(case.engine(), case.inputs(), case.noise, 10)
    assert np.array_equal(case.eager(), before)
    assert Key.of(case.inputs().batched(), 16, 10) == Key(2, ((64, 64), (64, 64)), 16, 10)


# ----------------------------------------------------------------------------- world units

STATISTICS = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
}


@pytest.mark.parametrize("convention", ["lerobot", "openpi"])
@pytest.mark.parametrize("mode", STATISTICS)
def test_world_units_are_those_of_the_normalizer(mode, convention):
    """Every formula, with one dimension whose range is zero."""
    rng = np.random.default_rng(7)
    low = rng.uniform(-3, 3, 6).round(3)
    stats = dict(zip(STATISTICS[mode], (low, low + np.array([0.0, 0.1, 1.0, 2.0, 5.0, 40.0])), strict=False))
    recipe = Normalization(mode, {name: tuple(v) for name, v in stats.items()}, 1e-6, convention)
    normalizer = Normalizer(recipe, 6, "action")
    units = RobotUnits(normalizer, CPU)
    x = torch.from_numpy(rng.standard_normal((9, 8)).astype(np.float32))
    out = torch.full((9, 6), torch.nan, dtype=units.dtype)
    units.write(x, out)
    wanted = normalizer.unnormalize(x[:, :6].numpy())
    assert out.numpy().dtype == wanted.dtype
    ulp = np.finfo(wanted.dtype).eps
    assert np.abs(out.numpy() - wanted).max() <= 4 * ulp * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_a_loaded_policy_leaves_the_engine_in_world_units(open_case, name):
    """Once: on the device, and not again by the processor."""
    case = open_case(name)
    policy = load(case.policy.bundle.path, engine="cuda", device="cpu")
    normalizer, engine = policy.processor.action_normalizer, policy.engine
    assert engine.facts.world_units
    inputs = policy.processor.inputs(case.observation, pixels=False)
    got, _ = run_one(engine, inputs, case.noise, 4)
    wanted = normalizer.unnormalize(case.eager(steps=4)[:, : normalizer.dim])
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert np.abs(got - wanted).max() <= BOUND * np.abs(wanted).max()
    assert (
        np.abs(wanted - case.eager(steps=4)[:, : normalizer.dim]).max() > 1e-2
    )  # the statistics do something
    assert np.array_equal(got, run_one(engine, inputs, case.noise, 4, apart=True)[0])
    model_units, _ = run_one(case.engine(), inputs, case.noise, 4)
    assert model_units.shape == case.noise.shape


def test_world_units_are_recorded_with_the_chunk(open_case):
    """A graph that replays has to un-normalise what it just computed."""
    case, recorder = open_case("pi05-2cam"), Frozen()
    manifest = case.policy.manifest
    actions = Normalizer(manifest.processing.action, manifest.spec.action.dim, "action")
    plan = Plan.of(case.model, rewrites=ON_CUDA)
    engine = CudaEngine(plan, CPU, processing=manifest.processing, actions=actions, recorder=recorder)
    for seed in range(3):
        noise = np.random.default_rng(seed).standard_normal(case.noise.shape).astype(np.float32)
        got, _ = run_one(engine, case.inputs(), noise, 2)
        wanted = actions.unnormalize(
            run_one(case.policy.engine, case.inputs(pixels=True), noise, 2)[0][:, : actions.dim]
        )
        assert np.abs(got - wanted).max() <= BOUND * np.abs(wanted).max()
    assert recorder.log.count("record chunk") == 1

"""Models unlike those that exist, on every engine: what a new family may rely on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinew_perf.rewrites import savings
from sinew_perf.trace import STAGES, trace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sinew
from sinew.bundle import Bundle
from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.core import BundleError, ObservationError, SinewError
from sinew.engine.clone import on_meta
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.example import Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.families.published import published
from sinew.families.smolvla.model import SmolVLA
from sinew.models import build_on_meta
from sinew.models.base import AutoregressiveModel, Model
from sinew.models.solvers import Step
from sinew.processing import ModelInputs
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.jpeg import Jpeg
from sinew.steps.image.letterbox import Letterbox
from tests.closeness import Rounding, assert_close
from tests.engine.cuda.cuda_cases import Frozen
from tests.engine.stand_ins import (
    KINDS,
    SIDE,
    Config,
    Convolutions,
    EveryField,
    Ternary,
    TernaryLinear,
    TwoTowers,
    make,
)
from tests.engines import eager_rounding, run_one

CPU = torch.device("cpu")
VIEWS, TOKENS, STEPS = 2, 5, 3
SHAPES = Shapes(VIEWS, SIDE, SIDE, TOKENS, STEPS)


@pytest.fixture(params=KINDS)
def model(request) -> Model:
    return make(request.param)


def steps_of(model: Model) -> int:
    return model.solver.fixed_steps or STEPS


def observation(model: Model, tokens: int = TOKENS, views: int = VIEWS) -> tuple[ModelInputs, np.ndarray]:
    rng = np.random.default_rng(tokens)
    inputs = ModelInputs(
        rng.standard_normal((views, model.channels, SIDE, SIDE), np.float32),
        np.ones(views, bool),
        rng.integers(1, vocabulary(model), tokens),
        np.ones(tokens, bool),
        rng.standard_normal(model.state_size, np.float32),
    )
    noise = rng.standard_normal(model.noise_shape, np.float32)
    return inputs, np.zeros_like(noise) if model.solver.noise == "zeros" else noise


def vocabulary(model: Model) -> int:
    return getattr(model.config, "vocab_size", 2)


def chunk(engine, inputs: ModelInputs, noise: np.ndarray, apart: bool = False) -> np.ndarray:
    steps = steps_of(engine if engine.model is None else engine.model)
    actions, timing = run_one(engine, inputs, noise, steps, apart=apart)
    assert timing.step_ms
    return actions


EAGER: dict[tuple[Any, ...], Rounding] = {}


def eager_chunk(model: Model, inputs: ModelInputs, noise: np.ndarray) -> Rounding:
    """Return what eager gives, and what rounding does to it, once for each model that :func:`make` makes."""
    given = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state, noise)
    key = (type(model), model.config, *(array.tobytes() for array in given))
    if key not in EAGER:
        EAGER[key] = eager_rounding(model, inputs, noise, steps_of(model))
    found = EAGER[key]
    assert np.ptp(found.found.numpy()) > 0.1
    return found


RECIPE = ImageRecipe(SIDE, SIDE, (Letterbox(SIDE, SIDE),))


def processing(model: Model) -> Processing:
    same = Normalization("identity")
    prompt = PromptRecipe(32, vocabulary(model), 0, padding_side="left")
    return Processing(RECIPE, prompt, same, same, model.state_size, model.noise_shape[1])


# ----------------------------------------------------------------------------- eager


def test_eager_runs_the_contract(model):
    """The four calls by hand, with the solver written out."""
    inputs, noise = observation(model)
    with torch.no_grad():
        arrays = (inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
        context = model.read(
            model.embed_images(torch.from_numpy(inputs.pixels)[None]),
            *(torch.from_numpy(array)[None] for array in arrays),
        )
        x = torch.from_numpy(noise)[None]
        if isinstance(model, AutoregressiveModel):
            spoken, said = model.first(context), []
            for _ in range(model.action_tokens.most):
                said.append(int(spoken.token))
                spoken = model.next(spoken, context)
            x = torch.from_numpy(model.action_tokens.chunk(np.array(said)))[None]
        elif model.solver.kind == "single":
            x = model.act(x, model.embed_time(torch.zeros(1)), context)
        elif model.solver.kind == "table":
            for time in (60, 30, 0):
                x = model.act(x, model.embed_time(torch.tensor([time], dtype=torch.float64)), context)
        else:
            for k in range(STEPS):
                time_embedding = model.embed_time(torch.tensor([k / STEPS], dtype=torch.float64))
                x = x + 1 / STEPS * model.act(x, time_embedding, context)
    engine = EagerEngine(model, CPU)
    assert np.array_equal(chunk(engine, inputs, noise), x[0].numpy())
    twice = ModelInputs(*(np.stack([array] * 2) for array in (inputs.pixels, *arrays)))
    both = engine.run(twice, np.stack([noise] * 2), steps_of(model))  # under one time embedding for all
    expected = eager_chunk(model, inputs, noise)
    for each in both:
        assert_close(expected, each)


def test_a_view_that_weights_fix_may_not_be_missing(smolvla_bundle, monkeypatch):
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    monkeypatch.setattr(SmolVLA, "views", property(lambda self: 3))
    with pytest.raises(
        BundleError, match="expected true and 3 views, as the weights require, got 2, of which"
    ):
        load_model(bundle, CPU, "fp32")


def test_layers_of_torch_compute_in_float32_alone(monkeypatch):
    """Theirs do not widen what is stored in half precision, and torch's own message names no layer."""
    monkeypatch.setattr("sinew.families.act.model.Linear", nn.Linear)
    bundle = Bundle(Path(sinew.__file__).parent / "assets" / "act.gguf")
    assert load_model(bundle, CPU, "fp32").state_proj.weight.dtype == torch.float32
    with pytest.raises(
        BundleError, match="expected fp32, got bf16: layer connector of ACT is a plain torch.nn.Linear"
    ):
        load_model(bundle, CPU, "bf16")


def test_a_model_that_computes_when_it_is_made_is_named(monkeypatch):
    class Early(TwoTowers):
        def __init__(self, config: Config):
            super().__init__(config)
            self.first = self.proprio.weight.detach().sum().item()

    monkeypatch.setattr("sinew.models.model_class", lambda name: Early)
    with pytest.raises(SinewError, match='^the constructor of Early reads the values .* device="cpu"'):
        build_on_meta("early", Config())


@pytest.mark.parametrize("preset", ["smolvla", "openvla-oft"])
def test_a_model_without_memory_is_not_filled(preset: str):
    """Random numbers for weights that are assigned were a sixth of the time that opening a small policy takes."""
    found = published(preset)
    ran: Counter[str] = Counter()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Watching():
        model = build_on_meta(found.architecture, found.config)
    patch_embeddings = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert ran["empty"] > 100
    assert ran["uniform_"] <= 2 * patch_embeddings <= 4
    assert not ran["normal_"]


@pytest.mark.slow  # an export
def test_a_stage_that_cannot_be_recorded_is_named(tmp_path: Path):
    """A time embedding of one row beside a batch, which only eager alone would take."""
    pytest.importorskip("onnxscript")
    from sinew.engine.onnx.export import ON_ONNX, export_graphs

    class Stacked(Convolutions):
        def act(self, x, time_embedding, context):
            return torch.cat([x, time_embedding[:, None, : x.shape[2]]], dim=1)[:, : x.shape[1]]

    plan = Plan.of(Stacked(Convolutions.config_type()).eval(), STEPS, ON_ONNX)
    with pytest.raises(
        SinewError, match=r"engine onnx: stage step: expected .*adding-a-model.md\), got Sizes"
    ):
        export_graphs(plan, tmp_path, architecture="x", views=2, height=SIDE, width=SIDE, steps=(STEPS,))


def test_guidance_sees_the_head_at_every_step():
    """A guided step may differentiate the head: here it asks for the product of its Jacobian with ones."""
    model, seen = make("hidden states"), []
    inputs, noise = observation(model)

    def guidance(act, x, step: Step):
        output, pullback = torch.func.vjp(act, x)
        (product,) = pullback(torch.ones_like(output))
        assert product.shape == x.shape
        assert bool(product.abs().sum() > 0)
        assert torch.equal(model.solver.denoised(x, output, step.time), x + (1 - step.time) * output)
        seen.append(step.time)
        return output

    engine = EagerEngine(model, CPU)
    guided, _ = run_one(engine, inputs, noise, STEPS, guidance=guidance)
    assert seen == [0, 1 / 3, 2 / 3]
    assert_close(eager_chunk(model, inputs, noise), guided)
    still, _ = run_one(engine, inputs, noise, STEPS, guidance=lambda act, x, step: torch.zeros_like(x))
    assert np.array_equal(still, noise)


# ----------------------------------------------------------------------------- plan, costs


def test_every_rewrite(model):
    inputs, noise = observation(model)
    wanted = eager_chunk(model, inputs, noise)
    for rewrites in ([], *([one] for one in REWRITES), list(REWRITES)):
        plan = Plan.of(model, steps_of(model), rewrites)
        assert_close(wanted, chunk(PlannedEngine(plan, CPU), inputs, noise), str(rewrites))
    if type(model) is Convolutions:
        why = {outcome.name: outcome.reason for outcome in plan.outcomes if outcome.status != "applied"}
        assert plan.applied == ("tabulate-time",)
        assert why["pack-qkv"] == "no attention with separate projections of one input"
        assert why["fold-norms"] == "no block declares which linear layers read its norm"
        return
    assert {"fold-norms", "pack-qkv", "hoist-positions"} <= set(
        plan.applied
    )  # blocks are known, families are not
    ternary = [name for name, module in model.named_modules() if type(module) is TernaryLinear]
    assert {type(plan.model.get_submodule(name)) for name in ternary} <= {TernaryLinear}


def test_costs_and_trace(model):
    whole, saved = savings(model, Plan.of(model).applied, Shapes(VIEWS, SIDE, SIDE, TOKENS, steps_of(model)))
    assert whole.flops > 0
    assert saved
    empty, shapes = on_meta(model), Shapes(VIEWS, SIDE, SIDE, TOKENS, steps_of(model))
    for plan in (None, Plan.of(empty)):
        found = trace(empty, shapes, plan)
        computing = ("vision", "head") if type(model) is Convolutions else STAGES
        assert all(found.flops(stage) > 0 for stage in computing)
        assert found.cache_nbytes > 0


# ----------------------------------------------------------------------------- ONNX Runtime


@pytest.mark.slow  # an export each; families are exported by tests of their own
def test_onnx_runtime(model, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from sinew.engine.onnx.engine import OnnxEngine
    from sinew.engine.onnx.export import ON_ONNX, export_graphs

    steps = steps_of(model)
    plan = Plan.of(model, steps, ON_ONNX)
    sizes = {"views": VIEWS, "height": SIDE, "width": SIDE, "steps": (steps,)}
    graphs = export_graphs(plan, tmp_path, architecture="stand-in", **sizes)
    assert len(set(graphs.reads)) == len(graphs.reads)
    engine = OnnxEngine(tmp_path, threads=1, solver=model.solver)
    for tokens in (TOKENS, 2, 11):
        inputs, noise = observation(model, tokens)
        got, _ = run_one(engine, inputs, noise, steps)
        assert_close(eager_chunk(model, inputs, noise), got, f"{tokens} tokens")
    with pytest.raises(ObservationError, match="solver_steps"):
        run_one(engine, inputs, noise, steps + 1)


# ----------------------------------------------------------------------------- CUDA, by the references


@pytest.mark.parametrize("rewrites", [ON_CUDA, ()], ids=["rewritten", "as loaded"])
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "stages"])
@pytest.mark.parametrize("recorder", [None, Frozen], ids=["calls", "frozen"])
def test_cuda(model, rewrites, apart, recorder):
    engine = CudaEngine(
        Plan.of(model, rewrites=rewrites),
        CPU,
        processing=processing(model),
        recorder=recorder and recorder(),
    )
    assert not hasattr(model, "connect")
    assert not engine.facts.takes_frames  # image tokens do not follow from one tower's features alone
    for tokens in (TOKENS, 20):  # both are padded, to 16 and to 32
        inputs, noise = observation(model, tokens)
        found = chunk(engine, inputs, noise, apart)
        assert_close(eager_chunk(model, inputs, noise), found, f"{tokens} tokens")


def test_padding_on_the_wrong_side_is_seen(model):
    """The two towers' first action is read at the last token of the prompt: padding behind it would change it."""
    inputs, noise = observation(model)
    recipe = processing(model)
    wrong = replace(recipe, prompt=replace(recipe.prompt, padding_side="right"))
    engine = CudaEngine(Plan.of(model, rewrites=ON_CUDA), CPU, processing=wrong)
    refused = eager_chunk(model, inputs, noise).refusal(chunk(engine, inputs, noise))
    assert bool(refused) == (model.solver.kind == "single")


def test_recipes_that_the_device_does_not_know_stay_on_the_host():
    assert not ResizeTables.why_not(RECIPE)
    assert not ResizeTables.why_not(replace(RECIPE, steps=()))
    for other, why in (
        (replace(RECIPE, steps=(Jpeg(),)), "JPEG 95: Sinew computes its library's order of sums"),
        (replace(RECIPE, steps=(Jpeg(), *RECIPE.steps)), "2 steps"),
        (replace(RECIPE, mean=(0.5,) * 6, std=(0.5,) * 6), "2 normalisations"),
        (replace(RECIPE, sizes=((SIDE, SIDE), (8, 8))), "a size of each camera"),
    ):
        assert why in ResizeTables.why_not(other)
        with pytest.raises(ValueError, match=f"{why}.*resize on the host"):
            ResizeTables.of(SIDE, SIDE, other)


def test_what_is_fused_is_said(model):
    plan = Plan.of(model, rewrites=ON_CUDA)
    engine = CudaEngine(plan, CPU, processing=processing(model))
    said = {outcome.name: outcome for outcome in engine.plan.outcomes[len(plan.outcomes) :]}
    if type(model) is Convolutions:
        assert {outcome.status for outcome in said.values()} == {"not applicable"}
        return
    plain = type(model) is not EveryField
    assert said["fuse ViTLayer"].status == ("applied" if plain else "not applicable")
    assert said["fuse action projections"].status == "not applicable"
    known = said["fuse DecoderLayer"]
    assert known.status == ("applied" if plain and type(model) is not Ternary else "not applicable")
    if not plain:
        assert "norms of heads" in known.reason
        return
    refused = {outcome.name for outcome in plan.outcomes if "TernaryLinear is not linear" in outcome.reason}
    assert refused == ({"fold-norms", "pack-qkv", "pack-gate-up"} if known.status != "applied" else set())


def test_fp8_of_a_component_that_has_nothing_for_it_is_an_error():
    model = make("ternary")
    model.components = {**model.components, "proprio": "vision"}
    plan = Plan.of(model, rewrites=ON_CUDA)
    words = "fp8: language: this model has no linear layers .*; remove language from the recipe"
    with pytest.raises(SinewError, match=words):
        CudaEngine(plan, CPU, processing=processing(model), options=CudaOptions(fp8=("language",)))

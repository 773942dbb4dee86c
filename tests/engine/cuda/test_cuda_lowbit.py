"""Low-bit weights of the CUDA engine: which components keep them, that they stay in 8 or 4 bits in memory, and that the
actions are those of the same weights in eager. The kernels themselves are in test_kernels.py. Nothing ran on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sinew.bundle import Bundle, write_bundle
from sinew.bundle.quant import FORMATS, SCALE, WEIGHT
from sinew.bundle.schema import COMPONENTS, Quantization
from sinew.core import SinewError
from sinew.core.fields import from_builtins
from sinew.core.registry import model_class
from sinew.engine.backend import choose
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.fused.layers import FusedAdaptiveLayer, FusedLayer
from sinew.engine.cuda.fused.vision import RowwiseViTLayer
from sinew.engine.cuda.kernels import tiles, weight_only_linear
from sinew.engine.cuda.lowbit import choice
from sinew.engine.cuda.lowbit.choice import choose_lowbit
from sinew.engine.cuda.lowbit.weights import WeightOnly, keep_codes, split
from sinew.engine.cuda.open import cuda_engine
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.example import Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Conv1d, Embedding, Linear
from sinew.layers.stores.codes import Codes
from sinew.layers.stores.lowbit import dequantize
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.models import on_meta
from sinew.policy import load
from tests.cases import golden_cases
from tests.covering import some
from tests.engine.cpu.test_cpu_engine import RECIPES, stored
from tests.engine.cuda.cuda_cases import BOUND, CPU, ONE_PER_MODEL
from tests.engines import run_one
from tests.golden import Golden, relative_l2
from tests.models.stages import CASES, observation

GPU = torch.device("cuda", 0)
KINDS = ("int8", "q8_0", "q4_0")


@pytest.fixture
def small(smolvla_bundle, pi_bundle, tmp_path):
    """``small("pi0-2cam", "q4_0")``: the fixture's bundle with all components in this format."""

    def make(name: str, kind: str) -> Path:
        path = (pi_bundle if name.startswith("pi") else smolvla_bundle)(name)
        return stored(path, RECIPES[kind], tmp_path / f"{name}-{kind}.gguf")

    return make


@pytest.fixture
def capability(monkeypatch):
    def pretend(number: int) -> None:
        monkeypatch.setattr(tiles, "capability", lambda device: number)

    return pretend


def linears(model: nn.Module, component: str) -> dict[str, Linear]:
    """The linear layers of a component's blocks; the families keep the projections beside them in float32."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is Linear and model.component_of(name) == component and ".layers." in name
    }


# ----------------------------------------------------------------------------- the same actions


@pytest.mark.parametrize("kind", ["int8", "q4_0"])
def test_low_bit_convolutions_become_floats_and_say_so(case_bundle, tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr(choice, "BALANCE", {80: 1000})
    path = stored(case_bundle("diffusion-ddim"), RECIPES[kind], tmp_path / "small.gguf")
    seen = observation("diffusion-ddim", Golden(golden_cases() / "diffusion-ddim"))
    wanted = load(path, "cpu", "float32", "eager").infer(seen).actions
    policy = load(path, "cpu", engine="cuda")
    assert "convolutions become floats" in caplog.text
    convolutions = [module for module in policy.engine.model.modules() if isinstance(module, Conv1d)]
    assert len(convolutions) > 10
    assert not any(module.store.coded for module in convolutions)
    assert np.abs(policy.infer(seen).actions - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in ONE_PER_MODEL for kind in ("int8", "q4_0")]
)
def test_the_actions_are_those_of_eager_with_the_same_weights(small, golden, monkeypatch, name, kind):
    monkeypatch.setattr(choice, "BALANCE", {80: 1000})
    path = small(name, kind)
    eager = load(path, "cpu", "float32", "eager")
    policy = load(path, "cpu", engine="cuda")
    seen = Golden(golden / name).observation()
    wanted, found = eager.infer(seen).actions, policy.infer(seen).actions
    assert np.abs(found - wanted).max() <= BOUND * np.abs(wanted).max()
    assert policy.facts.recipe.keys() == {*COMPONENTS}
    assert all(kind in kinds.split("+") for kinds in policy.facts.recipe.values())
    # The weights stay in few bits: layers of the engine, and bytes of its parameters.
    model, file = policy.engine.model, policy.bundle
    for component in COMPONENTS:
        layers = linears(model, component)
        assert len(layers) >= 4
        for where, layer in layers.items():
            assert isinstance(layer.store, WeightOnly), where
            assert layer.weight.dtype == (torch.uint8 if layer.store.name == "q4_0" else torch.int8), where
    whole = {type(module) for module in model.modules()}
    for kind_of in (FusedAdaptiveLayer if name == "pi05-2cam" else FusedLayer, RowwiseViTLayer):
        assert any(issubclass(each, kind_of) for each in whole), kind_of
    low = {module + part for module in file.lowbit for part in (WEIGHT, SCALE)}
    in_file = sum(info.nbytes for key, info in file.infos.items() if key in low)
    assert policy.facts.weights_nbytes - in_file < 0.4 * (eager.facts.weights_nbytes - in_file)


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi0-2cam"))
def test_half_precision_has_a_bound(small, golden, name):
    """bfloat16 activations over 4 bits: relative L2 against float32 on the same weights, in units of eager's own."""
    path = small(name, "q4_0")
    exact = load(path, "cpu", "float32", "eager")
    seen = replace(exact.dummy_observation(), **Golden(golden / name).observation())
    noise = Golden(golden / name).numpy("noise")[0]

    def chunk(engine: Any) -> torch.Tensor:
        return torch.from_numpy(run_one(engine, exact.processor.inputs(seen), noise, 10)[0])

    wanted = chunk(exact.engine)
    bundle = Bundle(path)
    half = EagerEngine(load_model(bundle, CPU, "bf16"), CPU)
    own = relative_l2(chunk(half), wanted)
    model = load_model(bundle, CPU, "bf16", lowbit=COMPONENTS)
    keep_codes(model, torch.bfloat16)
    plan = Plan.of(model, rewrites=ON_CUDA)
    engine = CudaEngine(plan, CPU, processing=bundle.manifest.processing)
    assert 1e-4 < own < 5e-2
    assert relative_l2(chunk(engine), wanted) <= 1.5 * own


@pytest.fixture
def over_codes(small):
    """An engine, and how far its chunk is from that of the model itself over the same low-bit weights, in units of the
    largest action. Norms and biases are shaken, so that losing one shows."""

    def make(name: str, kind: str = "q4_0") -> tuple[CudaEngine, Callable[[], float]]:
        path = small(name, kind)
        policy = load(path, "cpu", "float32", "eager", allow_missing_cameras=True)
        model = load_model(policy.bundle, CPU, "fp32", lowbit=COMPONENTS)
        keep_codes(model, torch.float32)
        random = torch.Generator().manual_seed(5)
        for where, parameter in model.named_parameters():
            if parameter.ndim == 1 and not where.endswith(SCALE):
                parameter.data += torch.rand(parameter.shape, generator=random) - 0.5
        given = policy.dummy_observation()
        inputs, noise = policy.processor.inputs(given, pixels=True), policy.processor.noise(given)[0]
        wanted = run_one(EagerEngine(model, CPU), inputs, noise, 2)[0]
        engine = CudaEngine(Plan.of(model, rewrites=ON_CUDA), CPU, processing=policy.manifest.processing)

        def gap() -> float:
            return float(np.abs(run_one(engine, inputs, noise, 2)[0] - wanted).max() / np.abs(wanted).max())

        return engine, gap

    return make


@pytest.mark.parametrize("kind", some(KINDS, "int8", "q4_0"))
@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_norms_before_low_bit_weights_are_computed(over_codes, name, kind):
    """Low-bit weights cannot contain the weight of the norm before them, so the kernels of the norms have to."""
    _, gap = over_codes(name, kind)
    assert gap() <= BOUND


def lose_a_norms_weight(model) -> None:
    norm = model.vision.layers[0].norm1
    norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)


def exchange_nibbles(model) -> None:
    layer = model.expert.layers[0].mlp.gate_up_proj
    layer.weight.data = layer.weight.data << 4 | layer.weight.data >> 4


def move_the_scales(model) -> None:
    layer = model.expert.layers[0].attn.qkv_proj
    layer.scale.data = layer.scale.data.roll(1, 0)


def lose_the_residual(model) -> None:
    ops = model.expert.layers[0].ops.rows
    right = ops.weight_only
    ops.weight_only = lambda *tensors, bias, onto: right(*tensors, bias=bias, onto=None)


def exchange_gate_and_up(model) -> None:
    layer = model.expert.layers[0].mlp.gate_up_proj
    for tensor in (layer.weight, layer.scale):
        tensor.data = tensor.data.roll(len(tensor) // 2, 0)


FAULTS = [lose_a_norms_weight, exchange_nibbles, move_the_scales, lose_the_residual, exchange_gate_and_up]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_piece_is_caught(over_codes, fault):
    engine, gap = over_codes("pi0-2cam")
    fault(engine.model)
    assert gap() > 10 * BOUND


# ----------------------------------------------------------------------------- the store


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_bundle(small, kind):
    bundle = Bundle(small("pi0-2cam", kind))
    module, name = next((each, kind_) for each, kind_ in bundle.lowbit.items() if kind_ == kind)
    weight = bundle.tensor(module + WEIGHT)
    scale = bundle.tensor(module + SCALE) if module + SCALE in bundle.infos else None
    k = weight.shape[1] if scale is not None else weight.shape[1] * 32 // FORMATS[name].row_bytes(32)
    codes, scales = split(weight, scale, Codes(name, k, 0 if scale is None else len(scale)))
    wanted = dequantize(weight, scale, name, k)
    assert torch.equal(weight_only_linear.widened(codes, scales), wanted)
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert codes.nbytes + scales.nbytes == weight.nbytes + (0 if scale is None else scale.nbytes)


def test_tables_of_tokens_stay_low_bit_on_the_device(small, monkeypatch):
    monkeypatch.setattr(choice, "BALANCE", {80: 1000})
    policy = load(small("pi0-2cam", "q4_0"), "cpu", engine="cuda")
    tables = [m for m in policy.engine.model.language.modules() if isinstance(m, Embedding)]
    assert [table.weight.dtype for table in tables] == [torch.uint8]


# ----------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (80, {"vision", "head"}),  # 232 rows of the language model, more than 153
        (87, {"vision", "head"}),
        (110, {"vision", "language", "head"}),
        (120, {"vision", "head"}),
        (121, {"vision", "head"}),  # not in the table: the next lower one counts
    ],
)
def test_the_balance_of_a_gpu_decides(small, capability, number, kept):
    capability(number)
    made = choose_lowbit(Bundle(small("pi05-2cam", "int8")), CPU, CudaOptions())
    assert made.kept.keys() == kept
    most = choice.balance(number)
    relation = f"at most the {most}" if "language" in kept else f"more than the {most}"
    assert (
        f"(a weight is read once for 232 rows, {relation} of compute capability {number / 10})"
        in made.notes["language"]
    )
    assert made.notes["head"].startswith("head stays int8 (a weight is read once for 50 rows, at most the")


@pytest.mark.parametrize("case", some(CASES, "openvla-ar", "groot-n17", "act-2cam"))
def test_the_rows_of_every_family_are_counted(case, case_bundle):
    """Without memory for weights. A head that runs for one token or for a chunk reads its weights for few rows."""
    manifest = Bundle(case_bundle(case)).manifest
    cls = model_class(manifest.architecture)
    model = on_meta(cls, from_builtins(manifest.config, cls.config_type, "config"))
    layers = choice.linear_layers(model)
    rows = choice.rows_of(model, Shapes.of(manifest), layers)
    for part in COMPONENTS:
        assert (rows[part] > 0) == any(model.component_of(name) == part for name in layers), part
    assert rows["head"] <= 200


def test_generated_tokens_are_single_rows(case_bundle, tmp_path):
    """The prompt is read once, and each further token reads all weights of the language model for one row."""
    bundle = Bundle(stored(case_bundle("openvla-ar"), RECIPES["int8"], tmp_path / "small.gguf"))
    made = choose_lowbit(bundle, CPU, CudaOptions())
    assert "language" in made.kept
    assert "vision" not in made.kept
    assert made.notes["language"].startswith("language stays int8 (a weight is read once for 49 rows")


def test_without_memory_for_bf16_everything_stays_low_bit(small, capability, monkeypatch):
    bundle = Bundle(small("pi05-2cam", "int8"))
    capability(87)
    for free, kept in ((8 << 30, {"vision", "head"}), (1 << 30, {*COMPONENTS})):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        made = choose_lowbit(bundle, GPU, CudaOptions())
        assert made.kept.keys() == kept
    assert (
        made.notes["language"]
        == "language stays int8 (in bf16, the weights would need 1.0 GiB, and 1.0 GiB are free)"
    )


def test_options_replace_the_rule(small, caplog):
    bundle = Bundle(small("pi05-2cam", "q4_0"))
    for options, kept in (
        (CudaOptions(lowbit=("language",)), ["language"]),
        (CudaOptions(lowbit=()), []),
        (CudaOptions(kernels=False), []),
    ):
        engine = cuda_engine(bundle, CPU, "fp32", options)
        assert [*engine.facts.recipe] == kept
        reason = "the engine's options" if options.kernels else "the engine's kernels are off"
        assert engine.facts.notes[-1] == f"head is converted to floats from q4_0 ({reason})"
        coded = [m for m in engine.model.modules() if isinstance(getattr(m, "store", None), WeightOnly)]
        assert bool(coded) == bool(kept)
        converted = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [text.split()[2] for text in converted] == [part for part in COMPONENTS if part not in kept]
        caplog.clear()
    with pytest.raises(
        SinewError, match="lowbit: expected components from vision, language, head, got heads"
    ):
        CudaOptions(lowbit=("heads",))


def test_float_bundles_have_no_choice(smolvla_bundle):
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    assert choose_lowbit(bundle, CPU, CudaOptions()) is choice.NOTHING


def with_recipe(path: Path, recipe: dict[str, str], out: Path) -> Bundle:
    bundle = Bundle(path)
    record = Quantization(recipe, 8, 0.01, 0.02, 1, "a test", "a test")
    manifest = replace(bundle.manifest, quantization=record)
    write_bundle(out, lambda: manifest, lowbit_sources(bundle, plan_formats(bundle, recipe)))
    return Bundle(out)


def test_the_engine_follows_a_recipe_of_stored_weights(smolvla_bundle, tmp_path):
    recipe = {"vision": "fp32", "language": "fp32", "head": "q4_0"}
    bundle = with_recipe(smolvla_bundle("smolvla-2cam"), recipe, tmp_path / "small.gguf")
    made = choose(bundle, "cuda", "cpu")
    assert made.recipe == {"head": "q4_0"}
    policy = load(bundle.path, "cpu", engine="cuda")
    assert policy.facts.recipe.keys() == {"head"}
    assert policy.describe()["dtype_reason"] == "the bundle's recipe"
    wide = load(bundle.path, "cpu", engine="cuda", ignore_recipe=True)
    assert wide.facts.recipe == {}
    assert wide.facts.precision["head"] == "fp32"


def test_the_audit_finds_nothing(small):
    policy = load(small("pi0-2cam", "q4_0"), "cpu", engine="cuda")
    inputs = policy.processor.inputs(policy.dummy_observation(), pixels=False)
    assert [each.breaks for each in policy.engine.audit(inputs.batched(), 2)] == [(), (), ()]

"""The cpu engine: weights in few bits from the file to the actions, against eager with the same weights widened."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from sinew_perf.memory import fits

from sinew.bundle import Bundle, TensorSource, write_bundle
from sinew.bundle.quant import FORMATS, SCALE, WEIGHT
from sinew.bundle.writer import ArraySlice
from sinew.checks.validate.observations import random_observations
from sinew.cli import main
from sinew.core import BundleError, SinewError, machine
from sinew.engine.backend import BACKENDS, EngineOptions, with_precision
from sinew.engine.clone import on_meta
from sinew.engine.cpu.kernels import layer_kernels
from sinew.engine.cpu.kernels.library import Extension, extension
from sinew.layers.linear import Conv1d, Linear
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import Bf16Panels, Codes, Panels, codes_of
from sinew.layers.stores.rows import Rows
from sinew.lowbit.sources import lowbit_sources, plan_formats, weight_errors
from sinew.memory import memory_need
from sinew.policy import load
from sinew.records.recorder import Recorder
from tests.cases import golden_cases
from tests.covering import some
from tests.engines import run_one
from tests.golden import Golden
from tests.models import stages

TABLE = "language.embed_tokens"
CASES = ["smolvla-2cam", "pi0-2cam", "pi05-2cam"]
RECIPES = {
    "int8": dict.fromkeys(("vision", "language", "head"), "int8"),
    "q8_0": dict.fromkeys(("vision", "language", "head"), "q8_0"),
    "q4_0": dict.fromkeys(("vision", "language", "head"), "q4_0"),
    "mixed": {"vision": "q4_0", "language": "int8", "head": "fp32"},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, smolvla_bundle, pi_bundle):
    """A float bundle and its fixture."""
    make = pi_bundle if request.param.startswith("pi") else smolvla_bundle
    return make(request.param), Golden(golden / request.param)


def stored(path: Path, recipe: dict[str, str], out: Path) -> Path:
    bundle = Bundle(path)
    manifest = bundle.manifest
    write_bundle(out, lambda: manifest, lowbit_sources(bundle, plan_formats(bundle, recipe)))
    return out


@pytest.mark.skipif(extension() is None, reason="needs a C++ compiler")
def test_what_has_computed_is_copied_without_its_kernels(smolvla_bundle, tmp_path):
    policy = load(
        stored(smolvla_bundle("smolvla-2cam"), RECIPES["int8"], tmp_path / "small.gguf"), engine="cpu"
    )
    policy.infer(policy.dummy_observation())
    halves = [
        half
        for module in policy.engine.model.modules()
        for half in (getattr(module, "before", None),)
        if half
    ]
    assert halves
    assert any(half._given is not None for half in halves)
    on_meta(policy.engine.model)  # what `sinew bench` counts operators by


def chunk(policy, g) -> np.ndarray:
    observation = replace(policy.dummy_observation(), **g.observation())
    return run_one(policy.engine, policy.processor.inputs(observation), g.numpy("noise")[0], 10)[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.proves(engine="cpu", precision="int8, q8_0, q4_0")
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_computes_on_what_is_stored(case, recipe, tmp_path) -> None:
    """Two errors apart: weights' (eager against eager), activations' (cpu against eager on the same weights)."""
    path, g = case
    small = stored(path, RECIPES[recipe], tmp_path / "small.gguf")
    assert small.stat().st_size < path.stat().st_size
    wide, cpu = load(small, engine="eager"), load(small, engine="cpu")
    rounded = chunk(wide, g)
    assert 1e-7 < distance(chunk(cpu, g), rounded) < 0.25
    assert distance(rounded, chunk(load(path, engine="eager"), g)) > 1e-6
    assert any(map(codes_of, cpu.engine.model.modules()))
    assert cpu.engine.model.language.embed_tokens.store.coded
    assert not any(map(codes_of, wide.engine.model.modules()))
    kept = {name: kind for name, kind in RECIPES[recipe].items() if kind != "fp32"}
    assert set(cpu.facts.recipe) == set(kept)
    for component, formats in cpu.facts.recipe.items():
        assert set(formats.split("+")) <= {kept[component], "int8"}  # int8: rows that 32 does not divide
    assert cpu.facts.weights_nbytes < wide.facts.weights_nbytes
    seen, other = (
        cpu.prepare(replace(cpu.dummy_observation(), **g.observation() | {"noise": None, "seed": seed}))
        for seed in (1, 2)
    )
    expected, nested = [cpu.run(each).actions for each in (seen, other)], list[np.ndarray]()
    outer = cpu.run(seen, between=lambda: nested.append(cpu.run(other).actions)).actions
    assert np.array_equal(outer, expected[0])  # another run between two steps changes neither
    assert len(nested) == cpu.spec.solver_steps
    assert all(np.array_equal(each, expected[1]) for each in nested)
    if extension().compiled:
        applied = {outcome.name for outcome in cpu.engine.plan.outcomes if outcome.status == "applied"}
        assert {"round once in DecoderAttention", "round once in GatedMLP"} <= applied
        if recipe != "mixed":
            assert {"two calls for DecoderLayer", "two calls for ViTLayer"} <= applied


@pytest.mark.parametrize("recipe", ["int8", "q4_0"])
def test_convolutions_over_rows_are_low_bit_too(case_bundle, recipe, tmp_path) -> None:
    """Nearly all weights of a diffusion policy are in the convolutions of its U-Net."""
    name = "diffusion-ddim"
    path, given = case_bundle(name), stages.observation(name, Golden(golden_cases() / name))
    small = stored(path, RECIPES[recipe], tmp_path / "small.gguf")
    engines = {engine: load(small, engine=engine, threads=1) for engine in ("cpu", "eager", "plan")}
    actions = {engine: policy.infer(given).actions for engine, policy in engines.items()}
    floats = load(path, engine="eager", threads=1).infer(given).actions
    assert 1e-7 < distance(actions["cpu"], actions["eager"]) < 0.25
    assert distance(actions["plan"], actions["eager"]) < 1e-5
    # Random weights of four bits change the actions of a solver with many steps by half of their size.
    assert 1e-7 < distance(actions["eager"], floats) < (0.25 if recipe == "int8" else 1.0)
    coded = {
        engine: [m for m in policy.engine.model.modules() if isinstance(m, Conv1d) and codes_of(m)]
        for engine, policy in engines.items()
    }
    assert len(coded["cpu"]) > 10
    assert not coded["eager"]
    assert not coded["plan"]
    head = sum(info.nbytes for name, info in Bundle(path).infos.items() if name.startswith("unet"))
    kept = sum(info.nbytes for name, info in Bundle(small).infos.items() if name.startswith("unet"))
    assert kept < 0.5 * head
    assert all(error < 0.2 for error in weight_errors(Bundle(path), small).values())


@pytest.mark.parametrize("recipe", ["int8", "mixed"])
def test_a_head_has_its_derivative(case, recipe, tmp_path) -> None:
    """Guided real-time chunking asks for J^T v: eager's over the same weights and context, but for what is rounded."""
    path, g = case
    small = stored(path, RECIPES[recipe], tmp_path / "small.gguf")
    policies = [load(small, engine=engine, threads=1) for engine in ("eager", "cpu")]
    pulled: list[np.ndarray] = []

    def guidance(act, x, _):
        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            output = act(at)
            pulled.append(torch.autograd.grad(output, at, torch.cos(x))[0].numpy())
        return output.detach()

    observation = replace(policies[0].dummy_observation(), **g.observation())
    context = policies[0].engine.read(policies[0].processor.inputs(observation).batched())
    for policy in policies:
        policy.engine.solve(context, g.numpy("noise"), 1, guidance)
    assert distance(*pulled) < (1e-4 if recipe == "mixed" else 0.06)


@pytest.mark.parametrize("name", some(["evo1", "groot-n15", "openvla-oft"], "openvla-oft"))
def test_views_inside_a_prompt_of_stored_rows(
    name, golden, evo1_bundle, groot_bundle, openvla_bundle, tmp_path
) -> None:
    """Image tokens take the type of the token table's rows, not that of the bytes which they are stored in."""
    make = {"evo1": evo1_bundle, "groot-n15": groot_bundle, "openvla-oft": openvla_bundle}[name]
    path = make(name)
    small = stored(path, {"vision": "fp32", "language": "int8", "head": "fp32"}, tmp_path / "small.gguf")
    wide, cpu = load(small, engine="eager"), load(small, engine="cpu")
    inputs = wide.processor.inputs(wide.dummy_observation())
    model = cpu.engine.model
    assert model.language.embed_tokens.store.coded
    given = [torch.from_numpy(getattr(inputs, key))[None] for key in ("camera_mask", "tokens", "token_mask")]
    rows = []
    with torch.inference_mode():
        for policy in (wide, cpu):
            model = policy.engine.model
            tokens = model.embed_images(torch.from_numpy(inputs.pixels)[None])
            if name == "evo1":
                rows.append(model.embed(tokens, *given)[0])
            elif name == "groot-n15":
                placed = given[1] == model.config.image_token
                rows.append(model.embed(tokens, placed, given[1])[0])
            else:
                rows.append(model.sequence(tokens, *given, behind_prompt=[model.stop(2, 1)])[0])
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)


def test_compiled_and_plain_pytorch_give_the_same_actions(case, tmp_path) -> None:
    if not extension().compiled:
        pytest.skip(extension().reason)
    path, g = case
    policy = load(stored(path, RECIPES["q4_0"], tmp_path / "small.gguf"), engine="cpu")
    compiled = chunk(policy, g)
    try:
        lowbit.install(lowbit.reference_all)
        layer_kernels.install(replace(layer_kernels.REFERENCES, norm=extension().layers.norm))
        plain = chunk(policy, g)
    finally:
        lowbit.install(extension().multiply_all)
        layer_kernels.install(extension().layers)
    np.testing.assert_array_equal(compiled, plain)


def test_weights_are_laid_out_once(case, tmp_path, monkeypatch) -> None:
    """Where kernels multiply panels, int8 lies so, out of the file's map; the actions have the same bits."""
    if not extension().integers:
        pytest.skip(f"{extension().kernels} kernels multiply no panels")
    path, g = case
    small = stored(path, RECIPES["int8"], tmp_path / "small.gguf")
    laid = load(small, engine="cpu")
    monkeypatch.setattr("sinew.engine.cpu.open.lay_out_codes", lambda *_: 0)
    plain = load(small, engine="cpu")
    np.testing.assert_array_equal(chunk(laid, g), chunk(plain, g))
    held = dict(laid.engine.model.named_modules())
    region = np.frombuffer(laid.bundle.file.map, np.uint8)
    inside = range(region.ctypes.data, region.ctypes.data + region.size)
    count = 0
    for name, module in plain.engine.model.named_modules():
        if not isinstance(codes_of(module), Codes) or not isinstance(module, Linear):
            continue
        other, rows, width = held[name], *module.weight.shape
        assert isinstance(other.store, Panels) == lowbit.lies_in_panels(rows, width)
        assert (other.weight.data_ptr() in inside) != isinstance(other.store, Panels)
        assert other.weight.nbytes == module.weight.nbytes
        assert torch.equal(other.store.widened(other), module.store.widened(module))
        count += isinstance(other.store, Panels)
    assert count > 5


@pytest.fixture
def multiplies_bf16() -> None:
    if extension().halves is None:
        pytest.skip("wants a C++ compiler and kernels for bfloat16 on this CPU")


def test_bfloat16_is_multiplied_in_panels(case, multiplies_bf16) -> None:
    """A float file's matrices under float32 activations; with the bits of the reference's products, in any threads."""
    path, g = case
    policy = load(path, engine="cpu", dtype="bf16", threads=1)
    assert policy.engine.facts.recipe == {}
    lying = {name: m for name, m in policy.engine.model.named_modules() if isinstance(m, Linear)}
    panels = [m for m in lying.values() if isinstance(m.store, Bf16Panels)]
    for name, module in lying.items():
        if module in panels:
            wide = Bundle(path).tensor(name + WEIGHT)
            assert torch.equal(module.store.widened(module), wide.bfloat16().float())
        else:  # the head's own precision, or what divides into no panels
            assert module.weight.dtype == torch.float32 or not lowbit.lies_in_panels(*module.weight.shape), (
                name
            )
    assert len(panels) > 20
    made, wanted = chunk(policy, g), chunk(load(path, engine="eager"), g)
    assert 0 < distance(made, wanted) < 0.02
    assert "bf16" in policy.describe()["precision"]["vision"]
    torch.set_num_threads(2)
    try:
        np.testing.assert_array_equal(chunk(policy, g), made)
        lowbit.install(lowbit.reference_all)
        layer_kernels.install(replace(layer_kernels.REFERENCES, norm=extension().layers.norm))
        np.testing.assert_array_equal(chunk(policy, g), made)
    finally:
        torch.set_num_threads(1)
        lowbit.install(extension().multiply_all)
        layer_kernels.install(extension().layers)


def test_memory_of_bfloat16_is_counted_before_and_after_a_load(case, multiplies_bf16) -> None:
    """`sinew prepare` and a server of several policies count it before they load anything."""
    path, _ = case
    options = {"engine": "cpu", "dtype": "bf16", "device": "cpu", "providers": (), "ignore_recipe": False}
    weights, computed = memory_need(str(path), options, 1, 1)
    loaded = load(path, engine="cpu", dtype="bf16", threads=1).facts.weights_nbytes
    wide, _ = memory_need(str(path), options | {"engine": "eager", "dtype": "fp32"}, 1, 1)
    # In these small models, many matrices do not divide into panels and are loaded as float32.
    assert weights <= loaded < wide
    assert computed > 0


def test_bfloat16_is_refused_where_nothing_multiplies_it(smolvla_bundle, monkeypatch) -> None:
    path = smolvla_bundle("smolvla-2cam")
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512f", "amx_bf16"}))
    with pytest.raises(
        SinewError, match="AVX512_BF16 or, on ARM, ASIMDDP only, which this CPU does not have"
    ):
        load(path, engine="cpu", dtype="bf16")
    monkeypatch.setattr("sinew.engine.cpu.open.extension", lambda: Extension("reference", "no compiler"))
    for flag in (
        "avx512_bf16",
        "asimddp",
    ):  # "asimddp" is a flag of an Orin, which has no bfloat16 instructions
        monkeypatch.setattr(machine, "cpu_flags", lambda flag=flag: frozenset({"asimd", flag}))
        with pytest.raises(
            SinewError, match=r"expected compiled products of bf16, got reference .*no compiler"
        ):
            load(path, engine="cpu", dtype="bf16")


def test_bfloat16_without_its_instructions_stays_bfloat16_in_engine_cpu_only(
    smolvla_bundle, monkeypatch
) -> None:
    """On Jetson Orin, the compiled kernels multiply it, and PyTorch converts each weight to float32."""
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"asimd", "asimddp"}))
    for engine, storage in (("cpu", ""), ("plan", "bf16")):
        options, reason = with_precision(BACKENDS[engine], bundle, EngineOptions(), "bf16")
        assert (options.dtype, options.storage) == ("bf16", storage)
        assert ("this CPU has no bf16 products" in reason) == bool(storage)
        assert BACKENDS[engine].can(bundle, options).against == ""


def test_eager_reads_widened_weights(case, tmp_path) -> None:
    """All but the token table, whose rows are widened as they are read."""
    path, _ = case
    small = Bundle(stored(path, RECIPES["q8_0"], tmp_path / "small.gguf"))
    model = load(small.path, engine="eager").engine.model
    state = model.state_dict()
    table = model.language.embed_tokens
    assert {module.removesuffix(SCALE) for module in set(state) - set(Bundle(path).infos)} <= {TABLE}
    assert isinstance(table.store, Rows)
    assert table.store.coded
    for module, name in small.lowbit.items():
        scale = small.tensor(module + SCALE) if module + SCALE in small.infos else None
        width = Bundle(path).infos[module + WEIGHT].shape[1]
        wanted = lowbit.dequantize(small.tensor(module + WEIGHT), scale, name, width)
        got = table(torch.arange(len(wanted))) if module == TABLE else state[module + WEIGHT]
        assert torch.equal(got, wanted)
        assert module != TABLE or torch.equal(table.rows((3, 0)), wanted[[3, 0]])
    errors = weight_errors(Bundle(path), small.path)
    assert {"vision", "language", "expert"} <= set(errors)
    assert all(0 < error < 0.02 for error in errors.values())


def test_quantize_stores_and_measures(case, tmp_path, capsys) -> None:
    path, _ = case
    out = tmp_path / "small.gguf"
    recipe = "vision=q4_0,language=q4_0,head=int8"
    arguments = ["quantize", str(path), "--recipe", recipe, "--observations", "2", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = Bundle(out)
    assert written.manifest.quantization.recipe == record["recipe"]
    assert 0 < record["error"] <= record["error_max"]
    assert record["engine"].startswith("cpu")
    assert {"vision", "language", "expert"} <= set(record["weight_error"])
    assert out.stat().st_size < 0.6 * path.stat().st_size
    assert main(["inspect", str(out)]) == 0
    assert "Q4_0" in capsys.readouterr().out
    assert main(["quantize", str(out), *arguments[2:-1], str(tmp_path / "again.gguf")]) != 0  # twice


@pytest.mark.slow
def test_four_bits_are_rounded_by_what_was_recorded(smolvla_bundle, tmp_path, capsys) -> None:
    path = smolvla_bundle("smolvla-2cam")
    policy, recorder = load(path, engine="eager"), Recorder(tmp_path / "records")
    for observation in islice(random_observations(policy), 5):
        recorder.put("native", "arm", observation, policy.infer(observation))
    recorder.close()
    line = ["quantize", str(path), "--recipe", "vision=q4_0,language=q4_0", "--observations", "2"]
    made = {}
    known = ["--calibration", "3", "--records", str(tmp_path / "records")]
    for name, more in {"drawn": [], "known": known}.items():
        assert main([*line, *more, "--out", str(tmp_path / f"{name}.gguf")]) == 0
        said = " ".join(capsys.readouterr().out.split())
        made[name] = Bundle(tmp_path / f"{name}.gguf").manifest.quantization
        assert ("rounded separately; random frames cannot calibrate" in said) == (name == "drawn")
        assert ("q4_0 calibrated with 3 observations" in said) == (name == "known")
    assert [each.calibrated for each in made.values()] == [0, 3]
    assert made["known"].source.startswith("records of")
    assert made["known"].observations == 2
    assert made["drawn"].weight_error["language"] < made["known"].weight_error["language"]
    few = ["--calibration", "5", "--records", str(tmp_path / "records"), "--out", str(tmp_path / "few.gguf")]
    assert main([*line, *few]) == 1
    assert "5 observations were used for the calibration and none is left" in capsys.readouterr().err
    assert not (tmp_path / "few.gguf").exists()


def test_memory_is_priced_as_it_is_stored(smolvla_bundle, tmp_path) -> None:
    path = smolvla_bundle("smolvla-2cam")
    small = stored(path, RECIPES["mixed"], tmp_path / "small.gguf")
    report = fits(small, 2**33, engine="cpu", search=False).report
    infos = Bundle(small).infos
    assert report.weights_nbytes == sum(info.nbytes for info in infos.values())
    assert {row.dtype for row in report.weights} >= {"int8", "q4_0", "f32"}
    widened = fits(small, 2**33, engine="plan", search=False).report
    assert report.peaks == widened.peaks
    assert report.total < widened.total
    with pytest.raises(SinewError, match="expected low-bit weights; quantise this bundle"):
        fits(path, 2**33, engine="cpu")
    with pytest.raises(SinewError, match="uses the stored formats of the bundle, got 'int4'"):
        fits(small, 2**33, engine="cpu", dtypes="int4")


def test_a_float_bundle_and_half_precision_are_refused(case, tmp_path) -> None:
    path, _ = case
    with pytest.raises(SinewError, match="engine cpu needs low-bit weights, which this bundle does not have"):
        load(path, engine="cpu")
    small = stored(path, RECIPES["int8"], tmp_path / "small.gguf")
    with pytest.raises(SinewError, match="computes fp32 with low-bit weights"):
        load(small, engine="cpu", dtype="bfloat16")
    with pytest.raises(SinewError, match="expected float weights, got"):
        lowbit_sources(Bundle(small), {})


def changed(path: Path, out: Path, name: str, **changes) -> Path:
    """The bundle with one tensor changed, or left out (``leave_out=True``)."""
    bundle = Bundle(path)
    sources = []
    for info in bundle.infos.values():
        data = np.frombuffer(bundle.file.map, np.uint8, info.nbytes, info.offset).copy()
        source = TensorSource(info.name, info.shape, info.type, info.nbytes, ArraySlice(data))
        if info.name == name:
            if changes.get("leave_out"):
                continue
            source = replace(source, **changes)
        sources.append(source)
    manifest = bundle.manifest
    write_bundle(out, lambda: manifest, sources)
    return out


def test_tensors_that_do_not_fit_are_named(smolvla_bundle, tmp_path) -> None:
    path = stored(smolvla_bundle("smolvla-2cam"), RECIPES["int8"], tmp_path / "small.gguf")
    bundle = Bundle(path)
    module = next(iter(bundle.lowbit))
    rows, k = bundle.infos[module + WEIGHT].shape
    ternary = np.full((rows, FORMATS["ternary"].row_bytes(k)), 0xFF, np.uint8)
    fewer = {
        "shape": (rows - 1,),
        "nbytes": 4 * (rows - 1),
        "data": ArraySlice(np.ones(rows - 1, np.float32)),
    }
    threes = {
        "type": GGMLQuantizationType.I32,
        "shape": (rows, ternary.shape[1] // 4),
        "nbytes": ternary.nbytes,
        "data": ArraySlice(ternary),
    }
    cases = [
        (module + SCALE, {"leave_out": True}, "expected one tensor"),
        (module + SCALE, fewer, "scales, got"),
        (module + SCALE, {"type": GGMLQuantizationType.I32}, "expected F32, got I32"),
        (module + WEIGHT, {"shape": (rows * k,)}, "expected two dimensions"),
        (module + WEIGHT, {"shape": (k, rows)}, "bytes for a row of"),
        (module + WEIGHT, threes, "ternary codes 0, 1 and 2, got 3"),
    ]
    assert rows != k, module
    for name, changes, message in cases:
        broken = changed(path, tmp_path / "broken.gguf", name, **changes)
        for engine in ("eager", "cpu"):
            with pytest.raises(BundleError, match=message):
                load(broken, engine=engine)
    norm = "language.norm.weight"
    width = bundle.infos[norm].shape[0]
    data = ArraySlice(np.ones(width, np.int8))
    changes = {"type": GGMLQuantizationType.I8, "shape": (1, width), "nbytes": width, "data": data}
    with pytest.raises(BundleError, match="expected one tensor"):
        load(changed(path, tmp_path / "broken.gguf", norm, **changes))

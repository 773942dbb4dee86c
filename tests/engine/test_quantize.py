"""Selective int8: what is replaced, how far the chunk moves, what the bundle says, and that the engine does it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from sinew_eval.judge import GATES
from sinew_eval.report.gate import read_gate

from sinew.bundle import Bundle
from sinew.bundle.schema import DEFAULT_RECIPE, Manifest
from sinew.cli import main
from sinew.core import BundleError, SinewError
from sinew.engine.cuda.fp8.linear import Fp8Linear
from sinew.engine.onnx import export, quantize
from sinew.engine.onnx.cache import graphs_folder
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.quantize import quantize_graphs, round_weights
from sinew.families.smolvla.model import SmolVLA
from sinew.lowbit.quantization import lacking
from sinew.lowbit.recipes import parse_recipe
from sinew.policy import Policy, load
from tests.engines import run_one
from tests.golden import Golden

DATA = Path(__file__).resolve().parents[2] / "sinew" / "assets"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("pi0-2cam", "pi05-2cam")]  # an export each
CASES = ["smolvla-2cam", *SLOW]
ALL = {"vision": "int8", "language": "int8", "head": "int8"}


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, exported, pi_bundle, tmp_path_factory):
    """Policy with its float32 graphs, and the fixture."""
    name, folder = request.param, tmp_path_factory.mktemp("bundle")
    if name.startswith("pi"):
        path = Path(shutil.copyfile(pi_bundle(name), folder / "policy.gguf"))
    else:
        path = exported(folder)
    return load(path, engine="onnx", threads=1), Golden(golden / name)


def chunk(engine: OnnxEngine, policy, g) -> np.ndarray:
    observation = replace(policy.dummy_observation(), **g.observation())
    return run_one(engine, policy.processor.inputs(observation), g.numpy("noise")[0], 10)[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def products(path: Path) -> tuple[int, int]:
    """Constant matrix products of a graph: in float32, in int8."""
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    wide = sum(n.op_type == "MatMul" and n.input[1] in constants for n in graph.node)
    return wide, sum(n.op_type in ("MatMulInteger", "MatMulIntegerToFloat") for n in graph.node)


def int8_columns(path: Path) -> set[bytes]:
    """Weights of each output channel of a graph's int8 products."""
    tensors = onnx.load(str(path)).graph.initializer
    weights = [numpy_helper.to_array(t) for t in tensors if t.name.endswith(".int8")]
    return {column.tobytes() for values in weights for column in values.T}


def one_product(x: np.ndarray, weights: np.ndarray, precision: str, bits: int = 8) -> np.ndarray:
    """x @ weights by a graph of one product of the language component, quantised and run."""
    return products_in_a_row(x, [weights], precision, bits)


def products_in_a_row(x: np.ndarray, weights: list[np.ndarray], precision: str, bits: int = 8) -> np.ndarray:
    """The same of several products, each of what the one before gives."""
    names = ["x", *(f"y{index}" for index in range(len(weights)))]
    nodes = []
    for index, (before, after) in enumerate(pairwise(names)):
        nodes.append(helper.make_node("MatMul", [before, f"w{index}"], [after]))
        nodes[-1].metadata_props.add(key="sinew.component", value="language")
    given, made = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (names[0], names[-1])
    )
    constants = [numpy_helper.from_array(each, f"w{index}") for index, each in enumerate(weights)]
    graph = helper.make_graph(nodes, "products", [given], [made], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    recipe = {} if precision == "fp32" else {"language": precision}
    assert quantize.quantize_products(model, recipe, bits) == bool(recipe)
    import onnxruntime  # whose import starts a thread

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("precision", ["int8", "int8-rows"])
def test_a_product_may_read_what_another_gives(precision: str) -> None:
    """Two layers without biases in a row, as Wall-X's head has them: names of their scales stay apart."""
    rng = np.random.default_rng(3)
    x, first, second = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((5, 16), (16, 24), (24, 8))
    )
    bits, _ = quantize.weight_bits()  # eight saturate without VNNI
    found, exact = products_in_a_row(x, [first, second], precision, bits), x @ first @ second
    assert 1e-5 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


@pytest.mark.parametrize("precision", ["int8", "int8-rows"])
@pytest.mark.parametrize("component", ["vision", "language", "head"])
def test_one_component_alone(case, component, precision, tmp_path):
    """Only its products change, and the chunk moves a little: not at all would mean that nothing happened."""
    policy, g = case
    source = policy.engine.directory
    quantize_graphs(source, tmp_path, parse_recipe(f"{component}={precision}"), 7)
    changed = {stage for stage in ("vision", "read", "step") if products(tmp_path / f"{stage}.onnx")[1]}
    for stage in ("vision", "read", "step"):
        wide, narrow = products(tmp_path / f"{stage}.onnx")
        assert wide + narrow == products(source / f"{stage}.onnx")[0]
    expected = {"vision": {"vision"}, "language": {"read"}, "head": {"step"}}[component]
    if component == "head" and policy.spec.architecture != "pi05":
        expected = {"step", "read"}  # keys and values that the head projects from the prefix
    assert changed == expected
    engine = OnnxEngine(tmp_path, threads=1, solver=policy.spec.solver)
    assert engine.facts.recipe == {component: precision}
    moved = distance(chunk(engine, policy, g), chunk(policy.engine, policy, g))
    assert 1e-6 < moved < 0.1


def test_all_components_and_no_component(case, tmp_path):
    policy, g = case
    wanted = chunk(policy.engine, policy, g)
    quantize_graphs(policy.engine.directory, tmp_path / "none", parse_recipe("head=fp32"), 8)
    assert np.array_equal(
        chunk(OnnxEngine(tmp_path / "none", threads=1, solver=policy.spec.solver), policy, g), wanted
    )
    quantize_graphs(policy.engine.directory, tmp_path / "all", ALL, 7)
    assert all(products(tmp_path / "all" / f"{stage}.onnx")[0] == 0 for stage in ("vision", "read", "step"))
    assert (
        distance(chunk(OnnxEngine(tmp_path / "all", threads=1, solver=policy.spec.solver), policy, g), wanted)
        < 0.1
    )
    with pytest.raises(SinewError, match="expected graphs in float32, got"):
        quantize_graphs(tmp_path / "all", tmp_path / "again", ALL, 7)


def test_two_kinds_side_by_side(case, tmp_path):
    """Components that read the same activations, one with a scale per tensor, one with a scale per row."""
    policy, g = case
    wanted = chunk(policy.engine, policy, g)
    mixed = parse_recipe("vision=int8-rows,language=int8,head=int8-rows")
    quantize_graphs(policy.engine.directory, tmp_path, mixed, 7)
    engine = OnnxEngine(tmp_path, threads=1, solver=policy.spec.solver)
    assert engine.facts.recipe == mixed
    assert 1e-6 < distance(chunk(engine, policy, g), wanted) < 0.1


@pytest.mark.parametrize("bits", range(7, quantize.weight_bits()[0] + 1))  # 8 saturate without VNNI
def test_rows_hold_where_a_tensor_saturates(bits):
    """Three tokens of 60 are 40 times as large as the rest. One scale for all leaves the others 3 of 127 steps."""
    rng = np.random.default_rng(bits)
    weights = (rng.standard_normal((96, 48)) / 96**0.5).astype(np.float32)
    x = rng.standard_normal((2, 60, 96)).astype(np.float32)
    x[:, 7] = 0
    x[:, ::20] *= 40
    exact = x.astype(np.float64) @ weights

    def worst_row(precision: str) -> float:
        got = one_product(x, weights, precision, bits)
        assert np.isfinite(got).all()
        assert not got[:, 7].any()
        rows = np.delete(
            np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1).clip(1e-9), 7, 1
        )
        return float(rows.max())

    assert worst_row("fp32") < 1e-6
    assert worst_row("int8") > 0.1
    assert 1e-3 < worst_row("int8-rows") < 0.03
    small = x[:, 1:7]  # without the outliers the two are alike
    for precision in ("int8", "int8-rows"):
        assert 1e-3 < distance(one_product(small, weights, precision, bits), small @ weights) < 0.03


def test_a_lost_scale_is_seen(case, tmp_path, monkeypatch):
    """The bounds above notice one output channel of every product that is off by a factor of four."""
    policy, g = case

    def wrong(weights, bits):
        values, scales = round_weights(weights, bits)
        scales[0] *= 4
        return values, scales

    monkeypatch.setattr(quantize, "round_weights", wrong)
    quantize_graphs(policy.engine.directory, tmp_path, ALL, 7)
    assert (
        distance(
            chunk(OnnxEngine(tmp_path, threads=1, solver=policy.spec.solver), policy, g),
            chunk(policy.engine, policy, g),
        )
        > 0.1
    )


@pytest.mark.parametrize("bits", [7, 8])
def test_rounding_of_weights(bits):
    rng = np.random.default_rng(bits)
    weights = (rng.standard_normal((33, 5)) * np.array([1e-4, 1, 30, 0, 1e4])).astype(np.float32)
    values, scales = round_weights(weights, bits)
    assert values.dtype == np.int8
    assert np.abs(values.astype(int)).max() == 2 ** (bits - 1) - 1
    assert (np.abs(values * scales - weights) <= scales / 2 * 1.0001).all()
    assert not values[:, 3].any()
    assert np.isfinite(scales).all()


def test_bits_follow_the_instruction_set(monkeypatch):
    for flags, bits in (
        ({"avx2"}, 7),
        ({"avx2", "avx512_vnni"}, 8),
        ({"avx2", "avx_vnni"}, 8),
        ({"asimddp"}, 8),
    ):
        monkeypatch.setattr(quantize.machine, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert quantize.weight_bits()[0] == bits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("visoin=int8", "expected a component of vision, language, head, got 'visoin'"),
        ("vision=int4", "vision: expected int8, int8-rows, q8_0, q4_0, fp8, fp32, got 'int4'"),
        ("vision", "vision: expected int8, int8-rows, q8_0, q4_0, fp8, fp32, got ''"),
        ("head=int8_rows", "head: expected int8, int8-rows, q8_0, q4_0, fp8, fp32, got 'int8_rows'"),
        ("language=fp8,head=int8", "expected precisions of one engine, got fp8 .cuda. and int8 .cpu, onnx."),
        ("vision=fp8,language=fp8", "fp8: vision: FP8 is for the language model only"),
        ("head=int8,head=int8-rows", "head: expected one precision, got int8 and int8-rows"),
    ],
)
def test_wrong_recipes(text, message):
    with pytest.raises(SinewError, match=message):
        parse_recipe(text)


# ----------------------------------------------------------------------------- the verb and the bundle


@pytest.fixture(
    scope="module",
    params=["graphs of the source", pytest.param("graphs of its own", marks=pytest.mark.slow)],  # an export
)
def quantised(request, exported, tmp_path_factory) -> tuple[Path, Path]:
    """A bundle and what ``sinew quantize`` makes of it. A user's graphs are an export of the stored weights, half a
    minute; the quick ones begin as those of the source, and the verb rounds and labels them as it does the others."""
    folder = tmp_path_factory.mktemp("verb")
    source, out = exported(folder), folder / "int8.gguf"
    (graphs,) = folder.glob("*.onnx-*")

    def copied(plan, directory, **sizes):
        shutil.copytree(graphs, directory, dirs_exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "graphs of the source":
            patch.setattr(export, "export_graphs", copied)
        assert main(["quantize", str(source), "--out", str(out), "--observations", "3"]) == 0
    return source, out


def test_the_bundle_carries_recipe_and_error(quantised, capsys):
    source, out = (Bundle(path) for path in quantised)
    record = out.manifest.quantization
    assert record.recipe == {"vision": "int8", "language": "int8", "head": "fp32"}
    assert 0 < record.error <= record.error_max < 0.05
    assert (record.observations, record.source) == (3, "random frames")
    assert record.engine.startswith("onnxruntime ")
    assert replace(out.manifest, quantization=None) == source.manifest
    assert {module.partition(".")[0] for module in out.lowbit} >= {"vision", "language"}
    assert set(out.lowbit.values()) == {"int8"}
    for name in source.infos:
        module, wanted = name.removesuffix(".weight"), source.tensor(name)
        if not name.endswith(".weight") or module not in out.lowbit:
            assert out.tensor(name).numpy().tobytes() == wanted.numpy().tobytes(), name
            continue
        scale = out.tensor(f"{module}.scale").numpy()[:, None]
        codes = out.tensor(name).numpy().view(np.int8)
        assert (np.abs(codes * scale - wanted.float().numpy()) <= scale / 2 * 1.0001).all(), name
    assert set(out.infos) - set(source.infos) == {f"{module}.scale" for module in out.lowbit}
    assert main(["inspect", str(out.path)]) == 0
    assert "vision int8" in capsys.readouterr().out


@pytest.mark.slow  # further exports
def test_the_error_is_measured_under_the_policys_own_solver(groot_bundle, tmp_path):
    """GR00T's time runs from 0 to 1; the other way, the chunk is off by its own size."""
    source, out = tmp_path / "policy.gguf", tmp_path / "int8.gguf"
    shutil.copyfile(groot_bundle("groot-n15"), source)
    assert main(["quantize", str(source), "--out", str(out), "--observations", "2"]) == 0
    record = Bundle(out).manifest.quantization
    assert 0 < record.error <= record.error_max < 0.1


@pytest.mark.proves(engine="onnx", precision="int8", family="smolvla")
def test_the_engine_follows_the_recipe(quantised, golden, tmp_path):
    """From the cache, and from an exported folder: the same actions, not those of float32."""
    source, out = quantised
    g = Golden(golden / "smolvla-2cam")
    policy = load(out, engine="onnx", threads=1)
    assert policy.facts.recipe == {"vision": "int8", "language": "int8"}
    actions = policy.infer(g.observation()).actions
    wide = load(source, engine="onnx", threads=1).infer(g.observation()).actions
    assert 1e-6 < distance(actions, wide) < 0.05
    assert main(["export", str(out), "--onnx", str(tmp_path / "robot")]) == 0
    assert np.array_equal(load(tmp_path / "robot", threads=1).infer(g.observation()).actions, actions)
    chosen = load(out, threads=1)  # engine cpu where its kernels can be built, else onnx
    assert chosen.engine_name in ("cpu", "onnx")
    assert chosen.choice.engine_reason.startswith("it follows the bundle's recipe")
    assert distance(chosen.infer(g.observation()).actions, actions) < 0.05
    assert chosen.facts.precision["vision"].startswith("int8")
    assert chosen.facts.precision["head"] == "fp32"
    ignored = load(out, engine="eager", ignore_recipe=True).infer(g.observation()).actions
    widened = distance(ignored, load(source, engine="eager").infer(g.observation()).actions)
    assert 1e-6 < widened < 0.05  # eager widens the stored weights: they are not the source's


@pytest.mark.slow  # further exports
def test_a_processor_without_vnni_takes_seven_bits_of_an_eight_bit_recipe(exported, tmp_path, monkeypatch):
    """Exported with VNNI and opened without: rounded again beside the bundle, refused in an exported folder."""
    source = exported(tmp_path)
    out, robot = tmp_path / "eight.gguf", tmp_path / "robot"
    monkeypatch.setattr(quantize.machine, "cpu_flags", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert main(["quantize", str(source), "--out", str(out), "--observations", "1"]) == 0
    assert Bundle(out).manifest.quantization.bits == 8
    assert main(["export", str(out), "--onnx", str(robot)]) == 0
    stored = Bundle(out)
    columns = int8_columns(robot / "vision.onnx")
    layers = [module for module in stored.lowbit if module.startswith("vision.") and "layers" in module]
    assert layers
    for module in layers:  # eight bits: the graph has the stored weights, not rounded again
        assert {row.tobytes() for row in stored.tensor(f"{module}.weight").numpy()} <= columns, module
    monkeypatch.setattr(quantize.machine, "cpu_flags", lambda: frozenset({"avx2"}))
    assert load(out, engine="onnx", threads=1).engine.graphs.bits == 7
    with pytest.raises(SinewError, match="at most 7 bits on this processor.*export the bundle again"):
        load(robot, threads=1)


@pytest.mark.slow  # further exports
def test_rows_from_recipe_to_engine(exported, golden, tmp_path, capsys):
    """The verb, the bundle, `sinew inspect` and a fresh export agree."""
    source = exported(tmp_path)
    out, g = tmp_path / "rows.gguf", Golden(golden / "smolvla-2cam")
    recipe = ["--recipe", "vision=int8,language=int8-rows"]
    assert main(["quantize", str(source), "--out", str(out), "--observations", "2", *recipe, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["recipe"]["language"] == "int8-rows"
    record = Bundle(out).manifest.quantization
    assert record.recipe == {"vision": "int8", "language": "int8-rows", "head": "fp32"}
    assert 0 < record.error < 0.05
    assert main(["inspect", str(out)]) == 0
    assert "language int8-rows" in " ".join(capsys.readouterr().out.split())
    policy = load(out, engine="onnx", threads=1)
    assert policy.facts.recipe == {"vision": "int8", "language": "int8-rows"}
    actions = policy.infer(g.observation()).actions
    fresh = tmp_path / "fresh.gguf"
    shutil.copyfile(out, fresh)
    assert np.array_equal(load(fresh, engine="onnx", threads=1).infer(g.observation()).actions, actions)


def test_what_quantize_refuses(quantised, tmp_path, capsys):
    source, out = quantised
    for arguments, words in (
        ([out, "--out", tmp_path / "x.gguf"], "without a recipe, got a bundle in "),
        ([source, "--out", source], "this is the bundle that is read"),
        (
            [source, "--out", tmp_path / "x.gguf", "--recipe", "head=int2"],
            "expected int8, int8-rows, q8_0, q4_0, fp8, fp32",
        ),
        *(
            ([source, "--out", tmp_path / "x.gguf", *line.split()], words)
            for line, words in (
                (
                    "--recipe head=fp32",
                    "recipe: expected at least one component with fewer bits, got head=fp32",
                ),
                (
                    "--recipe vision=q4_0 --engine onnx",
                    "this engine supports fp32, int8, int8-rows, got vision=q4_0",
                ),
                ("--search --budget 1MB --engine onnx", "a search measures with engine cpu only"),
                ("--search --budget 1MB --recipe vision=int8", "cannot be combined with --search"),
                ("--search --budget 9GB", "--budget 9GB: the bundle fits without quantisation"),
                ("--search --budget lots", "budget: expected a size such as"),
            )
        ),
    ):
        assert main(["quantize", *map(str, arguments)]) == 1
        said = capsys.readouterr().err.replace("\n", " ")
        assert words in said
        assert "validating" not in said  # what takes minutes of a large policy
    assert not list(tmp_path.iterdir())


def test_a_component_with_nothing_to_store_is_named(quantised, monkeypatch, tmp_path, capsys):
    """As in a policy without a language model. The recipe that nobody asked for leaves it out."""
    monkeypatch.setattr(SmolVLA, "components", {"vision": "vision", "connector": "vision"})
    source, out = quantised[0], tmp_path / "x.gguf"
    assert main(["quantize", str(source), "--out", str(out), "--recipe", "language=int8"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "recipe: language: no weights of this component can be quantised in smolvla" in said
    assert said.endswith("name some of: vision, head")
    assert lacking(Bundle(source), parse_recipe(DEFAULT_RECIPE)) == ["language"]
    assert lacking(Bundle(source), parse_recipe("vision=int8,head=q4_0")) == []


def test_the_record_of_a_bundle_is_checked(quantised):
    metadata = Bundle(quantised[1]).file.metadata
    assert (
        Manifest.from_metadata({k: v for k, v in metadata.items() if k != "sinew.quantization"}).quantization
        is None
    )
    record = json.loads(metadata["sinew.quantization"])
    for change, words in (
        ({"recipe": {"vision": "int3"}}, "int3"),
        ({"bits": 9}, "bits"),
        ({"speed": 1}, "unknown field 'speed'"),
    ):
        text = json.dumps(record | change)
        with pytest.raises(BundleError, match=f"sinew.quantization.*{words}"):
            Manifest.from_metadata({**metadata, "sinew.quantization": text})


@pytest.mark.slow  # further exports, and episodes
def test_error_over_episodes_and_gate_of_an_embedded_task(tmp_path, capsys):
    """The success of the bundle that was written stands in its header, beside the error of the chunk."""
    pytest.importorskip("mujoco")
    shutil.copyfile(DATA / "pen.gguf", tmp_path / "pen.gguf")
    out = tmp_path / "int8.gguf"
    counts = ["--observations", "2", "--episodes", "2", "--json"]
    status = main(["quantize", str(tmp_path / "pen.gguf"), "--out", str(out), *counts])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = Bundle(out).manifest.quantization
    assert (record.observations, record.source) == (2, "episodes of sinew/Pen-v0")
    assert (record.success.env, record.success.episodes) == ("sinew/Pen-v0", 2)
    assert 0 <= record.success.wins <= 2
    gate = read_gate(next(GATES.glob("pen*.json")))
    assert record.success.recorded_wins == sum(gate.outcomes[gate.first_seed + i] for i in range(2))
    delta = 100 * (record.success.wins - record.success.recorded_wins) / 2
    assert found["gate"].startswith(f"success {delta:+.1f} points")
    assert found["success"] == asdict(record.success)
    assert status == (0 if "passes" in found["gate"] else 1)
    assert graphs_folder(Bundle(out)).exists()  # the graphs of the bundle before its success was known
    assert (record.validated.engine, record.validated.observations) == ("plan", 2)
    assert 0 < record.validated.error < 1e-3
    assert found["validated"] == asdict(record.validated)
    assert found["warnings"] == []
    assert "; of 2 episodes, at most" in found["gate"] or "fails" in found["gate"]
    assert main(["inspect", str(out)]) == 0
    assert "before, plan within" in " ".join(capsys.readouterr().out.split())


def test_a_bundle_that_fails_its_validation_is_not_quantised(tmp_path, capsys, monkeypatch):
    """What is wrong before would be told as the cost of fewer bits."""
    shutil.copyfile(DATA / "pen.gguf", tmp_path / "pen.gguf")
    opened = Policy.__init__

    def broken(self: Policy, *arguments: object, **options: object) -> None:
        opened(self, *arguments, **options)
        if self.engine_name == "plan":
            weight = self.engine.model.expert.layers[0].mlp.down_proj.weight
            weight.data = weight.data.clone().mul_(1.05)

    monkeypatch.setattr(Policy, "__init__", broken)
    out = tmp_path / "int8.gguf"
    for recipe in (["--recipe", "vision=int8"], ["--search", "--budget", "300KB"]):
        command = ["quantize", str(tmp_path / "pen.gguf"), "--out", str(out), "--observations", "1", *recipe]
        assert main([*command, "--episodes", "0"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "expected equal results of the engines plan and eager over 1 observations, got head" in said
        assert not out.exists()


@pytest.mark.parametrize(("recipe", "warned"), [("vision=int8", False), ("vision=int8,head=int8", True)])
def test_a_head_in_few_bits_is_discouraged(recipe, warned, tmp_path, capsys):
    out = tmp_path / "few.gguf"
    command = ["quantize", str(DATA / "pen.gguf"), "--out", str(out), "--recipe", recipe, "--engine", "cpu"]
    record = tmp_path / "record.json"
    assert main([*command, "--observations", "1", "--episodes", "0", "--json", str(record)]) == 0
    text = capsys.readouterr().out
    warnings = json.loads(record.read_text())["warnings"]
    assert bool(warnings) == warned
    if warned:
        assert (
            "head in int8: its errors add up over the solver's steps, and no episodes were played"
            in warnings[0]
        )
        assert warnings[0] in " ".join(text.split())


# ----------------------------------------------------------------------------- FP8, which the CUDA engine follows


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        arguments = ["--recipe", "language=fp8", "--out", str(folder / "fp8.gguf")]
        assert main(["quantize", str(DATA / "pen.gguf"), *arguments, "--observations", "4"]) == 0
    return folder / "fp8.gguf"


def test_a_recipe_in_fp8_carries_its_scales(narrow, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another machine
    record = Bundle(narrow).manifest.quantization
    assert record.fp8 == ("language",)
    assert record.recipe["head"] == record.recipe["vision"] == "fp32"
    assert record.source == "episodes of sinew/Pen-v0"
    assert 1e-4 < record.error <= record.error_max
    assert record.scales
    assert {name.partition(".")[0] for name in record.scales} == {"language"}
    assert all(0 < scale < 100 for scale in record.scales.values())
    assert main(["inspect", str(narrow)]) == 0
    assert "language fp8" in capsys.readouterr().out

    policy = load(narrow, "cpu", engine="cuda")
    assert policy.facts.recipe == {"language": "fp8"}
    narrow_layers = [n for n, each in policy.engine.model.named_modules() if isinstance(each, Fp8Linear)]
    assert {*narrow_layers} == record.scales.keys()
    plain = load(DATA / "pen.gguf", "cpu", engine="cuda")
    observation = plain.dummy_observation()
    a, b = (each.infer(observation).actions for each in (policy, plain))
    assert 1e-6 < distance(a, b) < 0.5


def test_other_engines_and_a_recipe_in_fp8(narrow):
    plain = load(DATA / "pen.gguf", "cpu", engine="eager")
    ignored = load(narrow, "cpu", engine="eager", ignore_recipe=True)
    observation = plain.dummy_observation()
    np.testing.assert_array_equal(
        ignored.infer(observation).actions, plain.infer(observation).actions
    )  # eager has its own precision
    for engine in ("eager", "plan", "onnx"):
        with pytest.raises(SinewError, match="language fp8, which engine .* does not compute"):
            load(narrow, "cpu", engine=engine)

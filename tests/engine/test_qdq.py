"""``sinew export --qdq``: static pairs round products, what they cost, and what is left in floats."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.core import SinewError
from sinew.engine.onnx.graphs import STAGES
from sinew.engine.onnx.quantize import round_weights
from sinew.engine.onnx.whole import pairs
from sinew.engine.onnx.whole.graph import WHOLE
from sinew.lowbit.quantization import paired_recipe
from sinew.policy import load, open_bundle
from tests.engine.test_quantize import distance
from tests.golden import Golden

BLOCKS = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "blocks.gguf"
ALL = "vision=int8,language=int8,head=int8"


@dataclass(frozen=True)
class Made:
    """A bundle, its export with pairs, and what the verb said."""

    bundle: Path
    robot: Path
    said: dict[str, object]


def export(bundle: Path, robot: Path, *more: str) -> int:
    return main(["export", str(bundle), "--onnx", str(robot), *more])


@pytest.fixture(scope="module")
def made(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of two solver steps instead of ten, each of which the whole graph writes out."""
    home, case = tmp_path_factory.mktemp("qdq"), golden / "smolvla-2cam"
    bundle, record = home / "policy.gguf", home / "said.json"
    shutil.copytree(case / "checkpoint", home / "checkpoint")
    config = home / "checkpoint" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_steps": 2}))
    convert(home / "checkpoint", bundle, vlm=case / "vlm", name=case.name)
    assert Bundle(bundle).manifest.spec.solver_steps == 2
    line = ["--qdq", ALL, "--observations", "2", "--whole", "--json", str(record)]
    assert export(bundle, home / "robot", *line) == 0
    return Made(bundle, home / "robot", json.loads(record.read_text()))


@pytest.mark.slow
def test_every_product_stands_between_pairs(made: Made) -> None:
    """Weights have a scale for each output channel; all zero points are zero, as TensorRT wants."""
    seen = 0
    for name in (*(f"{stage}.onnx" for stage in STAGES), WHOLE):
        graph = onnx.load(str(made.robot / name)).graph
        stored = {each.name: each for each in graph.initializer}
        maker = {out: node for node in graph.node for out in node.output}
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for each in node.input:
                readers.setdefault(each, []).append(node)
        wide = [node for node in graph.node if node.op_type in pairs.PRODUCTS and node.input[1] in stored]
        assert not wide or name == WHOLE  # whose processing, before and behind the model, stays in floats
        products = [
            node
            for node in graph.node
            if node.op_type in pairs.PRODUCTS
            and node.input[1] in maker
            and maker[node.input[1]].op_type == "DequantizeLinear"
            and maker[node.input[1]].input[0] in stored
        ]
        assert products
        for node in products:
            assert maker[node.input[0]].op_type == "DequantizeLinear"
            assert [each.op_type for each in readers[node.output[0]]] == ["QuantizeLinear"]
            weight = maker[node.input[1]]
            values, scales, zeros = (numpy_helper.to_array(stored[each]) for each in weight.input)
            axis = next(each.i for each in weight.attribute if each.name == "axis")
            assert values.dtype == np.int8
            assert scales.shape == (values.shape[axis],) == zeros.shape
            others = tuple(at for at in range(values.ndim) if at != axis)
            most = np.abs(values.astype(int)).max(axis=others)
            assert ((most == 127) | (most == 63) | (most == 0)).mean() > 0.9  # a channel's own largest
            for at in node.input[2:]:
                assert numpy_helper.to_array(stored[maker[at].input[0]]).dtype == np.int32
        for node in graph.node:
            if node.op_type in pairs.PAIR:
                assert not numpy_helper.to_array(stored[node.input[2]]).any()
        seen += len(products)
    assert seen > 100


@pytest.mark.slow
def test_the_folder_computes_a_little_else_and_says_how_much(made: Made, golden: Path) -> None:
    g = Golden(golden / "smolvla-2cam")
    policy = load(made.robot, threads=1)
    assert policy.engine_name == "onnx"
    assert policy.facts.recipe == {"vision": "int8", "language": "int8", "head": "int8"}
    record = open_bundle(made.robot).manifest.quantization
    assert record is not None
    assert (record.observations, record.calibrated, record.source) == (2, 2, "random frames")
    assert 1e-6 < record.error <= record.error_max < 0.3
    wide = load(made.bundle, engine="eager", threads=1).infer(g.observation()).actions
    assert 1e-6 < distance(policy.infer(g.observation()).actions, wide) < 0.3
    text = " ".join(made.said["qdq"])  # type: ignore[arg-type]
    for words in (
        "products between pairs: vision ",
        "Softmax",
        "2 observations from random frames, after 2",
    ):
        assert words in text
    assert main(["doctor", str(made.robot)]) == 0


@pytest.mark.slow
def test_a_wrong_scale_is_refused_and_nothing_is_written(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounded(*given: object) -> tuple[np.ndarray, np.ndarray]:
        values, scales = round_weights(*given)  # type: ignore[arg-type]
        return values, scales * 4

    monkeypatch.setattr(pairs, "round_weights", rounded)
    assert export(made.bundle, tmp_path / "robot", "--qdq", ALL, "--observations", "1") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--qdq: expected actions within 3e-01 of float32 over 1 observations from random frames" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_it_refuses(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (
            ["--qdq", "head=q4_0"],
            "--qdq: expected int8 for some components and fp32 for the others, got head=q4_0",
        ),
        (["--qdq", "head=fp32"], "expected int8 for some components"),
        (["--records", str(tmp_path)], "--records requires --qdq"),
        (["--observations", "5"], "--observations requires --qdq"),
    ):
        assert export(made.bundle, tmp_path / "robot", *arguments) == 1
        assert words in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SinewError, match="expected a bundle with weights and without a recipe"):
        paired_recipe(open_bundle(made.robot), ALL)
    graphs = tmp_path / "robot"
    shutil.copytree(made.robot, graphs)
    solver = Bundle(made.bundle).manifest.spec.solver
    with pytest.raises(SinewError, match="expected graphs in float32 with weights, got"):
        pairs.write_pairs(graphs, {"head": "int8"}, 8, solver, ())


@pytest.mark.parametrize(
    ("operator", "attributes", "shape", "bias"),
    [
        ("MatMul", {}, (96, 48), False),
        ("Gemm", {"transB": 1}, (48, 96), True),
        ("Gemm", {}, (96, 48), True),
        ("Conv", {"strides": [4, 4]}, (8, 6, 4, 4), True),
    ],
)
def test_one_product(
    operator: str, attributes: dict[str, object], shape: tuple[int, ...], bias: bool
) -> None:
    """Also one whose channel has no weights, or hardly any, beside a bias: its sums are integers too."""
    import onnxruntime  # whose import starts a thread

    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal(shape).astype(np.float32)}
    channels = np.moveaxis(weights["w"], 0 if operator == "Conv" or attributes else 1, 0)
    channels[0], channels[1] = 0, channels[1] * 1e-12
    if bias:
        weights["b"] = rng.standard_normal(len(channels)).astype(np.float32)
    x = rng.standard_normal((2, 6, 16, 16) if operator == "Conv" else (5, 96)).astype(np.float32)
    node = helper.make_node(operator, ["x", *weights], ["y"], **attributes)
    node.metadata_props.add(key="sinew.component", value="language")
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "one", values[:1], values[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def run() -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": x})[0])

    wanted = run()
    products = pairs._products(model.graph, {"language": "int8"})
    scales = {name: pairs.scale_of(float(np.abs(array).max())) for name, array in (("x", x), ("y", wanted))}
    pairs._put_pairs(model.graph, products, scales, 7)
    got = run()
    assert 1e-4 < distance(got, wanted) < 0.03
    at = 1 if operator == "Conv" else -1
    silent = np.moveaxis(got - wanted, at, 0)[:2]
    assert np.abs(silent).max() <= scales["y"]


@pytest.mark.slow  # an export
def test_blocks_wins_as_before(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    bundle = tmp_path / "blocks.gguf"
    shutil.copyfile(BLOCKS, bundle)
    line = ["--qdq", "vision=int8,language=int8", "--observations", "16", "--whole"]
    assert export(bundle, tmp_path / "robot", *line) == 0
    found = open_bundle(tmp_path / "robot").manifest.quantization
    assert found is not None
    assert found.source == "episodes of sinew/Blocks-v0"
    assert 1e-3 < found.error_max < 0.3
    assert main(["doctor", str(tmp_path / "robot")]) == 0
    assert main(["eval", str(tmp_path / "robot"), "--gate", "blocks", "--episodes", "20"]) == 0

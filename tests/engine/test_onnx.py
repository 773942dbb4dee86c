"""The ONNX Runtime engine against eager: the same chunks, from graphs exported once and run without torch."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from sinew.cli import main
from sinew.core import BundleError, CancelledError, Observation, ObservationError, SinewError
from sinew.engine.onnx import opening
from sinew.engine.onnx.cache import fingerprint
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.export import ON_ONNX, _write, export_graphs, write_tables
from sinew.engine.onnx.graphs import GraphSet
from sinew.engine.onnx.providers import OPENVINO, session_options
from sinew.engine.plan.plan import Plan
from sinew.models.solvers import FLOW
from sinew.policy import load
from tests.closeness import assert_close, rounding
from tests.engines import eager_rounding, run_one
from tests.golden import Golden, assert_parity

CASES = [
    "smolvla-2cam",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("pi0-2cam", "pi05-2cam")),
]


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, exported, smolvla_bundle, pi_bundle, tmp_path_factory):
    """Eager policy, fixture, engine over graphs for 4 and 10 steps."""
    name = request.param
    policy = load(
        (pi_bundle if name.startswith("pi") else smolvla_bundle)(name), dtype="float32", engine="eager"
    )
    folder, image = tmp_path_factory.mktemp("graphs"), policy.manifest.processing.image
    plan = Plan.of(policy.engine.model, rewrites=ON_ONNX)
    if name == "smolvla-2cam":  # the one that is exported anyway; 4 steps need a table alone
        exported(folder)
        (folder,) = folder.glob("*.onnx-*")
        write_tables(plan, folder, (4,))
        replace(GraphSet.load(folder), steps=(4, 10)).save(folder)
    else:
        export_graphs(
            plan,
            folder,
            architecture=policy.spec.architecture,
            views=2,
            height=image.height,
            width=image.width,
            steps=(4, 10),
        )
    return policy, Golden(golden / name), OnnxEngine(folder, threads=1, solver=policy.spec.solver)


def inputs_of(policy, g):
    return policy.processor.inputs(Observation.from_mapping(g.observation()))


def refusal(policy, engine, inputs, noise, steps=10) -> str:
    """Return why the chunk is not eager's but for rounding (tests/closeness.py); empty if it is."""
    before = noise.copy()
    got, timing = run_one(engine, inputs, noise, steps)
    assert len(timing.step_ms) == steps
    assert np.array_equal(noise, before)
    return eager_rounding(policy.engine.model, inputs, noise, steps).refusal(got)


@pytest.mark.proves(engine="onnx")
def test_the_same_chunks(case):
    """Steps, prompt lengths, and views that the graphs were not recorded with."""
    policy, g, engine = case
    inputs, noise = inputs_of(policy, g), g.numpy("noise")[0]
    longer = replace(
        inputs,
        tokens=np.concatenate([inputs.tokens, inputs.tokens[-4:]]),
        token_mask=np.append(inputs.token_mask, [True, True, False, False]),
    )
    one = replace(inputs, pixels=inputs.pixels[1:], camera_mask=inputs.camera_mask[1:])
    masked = replace(inputs, camera_mask=np.array([True, False]))
    for variant in (inputs, longer, one, masked, inputs):
        for steps in (4, 10):
            assert not refusal(policy, engine, variant, noise, steps)
    chunk, _ = run_one(engine, inputs, noise, 10)
    observation = Observation.from_mapping(g.observation())
    assert_parity(policy.processor.actions(chunk, observation), g.numpy("actions")[0])


def test_an_export_says_nothing_of_its_libraries(monkeypatch, caplog, tmp_path):
    """They warn of every initializer that is an input, once for each stage."""
    warnings = [logging.getLogger(f"{name}.passes") for name in ("torch.onnx", "onnx_ir", "onnxscript")]

    def export(*_arguments, **_options):
        for each in warnings:
            each.warning("Skipped deduplication of initializer 'x'")
        raise RuntimeError("far enough")

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(SinewError, match="far enough"):
        _write(torch.nn.Identity(), (), {}, [], [], tmp_path / "vision.onnx", str)
    assert caplog.messages == []
    for each in warnings:
        each.warning("told again")
    assert caplog.messages == ["told again"] * 3


def test_a_wrong_table_is_seen(case):
    policy, g, engine = case
    right = engine.tables[10]
    engine.tables[10] = np.roll(right, 1, axis=0)
    try:
        assert refusal(policy, engine, inputs_of(policy, g), g.numpy("noise")[0])
    finally:
        engine.tables[10] = right


def test_vision_attention_is_one_operator(case, tmp_path):
    """And its heads are the model's: with another number of them the chunk is another."""
    policy, g, engine = case
    model = onnx.load(str(engine.directory / "vision.onnx"))
    kinds = Counter(node.op_type for node in model.graph.node)
    layers = policy.engine.model.config.vision.num_layers
    assert (kinds["MultiHeadAttention"], kinds["Gelu"], kinds["Softmax"]) == (layers, layers, 0)
    for node in model.graph.node:
        if node.op_type == "MultiHeadAttention":
            (heads,) = (a for a in node.attribute if a.name == "num_heads")
            assert heads.i == policy.engine.model.config.vision.num_heads > 1
            heads.i = 1
    other = tmp_path / "graphs"
    shutil.copytree(engine.directory, other)
    onnx.save_model(model, str(other / "vision.onnx"))
    GraphSet.load(other).save(other)
    inputs, noise = inputs_of(policy, g), g.numpy("noise")[0]
    assert refusal(policy, OnnxEngine(other, threads=1, solver=policy.spec.solver), inputs, noise)


def test_cancelling(case):
    policy, g, engine = case
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        run_one(engine, inputs_of(policy, g), g.numpy("noise")[0], 10, cancel)


def test_what_was_not_exported_is_refused(case):
    policy, g, engine = case
    inputs, noise = inputs_of(policy, g), g.numpy("noise")[0]
    with pytest.raises(
        ObservationError, match="solver_steps: expected one of the exported numbers of steps 4, 10, got 7"
    ):
        run_one(engine, inputs, noise, 7)
    three = replace(inputs, pixels=np.repeat(inputs.pixels[:1], 3, axis=0), camera_mask=np.ones(3, bool))
    with pytest.raises(SinewError, match="views: expected at most 2, got 3"):
        run_one(engine, three, noise, 10)
    with pytest.raises(SinewError, match="provider QuantumExecutionProvider: this onnxruntime offers .*CPU"):
        OnnxEngine(engine.directory, providers=["QuantumExecutionProvider"], solver=policy.spec.solver)


def test_graphs_run_without_torch(case, tmp_path):
    """A process in which torch cannot be imported gives the same chunk."""
    policy, g, engine = case
    inputs, noise = inputs_of(policy, g), g.numpy("noise")[0]
    fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    np.savez(tmp_path / "inputs.npz", **fields, noise=noise)
    code = (
        "import sys; sys.modules['torch'] = None\nimport numpy as np\nfrom sinew.engine.onnx.engine import"
        " OnnxEngine\nfrom sinew.processing import ModelInputs\nfrom sinew.models.solvers import"
        " FLOW\ngraphs, given, out = sys.argv[1:]\ndata = dict(np.load(given)); noise ="
        " data.pop('noise')\nengine = OnnxEngine(graphs, threads=1, solver=FLOW)\nnp.save(out,"
        " engine.run(ModelInputs(**data).batched(), noise[None], 10)[0])\n"
    )
    arguments = [str(engine.directory), str(tmp_path / "inputs.npz"), str(tmp_path / "chunk.npy")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "chunk.npy"), run_one(engine, inputs, noise, 10)[0])


def test_a_folder_that_is_no_export(tmp_path):
    with pytest.raises(BundleError, match="graphs.json: expected the record of an export"):
        OnnxEngine(tmp_path, solver=FLOW)
    (tmp_path / "graphs.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(BundleError, match="expected format 5, got 0; export again"):
        OnnxEngine(tmp_path, solver=FLOW)


def test_nodes_compute_every_output(case):
    """OpenVINO opens no graph with a stored constant as an output, nor what ONNX Runtime's rewrites make of it."""
    engine = case[2]
    for path in engine.directory.glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        assert {output.name for output in graph.output} <= {
            name for node in graph.node for name in node.output
        }
    import onnxruntime  # whose import starts a thread

    levels = onnxruntime.GraphOptimizationLevel
    assert session_options(1, providers=[OPENVINO]).graph_optimization_level == levels.ORT_DISABLE_ALL
    assert session_options(1).graph_optimization_level == levels.ORT_ENABLE_ALL


def test_graphs_are_cached_beside_the_bundle(exported, golden, tmp_path):
    bundle, g = exported(tmp_path), Golden(golden / "smolvla-2cam")
    first = load(bundle, engine="onnx")
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert folder.name == f"policy.onnx-{fingerprint(bundle)[:16]}"
    assert_parity(first.infer(g.observation()).actions, g.numpy("actions")[0])
    stamp = (folder / "graphs.json").stat().st_mtime_ns
    again = load(bundle, engine="onnx")
    assert (folder / "graphs.json").stat().st_mtime_ns == stamp
    assert first.facts.weights_nbytes == again.facts.weights_nbytes > 0

    data = bytearray(bundle.read_bytes())
    data[-1] ^= 1  # another weight, the same header
    bundle.write_bytes(data)
    assert fingerprint(bundle)[:16] not in folder.name
    with pytest.raises(SinewError, match="engine onnx runs fp32 on cpu, not bf16"):
        load(bundle, dtype="bfloat16", engine="onnx")


@pytest.mark.slow
def test_a_running_chunk_is_continued_without_a_jacobian(exported, golden, tmp_path, smolvla_bundle, capsys):
    """What needs the Jacobian, or a time per row, is refused by name, on the command line before a robot moves."""
    bundle, observation = exported(tmp_path), Golden(golden / "smolvla-2cam").observation()
    policy = load(bundle, engine="onnx")
    eager = load(smolvla_bundle("smolvla-2cam"), engine="eager", threads=1)
    previous = eager.infer({**observation, "noise": None, "seed": 7}).actions[3:]
    assert (policy.describe()["unguided"], policy.capabilities.guidance) == ("", ("no-jacobian", "ramp"))
    assert policy.describe()["guidance"] == ["no-jacobian", "ramp"]
    plain = policy.infer(observation).actions
    for kind in policy.capabilities.guidance:
        asked = {**observation, "previous": previous, "delay": 4, "horizon": 8, "rtc": kind}
        wanted = rounding(lambda asked=asked: eager.infer(asked).actions)
        assert_close(wanted, policy.infer(asked).actions)
        assert wanted.refusal(plain)
    for fields in ({"rtc": "guided"}, {}):
        for ask in (policy.check, policy.infer):
            with pytest.raises(
                ObservationError, match=r"rtc: expected no-jacobian or ramp on engine onnx; .* got gui"
            ):
                ask({**observation, "previous": previous, **fields})
    options = ("--engine", "onnx", "--hz", "20", "--seconds", "1", "--prompt", "go", "--handover")
    assert main(["run", str(bundle), *options, "rtc"]) == 1
    assert "expected rtc:no-jacobian or rtc:ramp on engine onnx, got rtc:guided" in capsys.readouterr().err


@pytest.mark.slow  # a further export
def test_short_memory_leaves_norms_unfolded(smolvla_bundle, golden, tmp_path, monkeypatch, caplog):
    path, g = tmp_path / "policy.gguf", Golden(golden / "smolvla-2cam")
    shutil.copyfile(smolvla_bundle("smolvla-2cam"), path)
    monkeypatch.setattr(opening.machine, "memory", lambda: (1 << 20, 1 << 20))
    with caplog.at_level("INFO"):
        policy = load(path, engine="onnx", threads=1)
    assert "copies of the weights do not fit the memory" in caplog.text
    assert set(policy.engine.graphs.rewrites) == set(load(path, engine="plan").engine.plan.applied) - {
        "fold-norms", "pack-qkv", "sigmoid-gelu"
    }  # fmt: skip
    actions = policy.infer(replace(policy.dummy_observation(), **g.observation()))
    assert_parity(actions.actions, g.numpy("actions")[0])


def test_onnx_runtime_reports_to_nobody(tmp_path: Path) -> None:
    """Its release 1.31 for Linux keeps an id of the machine and a list of sessions, to send them, unless it is told."""
    code = "import sinew; sinew.load('blocks', engine='onnx').warm_up()"
    environment = {
        key: value for key, value in os.environ.items() if key not in ("ORT_DISABLE_TELEMETRY", "CI")
    }
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in str(path).lower()]

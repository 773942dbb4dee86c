"""Graphs that are shipped without weights: they are what an export writes, and compute what eager computes."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from sinew_eval.episodes.adapters import make_env

from research.policies.graphs import POLICIES, write
from sinew import load
from sinew.bundle import Bundle
from sinew.core import BundleError, SinewError
from sinew.engine.backend import choose
from sinew.engine.onnx.borrowed import INLINE, SHIPPED, borrow, shipped, shipped_folder
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import STAGES, GraphSet
from tests.closeness import assert_close, rounding
from tests.covering import some
from tests.engines import eager_rounding, run_one

ASSETS = SHIPPED.parent
# Constants that torch computed (rotary tables, a product of two small weights), relative to the largest: another
# processor's kernels may round them otherwise, in a sum of at most 256 products.
ROUNDING = 256 * float(np.finfo(np.float32).eps)
ENVS = {
    "act": "sinew/BlocksGoal-v0",
    "blocks": "sinew/Blocks-v0",
    "blocks-rtc": "sinew/Blocks-v0",
    "egg": "sinew/Egg-v0",
    "pen": "sinew/Pen-v0",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Export a policy again, once."""
    folder, done = tmp_path_factory.mktemp("graphs"), {}

    def make(name: str) -> Path:
        if name not in done:
            write(ASSETS / f"{name}.gguf", folder / name)
            done[name] = folder / name
        return done[name]

    return make


def form(path: Path) -> tuple[list[Any], dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Return a graph's nodes with values numbered in order, its own constants, and the shapes of what it borrows."""
    graph = onnx.load(str(path), load_external_data=False).graph
    lent = {each.name: tuple(each.dims) for each in graph.initializer if each.external_data}
    own = {each.name: numpy_helper.to_array(each) for each in graph.initializer if not each.external_data}
    names = {each.name: each.name for each in (*graph.input, *graph.output)} | dict(
        zip(lent, lent, strict=True)
    )
    for node in graph.node:
        for name in (*node.input, *node.output):
            names.setdefault(name, str(len(names)))
    nodes = [
        (
            node.domain,
            node.op_type,
            [names[name] for name in node.input],
            [names[name] for name in node.output],
            sorted(each.SerializeToString() for each in node.attribute),
            sorted((each.key, each.value) for each in node.metadata_props),
        )
        for node in graph.node
    ]
    return nodes, {names[name]: array for name, array in own.items() if name in names}, lent


def close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype != np.float32:
        return np.array_equal(a, b)
    return bool(np.abs(a - b).max(initial=0.0) <= ROUNDING * np.abs(b).max(initial=0.0))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("act", "blocks", "blocks-rtc", "egg", "pen")],
)
def test_what_is_shipped_is_what_an_export_writes(made, name: str) -> None:
    ours, again = shipped_folder(ASSETS / f"{name}.gguf"), made(name)
    assert shipped(ASSETS / f"{name}.gguf") == ours
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in again.iterdir())
    # Files name the build of torch that wrote them: their hashes are their own.
    assert replace(GraphSet.load(ours), sha256={}) == replace(GraphSet.load(again), sha256={})
    for stage in STAGES:
        nodes, constants, lent = form(ours / f"{stage}.onnx")
        new_nodes, new_constants, new_lent = form(again / f"{stage}.onnx")
        assert (nodes, lent, list(constants)) == (new_nodes, new_lent, list(new_constants))
        assert sorted(lent) == sorted(GraphSet.load(ours).borrows[stage])
        assert all(close(constants[key], new_constants[key]) for key in constants)
    for table in ours.glob("moments-*.npy"):
        assert close(np.load(table), np.load(again / table.name))


def test_every_embedded_policy_has_graphs_and_nothing_else_is_there() -> None:
    assert len(POLICIES) == 5
    assert sorted(SHIPPED.iterdir()) == sorted(map(shipped_folder, POLICIES))
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 0.6e6


@pytest.mark.parametrize(
    "path", some(POLICIES, ASSETS / "blocks.gguf", ASSETS / "egg.gguf"), ids=lambda path: path.stem
)
def test_the_same_chunks_as_eager(path: Path) -> None:
    eager, onnx_policy = (load(path, "cpu", engine=engine, threads=1) for engine in ("eager", "onnx"))
    assert onnx_policy.engine.directory == shipped_folder(path)
    assert onnx_policy.facts.weights_nbytes <= eager.facts.weights_nbytes
    env, adapter = make_env(ENVS[path.stem])
    for seed in range(3):
        raw, info = env.reset(seed=seed)
        observation = {**adapter.observation(raw), "prompt": adapter.task(info), "seed": seed}
        wanted = rounding(lambda observation=observation: eager.infer(observation).actions)
        assert_close(wanted, onnx_policy.infer(observation).actions)
    env.close()


def test_borrowing_another_tensor_is_seen(tmp_path: Path) -> None:
    pen = ASSETS / "pen.gguf"
    bundle, policy = Bundle(pen), load(pen, "cpu", engine="eager", threads=1)
    prepared = policy.prepare(policy.dummy_observation())
    wanted = eager_rounding(policy.engine.model, prepared.inputs, prepared.noise, prepared.steps)

    def refusal(folder: Path) -> str:
        engine = OnnxEngine(folder, threads=1, solver=policy.spec.solver, bundle=bundle)
        return wanted.refusal(run_one(engine, prepared.inputs, prepared.noise, prepared.steps)[0])

    folder = tmp_path / "graphs"
    shutil.copytree(shipped_folder(pen), folder)
    assert not refusal(folder)
    graph = onnx.load(str(folder / "step.onnx"), load_external_data=False)
    first, second = (f"expert.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    swap = {first: second, second: first}
    for node in graph.graph.node:
        node.input[:] = [swap.get(name, name) for name in node.input]
    onnx.save_model(graph, str(folder / "step.onnx"))
    with pytest.raises(BundleError, match=r"step\.onnx: was changed after the export"):
        refusal(folder)
    GraphSet.load(folder).save(folder)  # whoever does it knows what a record is
    assert refusal(folder)


def test_graphs_are_for_their_bundle_alone(tmp_path: Path) -> None:
    pen, other = ASSETS / "pen.gguf", tmp_path / "renamed.gguf"
    shutil.copyfile(pen, other)
    assert shipped(other) == shipped_folder(pen)
    with other.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert shipped(other) is None
    with pytest.raises(BundleError, match="these graphs have no weights; pass the bundle"):
        OnnxEngine(shipped_folder(pen), threads=1, solver=Bundle(pen).manifest.spec.solver)
    with pytest.raises(
        BundleError,
        match="expected a bundle with the tensor .* in float32 or bfloat16, which .*pen.gguf lacks",
    ):
        OnnxEngine(
            shipped_folder(ASSETS / "blocks.gguf"),
            threads=1,
            solver=Bundle(pen).manifest.spec.solver,
            bundle=Bundle(pen),
        )
    record = json.loads((shipped_folder(pen) / "graphs.json").read_text())
    (tmp_path / "graphs.json").write_text(json.dumps(record | {"borrows": {"sound": []}}))
    with pytest.raises(BundleError, match="borrows: expected stages from vision, read, step, got sound"):
        GraphSet.load(tmp_path)


def test_folded_graphs_do_not_borrow(exported, tmp_path: Path) -> None:
    """Weights that are not the bundle's would be left in the graphs, which is refused."""
    bundle = exported(tmp_path)
    with pytest.raises(
        BundleError, match=rf"expected at most {INLINE} bytes of constants besides the bundle's"
    ):
        borrow(next(bundle.parent.glob("*.onnx-*")), Bundle(bundle))


def test_torch_decides_who_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(ASSETS / "blocks.gguf")
    assert choose(bundle, device="cpu").engine == "plan"
    monkeypatch.setitem(sys.modules, "torch", None)
    choice = choose(bundle)
    assert choice.engine == "onnx"
    assert "Sinew contains graphs of this policy" in choice.engine_reason
    assert "torch" in choice.engine_reason
    with pytest.raises(SinewError, match="engine plan needs torch"):
        choose(bundle, "plan")


def test_records_of_before_still_load(tmp_path: Path) -> None:
    record = replace(GraphSet.load(shipped_folder(ASSETS / "pen.gguf")), borrows={}, sha256={})
    record.save(tmp_path)
    text = json.loads((tmp_path / "graphs.json").read_text())
    del text["borrows"]
    (tmp_path / "graphs.json").write_text(json.dumps(text))
    assert GraphSet.load(tmp_path) == record

"""Heads that speak: the engine owns the loop, so a sentence ends early, is cancelled, and is exported as one token."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinew_perf.trace import trace

from sinew.core import BundleError, CancelledError, SinewError
from sinew.core.fields import from_json, to_json
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.engine import Engine
from sinew.engine.example import Shapes
from sinew.engine.onnx.graphs import GraphSet, operators
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.engine.watch import Watch
from sinew.models.base import Model
from sinew.processing import ModelInputs, stack
from sinew.steps.action_tokens.base import ActionTokens
from tests.contract.test_unlike_models import CPU, VIEWS, observation, processing
from tests.covering import some
from tests.engine.cuda.cuda_cases import Frozen
from tests.engine.stand_ins import LANGUAGE, SIDE, make

ENGINES = ("eager", "plan", "cuda", "cuda graphs", "onnx")
ONE_LAYER = replace(LANGUAGE, num_layers=1)  # of two, the export takes as long as all else here


def speaking(**sizes: Any) -> Model:
    return make("speaking", seed=1, language=ONE_LAYER, **sizes)  # a seed whose sentences end differently


@pytest.fixture(scope="module")
def said() -> list[int]:
    """A sentence of the stand-in that nothing ends."""
    model = speaking()
    engine = EagerEngine(model, CPU)
    return engine.say(engine.read(observation(model)[0].batched()))[0].tolist()


@pytest.fixture(scope="module")
def ends(said) -> int:
    """The token that shall end sentences: one that the model says once, in the middle."""
    return next(token for place, token in enumerate(said) if 3 < place < 9 and token not in said[:place])


@pytest.fixture(scope="module")
def speaks(ends) -> Model:
    return speaking(end=ends)


@pytest.fixture(scope="module")
def graphs(speaks, tmp_path_factory) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from sinew.engine.onnx.export import ON_ONNX, export_graphs

    folder = tmp_path_factory.mktemp("graphs")
    sizes = {"views": VIEWS, "height": SIDE, "width": SIDE, "steps": (1,)}
    export_graphs(Plan.of(speaks, 1, ON_ONNX), folder, architecture="stand-in", **sizes)
    return folder


@pytest.fixture(scope="module", params=some(ENGINES, *ENGINES[:4]))
def engine(request, speaks) -> Engine:
    if request.param == "eager":
        return EagerEngine(speaks, CPU)
    if request.param == "plan":
        return PlannedEngine(Plan.of(speaks, 1), CPU)
    if request.param == "onnx":
        from sinew.engine.onnx.engine import OnnxEngine

        return OnnxEngine(request.getfixturevalue("graphs"), threads=1, solver=speaks.solver)
    recorder = Frozen() if request.param == "cuda graphs" else None
    plan = Plan.of(speaks, rewrites=ON_CUDA)
    return CudaEngine(plan, CPU, processing=processing(speaks), recorder=recorder)


def run(engine: Engine, inputs: ModelInputs, watch: Watch | None = None) -> np.ndarray:
    model = speaking()
    return engine.run(inputs, np.zeros((len(inputs.tokens), *model.noise_shape), np.float32), 1, None, watch)


def test_a_sentence_that_ends_costs_its_own_tokens(engine, speaks, said, ends):
    watch = Watch()
    (chunk,) = run(engine, observation(speaks)[0].batched(), watch)
    place = said.index(ends)
    assert chunk.reshape(-1)[: place + 1].tolist() == [*said[:place], 0]
    assert len(watch.timing().step_ms) == place + 1 < speaks.action_tokens.most == len(said)
    found = engine.trace(observation(speaks)[0].batched(), np.zeros((1, *speaks.noise_shape), np.float32), 1)
    assert [int(token.item()) for token in found.head[:-1]] == said[: place + 1]
    np.testing.assert_array_equal(found.head[-1], chunk)
    assert {"kv.0.0", "valid", "last"} <= set(found.prefix)
    assert not any("spoken" in name for name in found.prefix)


def test_a_sentence_is_cancelled_between_two_tokens(engine, speaks):
    """An event that is set while the third token is said; the same engine speaks again afterwards."""
    cancel, laps = threading.Event(), []

    class Counting(Watch):
        def lap(self, stage: str) -> None:
            laps.append(stage)
            if laps.count("step") == 3:
                cancel.set()
            super().lap(stage)

    inputs = observation(speaks)[0].batched()
    with pytest.raises(CancelledError):
        run(engine, inputs, Counting(cancel))
    assert laps == ["vision", "prefix", *["step"] * 3]
    assert np.isfinite(run(engine, inputs)).all()


def test_robots_whose_sentences_end_at_different_tokens(engine, speaks):
    """A batch speaks until the last of them has ended; what stands behind the end of the others means nothing."""
    alone = [observation(speaks, tokens)[0] for tokens in (4, 5, 7, 11)]
    watches = [Watch() for _ in alone]
    chunks = [run(engine, inputs.batched(), watch)[0] for inputs, watch in zip(alone, watches, strict=True)]
    lengths = [len(watch.timing().step_ms) for watch in watches]
    assert len(set(lengths)) > 1
    together = Watch()
    found = run(engine, stack(alone, processing(speaks).prompt), together)
    np.testing.assert_array_equal(found, chunks)
    assert len(together.timing().step_ms) == max(lengths)


def test_a_sentence_that_is_refused_harms_no_other(said):
    """Alone it is an error with its reason, in a batch its chunk is not finite, which the policy refuses."""
    engine = EagerEngine(speaking(end=said[0] - 1), CPU)  # its first token is the refused one
    refused, other = (observation(engine.model, tokens)[0] for tokens in (5, 7))
    with pytest.raises(SinewError, match=f"the first token must not be {said[0]}"):
        run(engine, refused.batched())
    found = run(engine, stack([refused, other], processing(engine.model).prompt))
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], run(engine, other.batched())[0])


@pytest.mark.slow  # as all that reads its graphs
def test_an_export_is_one_token(graphs, speaks):
    path = graphs / "step.onnx"
    assert list(operators(path, path.read_bytes())).count("ArgMax") == 1
    record = GraphSet.load(graphs)
    assert record.speaks == (speaks.action_tokens,)
    assert len(record.said) == 2 + 2 * speaks.config.language.num_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("said", (), "said and speaks must both be present"),
        ("said", ("context.spoken.before",), "including context.spoken.token"),
        ("said", ("context.spoken.token", "nothing"), "names from reads"),
        ("speaks", (), "said and speaks must both be present"),
    ],
)
def test_records_that_do_not_fit_are_refused(graphs, tmp_path, field, value, why):
    record = replace(GraphSet.load(graphs), **{field: value})
    (tmp_path / "graphs.json").write_text(to_json(record))
    with pytest.raises(BundleError, match=why):
        GraphSet.load(tmp_path)


@pytest.mark.slow
def test_sentences_that_no_record_may_ask_for(graphs, tmp_path):
    text = (graphs / "graphs.json").read_text()
    (tmp_path / "graphs.json").write_text(text.replace('"most": 12', '"most": 100000'))
    with pytest.raises(BundleError, match=r"speaks\[0\]: counted: most: expected 1 to 8192, got 100000"):
        GraphSet.load(tmp_path)
    with pytest.raises(BundleError, match="kind: expected one of bins"):
        from_json('[{"kind": "songs"}]', tuple[ActionTokens, ...], "speaks")


def test_a_trace_counts_every_token(speaks):
    """What `sinew perf` says: the head once, as often as the longest sentence has tokens."""
    found = trace(speaks, Shapes(VIEWS, SIDE, SIDE, 5, 1))
    assert found.steps == speaks.action_tokens.most
    assert 0 < found.flops("head") < found.flops("prefix")


def test_the_longest_sentence_of_one_token():
    engine = EagerEngine(speaking(most=1), CPU)
    with torch.inference_mode():
        assert engine.say(engine.read(observation(engine.model)[0].batched())).shape == (1, 1)

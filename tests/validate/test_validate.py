"""`sinew validate` passes every engine as it is, and sees one wrong layer in each."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from sinew import load
from sinew.bundle import Bundle, write_bundle
from sinew.bundle.schema import COMPONENTS
from sinew.checks.validate.observations import random_observations
from sinew.checks.validate.parity import (
    COSINE,
    LARGEST,
    Difference,
    StageParity,
    bounds_of,
    compare,
    distance,
)
from sinew.checks.validate.record import EPISODES, kept_record
from sinew.checks.validate.report import float32_bounds
from sinew.cli import main
from sinew.engine import proofs
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.policy import Policy
from tests.covering import pairs

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
ENGINES = ("eager", "plan", "onnx", "cuda")
# Engines may fold and pack layers, so a wrong one is named by what it holds; all of these are in every model.
LAYERS = {"vision": "vision.", "prefix": "language.", "head": "expert."}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pen policy, for graphs lie beside their bundle."""
    path = tmp_path_factory.mktemp("validate") / "pen.gguf"
    shutil.copyfile(ASSETS / "pen.gguf", path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def reference(bundle: Path) -> Policy:
    return load(bundle, "cpu", "fp32", "eager")


@pytest.fixture(scope="module")
def served(
    bundle: Path, reference: Policy, request: pytest.FixtureRequest, tmp_path_factory
) -> Callable[[str], tuple[Path, Policy]]:
    """The bundle that an engine is judged on, and its reference: for ONNX Runtime the one that is exported anyway."""

    @cache
    def on(engine: str) -> tuple[Path, Policy]:
        if engine != "onnx":
            return bundle, reference
        path = request.getfixturevalue("exported")(tmp_path_factory.mktemp("graphs"))
        return path, load(path, "cpu", "fp32", "eager")

    return on


def compared(policy: Policy, reference: Policy):
    return compare(policy, reference, islice(random_observations(reference), 2))


def corrupt(policy: Policy, stage: str) -> str:
    """Zero one matrix of a stage in the engine itself; return its name."""
    if policy.engine_name == "onnx":
        return corrupt_graph(policy, {"vision": "vision", "prefix": "read", "head": "step"}[stage])
    matrices = [
        (name, parameter)
        for name, parameter in policy.engine.model.named_parameters()
        if name.startswith(LAYERS[stage]) and parameter.ndim == 2 and "embed" not in name
    ]
    name, parameter = matrices[0]  # of the last layers some are read by nothing
    parameter.data = torch.zeros_like(parameter)  # its own: the file's memory is the reference's too
    return name


def corrupt_graph(policy: Policy, stage: str) -> str:
    import onnx
    import onnxruntime

    folder = policy.engine.directory
    model = onnx.load(str(folder / f"{stage}.onnx"))
    matrices = [
        tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and np.prod(tensor.dims) > 4000
    ]
    tensor = matrices[0]
    values = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), tensor.name))
    policy.engine.sessions[stage] = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return tensor.name


@pytest.fixture(scope="module")
def small(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pen policy as engine cpu takes it: every layer that can be in int8 codes."""
    source, out = Bundle(bundle), tmp_path_factory.mktemp("small") / "small.gguf"
    formats = plan_formats(source, dict.fromkeys(COMPONENTS, "int8"))
    write_bundle(out, lambda: source.manifest, lowbit_sources(source, formats))
    return out


@pytest.mark.parametrize("stage", [None, *LAYERS])
def test_the_verb_judges_engine_cpu(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys, stage: str | None
) -> None:
    """The bundle passes as it is. With the codes of one layer at zero it fails, and only then is vision wrong where
    the layer is one of vision."""
    opened, zeroed = Policy.__init__, []

    def broken(self: Policy, *arguments: object, **options: object) -> None:
        opened(self, *arguments, **options)
        if self.engine_name == "cpu" and stage is not None:
            zeroed.append(corrupt(self, stage))

    monkeypatch.setattr(Policy, "__init__", broken)
    command = ["validate", str(small), "--engine", "cpu", "--device", "cpu", "--observations", "1"]
    status = main([*command, "--episodes", "0", "--json"])
    found = json.loads(capsys.readouterr().out)
    wrong = {each["name"] for each in found["parity"]["stages"] if not each["passed"]}
    assert found["parity"]["engine"] == "cpu"
    assert len(zeroed) == (stage is not None)
    assert (status, found["passed"]) == ((0, True) if stage is None else (1, False)), (
        zeroed,
        found["parity"],
    )
    assert ("vision" in wrong) == (stage == "vision"), (zeroed, found["parity"])


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_pass_as_they_are(served, engine: str) -> None:
    bundle, reference = served(engine)
    found = compared(load(bundle, "cpu", engine=engine), reference)
    assert found.passed, found.to_dict()
    assert found.observations == 2
    assert [stage.name for stage in found.stages.values()] == ["vision", "prefix", "head", "actions"]
    assert all(len(stage.differences) == 2 for stage in found.stages.values())
    if engine != "onnx":
        assert found.indices["language.embed_tokens"]


@pytest.mark.parametrize(
    ("stage", "engine"),
    pairs(LAYERS, ENGINES, ("vision", "eager"), ("prefix", "plan"), ("head", "onnx"), ("vision", "cuda")),
)
def test_one_wrong_layer_is_seen(served, engine: str, stage: str) -> None:
    bundle, reference = served(engine)
    policy = load(bundle, "cpu", engine=engine)
    name = corrupt(policy, stage)
    found = compared(policy, reference)
    assert not found.passed, name
    wrong = [each.name for each in found.stages.values() if not each.passed]
    assert "head" in wrong
    assert ("vision" in wrong) == (stage == "vision"), (name, found.to_dict())


def test_one_wrong_index_is_seen(bundle: Path, reference: Policy) -> None:
    policy = load(bundle, "cpu", engine="plan")
    embed = policy.engine.model.language.embed_tokens
    embed.register_forward_pre_hook(lambda _, ids: (ids[0].roll(1, -1),), prepend=True)
    found = compared(policy, reference)
    assert found.indices["language.embed_tokens"] is False
    assert not found.passed


def test_shapes_and_numbers_that_are_none_are_infinitely_far() -> None:
    assert distance(np.zeros(3), np.zeros(4)) == float("inf")
    assert distance(np.array([np.nan]), np.ones(1)) == float("inf")
    assert distance(np.array([1.1]), np.ones(1)) == pytest.approx(0.1)


def test_a_difference_by_cosine_and_by_the_largest() -> None:
    wanted = np.array([3.0, 4.0])
    found = Difference.of(np.array([3.0, 4.5]), wanted)
    assert found.relative == pytest.approx(0.1)
    assert found.largest == pytest.approx(0.5)
    assert found.cosine == pytest.approx(1 - (9 + 18) / (5 * np.hypot(3, 4.5)))
    assert Difference.of(2 * wanted, wanted).cosine == pytest.approx(0, abs=1e-15)
    # A float32 chunk's own rounding: 1 - a * b of unit vectors has no digit left there.
    assert 0 < Difference.of(wanted + np.array([1e-9, 0.0]), wanted).cosine < 1e-18
    zero = np.zeros(2)
    assert (Difference.of(zero, zero).cosine, Difference.of(wanted, zero).cosine) == (0.0, 1.0)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("name", "difference", "as_float32"),
    [
        ("actions", Difference(1e-6, COSINE / 2, LARGEST / 2), True),
        ("actions", Difference(1e-6, COSINE / 2, 2 * LARGEST), False),
        ("head", Difference(1e-6, COSINE / 2, 2 * LARGEST), True),  # in units of its own
        ("head", Difference(1e-6, 2 * COSINE, 0.0), False),
    ],
)
def test_float32_has_to_reach_the_required_bounds(strict, name, difference, as_float32) -> None:
    """The same difference passes in a lower precision, and is named there."""
    stage = StageParity(name, 1e-3, strict, [difference])
    assert (stage.as_float32, stage.passed) == (as_float32, as_float32 or not strict)
    parity = {"passed": stage.passed, "precision": "bf16", "stages": [stage.to_dict()]}
    played = {"passed": True, "episodes": EPISODES, "wins": 95, "recorded_wins": 100, "text": "passes"}
    record = kept_record(ASSETS / "pen.gguf", parity, "typed", played)
    assert [line for line in record["weaker"] if f"relative L2 of bf16 ({name} 1e-03)" in line] == record[
        "weaker"
    ]
    assert bool(record["weaker"]) == (stage.passed and not as_float32)


@pytest.mark.parametrize(
    ("wins", "episodes", "passed", "weak"),
    [(95, 100, True, False), (94, 100, False, False), (18, 20, True, True), (0, 0, True, True)],
)
def test_success_is_held_to_a_share_of_the_references(wins, episodes, passed, weak) -> None:
    """0.95 of it over 100 episodes. Fewer episodes pass by the gate's own rule, and the record names that."""
    played = {"passed": True, "episodes": episodes, "wins": wins, "recorded_wins": episodes, "text": "passes"}
    parity = {"passed": True, "precision": "fp32", "stages": []}
    record = kept_record(
        ASSETS / "pen.gguf", parity, "typed", played if episodes else None, "not played: none fits"
    )
    assert record["passed"] == passed
    assert record["gate"]["passed"] == passed
    assert [("0.95 of the reference's success over 100" in line) for line in record["weaker"]] == [
        True
    ] * weak
    if not passed:
        assert "fails: 94 wins, required are 95 wins, 0.95 of the reference's 100" in record["gate"]["text"]


def test_bounds_follow_the_lowest_precision(bundle: Path) -> None:
    assert bounds_of(load(bundle, "cpu", "bf16", "eager"))["vision"] == 5e-2
    assert bounds_of(load(bundle, "cpu", "fp32", "eager"))["vision"] == 1e-4


@pytest.mark.parametrize(
    ("strict", "reached", "said"),
    [(True, True, ["reached"]), (True, False, ["NOT reached"]), (False, True, [])],
)
def test_the_bounds_of_float32_are_stated(strict: bool, reached: bool, said: list[str]) -> None:
    stages = [{"strict": strict, "as_float32": True}, {"strict": strict, "as_float32": reached}]
    assert [line.rpartition(": ")[2] for line in float32_bounds({"stages": stages})] == said


def test_the_verb_reports_keeps_and_judges(bundle: Path, tmp_path: Path, capsys) -> None:
    command = ["validate", str(bundle), "--engine", "plan", "--device", "cpu", "--observations", "1"]
    assert main([*command, "--episodes", "2", "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["parity"]["engine"] == "plan"
    assert found["parity"]["source"] == "episodes of sinew/Pen-v0"
    assert found["gate"]["env"] == "sinew/Pen-v0"
    assert found["gate"]["episodes"] == 2
    stages = {stage["name"]: stage for stage in found["parity"]["stages"]}
    assert all(stage["one_minus_cosine"] <= COSINE and stage["strict"] for stage in stages.values())
    assert 0 < stages["actions"]["largest"] <= LARGEST
    assert len(found["weaker"]) == 1
    assert "2 episodes" in found["weaker"][0]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "passes" in page
    assert "| vision |" in page
    assert "| 1 - cosine | largest |" in page
    assert "required of float32: 1 - cosine of at most 1e-07 in each stage" in page
    assert "actions within 1e-04 of their spread: reached" in page
    assert found["weaker"][0] in page
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == found
    assert proofs.records(bundle)[-1]["weaker"] == found["weaker"]
    assert proofs.lacking(bundle, "plan", "cpu") == ""


def test_the_verb_fails_on_a_wrong_engine(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    opened = Policy.__init__

    @functools.wraps(opened)  # `sinew.load` reads its options off the signature
    def broken(self: Policy, *arguments: object, **options: object) -> None:
        opened(self, *arguments, **options)
        if self.engine_name == "plan":
            corrupt(self, "head")

    monkeypatch.setattr(Policy, "__init__", broken)
    command = [str(bundle), "--engine", "plan", "--device", "cpu"]
    assert main(["validate", *command, "--observations", "1", "--episodes", "0", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["passed"]
    assert "failed its validation" in proofs.lacking(bundle, "plan", "cpu")
    assert main(["doctor", *command, "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["bundle parity"]["status"] == "fail"
    assert "do not serve with this engine: head" in checks["bundle parity"]["advice"]

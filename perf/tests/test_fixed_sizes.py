"""Policies that fix what others vary (views, rows of a chunk, steps), and stages without products."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from sinew.cli import main
from sinew.core import SinewError
from sinew.engine.example import Shapes
from sinew.models.base import Model
from tests.engine.stand_ins import SIDE, Config, HiddenStates, make

from sinew_perf.hardware import load_hardware
from sinew_perf.machine.calibrate import default_requests
from sinew_perf.machine.measure import measure_stages
from sinew_perf.machine.measure_engine import requests_of
from sinew_perf.memory import fits
from sinew_perf.needs import needs
from sinew_perf.program import PublishedProgram
from sinew_perf.request import TracedRequest
from sinew_perf.roofline import components_record, seconds, timing
from sinew_perf.trace import STAGES


class Placed(HiddenStates):
    """A head with a table of positions, as Evo-1's."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.places = torch.nn.Embedding(config.chunk_size, 4)


def program_of(model: Model) -> PublishedProgram:
    return PublishedProgram("stand-in", model, Shapes(2, SIDE, SIDE, 5, model.solver.fixed_steps or 4))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PublishedProgram:
    """A stand-in in place of whatever a verb is given."""
    program = program_of(make(request.param))
    monkeypatch.setattr(PublishedProgram, "load", classmethod(lambda cls, *args, **options: program))
    return program


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (make("hidden states"), {}),
        (make("two towers"), {"steps": 1}),
        (make("convolutions"), {"cameras": 2, "chunk": 8, "steps": 3}),
        (Placed(Config()), {"chunk": 6}),
    ],
    ids=["none", "single pass", "all", "positions"],
)
def test_sizes_that_a_policy_fixes_are_named(model: Model, fixed: dict[str, int]) -> None:
    program = program_of(model)
    assert program.fixed == fixed
    for name, value in fixed.items():
        assert program.at(TracedRequest(**{name: value})).trace.calls
        with pytest.raises(SinewError, match=f"{name}: expected {value}, which stand-in cannot change, got"):
            program.at(TracedRequest(**{name: value + 1}))
    for request in default_requests(program):  # each can be traced
        assert program.at(request.request).trace.calls
    times = measure_stages(model, "stand-in", default_requests(program)[:1], (SIDE, SIDE), runs=1)
    assert [time.stage for time in times] == list(STAGES)


@pytest.mark.parametrize("served", ["convolutions"], indirect=True)
def test_the_search_leaves_fixed_sizes_alone(served: PublishedProgram) -> None:
    found = fits("stand-in", 1 << 30)
    assert (found.largest["chunk"], found.largest["cameras"]) == (8, 2)
    assert fits("stand-in", 1 << 10).largest == {"chunk": 0, "cameras": 0, "context": 0}


@pytest.mark.parametrize("served", ["convolutions", "hidden states"], indirect=True)
def test_fewer_steps_are_no_answer_where_a_table_has_them_all(served: PublishedProgram) -> None:
    machine = load_hardware("thor")
    whole = seconds(served.components(), machine)
    assert {row.steps for row in needs("stand-in", {"thor": machine}, 0.9 / whole, 1.0)} == {
        served.shapes.steps
    }
    found = needs("stand-in", {"thor": machine}, 1.01 / whole, 1.0)
    assert {row.steps for row in found} == (set() if served.fixed else {served.shapes.steps - 1})


def test_engines_are_measured_with_every_camera_where_none_may_be_missing() -> None:
    for every, views in ((True, {3}), (False, {1, 2, 3})):
        policy = SimpleNamespace(
            spec=SimpleNamespace(views=3, max_prompt_tokens=8, noise_shape=(4, 2)),
            manifest=SimpleNamespace(processing=SimpleNamespace(all_cameras=every)),
        )
        assert {request.views for request in requests_of(policy)} == views


def test_a_stage_without_products_takes_no_time_in_a_roofline() -> None:
    machine = load_hardware("thor")
    parts = program_of(make("convolutions")).components()
    rows = {
        row["component"]: row
        for row in components_record(machine, [timing(p, machine) for p in parts], 0, 0.0)["components"]
    }
    assert (rows["prefix"]["ms"], rows["prefix"]["tflops"]) == (0.0, 0.0)
    assert rows["head"]["tflops"] > 0


@pytest.mark.parametrize("served", ["convolutions"], indirect=True)
def test_no_second_system_without_a_language_model(
    served: PublishedProgram, capsys: pytest.CaptureFixture
) -> None:
    assert (
        main(["perf", "scenario", "smolvla", "--json"]) == 0
    )  # a preset's name; the stand-in is what is read
    out = capsys.readouterr().out
    assert {row["where"] for row in json.loads(out)["rows"]} == {"robot", "server", "split"}
    assert main(["perf", "scenario", "smolvla"]) == 0
    out = capsys.readouterr().out
    assert "System 2" not in out

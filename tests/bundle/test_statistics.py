"""Statistics that no training data gives are named: at conversion, when the bundle is loaded, and by the doctor."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle, statistics
from sinew.bundle.schema import Normalization
from sinew.checks.loaded import bundle as check_bundle
from sinew.convert import convert
from sinew.core import MotionSpec
from sinew.policy import load, open_bundle
from sinew.steps.vector.add_state import AddState
from tests.cases import tiny_bundle

LOW, HIGH = [-1.0, -80.0, 0.1, -2.0, 5.0, -0.5], [1.0, -20.0, 0.9, 2.0, 9.0, 0.7]


def ranges(low=LOW, high=HIGH) -> Normalization:
    return Normalization("quantiles", {"q01": tuple(low), "q99": tuple(high)})


def deviations(mean, std) -> Normalization:
    return Normalization("mean_std", {"mean": tuple(mean), "std": tuple(std)})


def notes(state=None, action=None, steps=(), motion=None, names=()) -> list[str]:
    manifest = open_bundle(tiny_bundle()).manifest
    dim = manifest.spec.state.dim
    recipe = replace(
        manifest.processing, state=state or ranges(), action=action or ranges(), action_steps=steps
    )
    vector = replace(manifest.spec.state, names=names)
    assert dim == len(LOW)
    return statistics.notes(replace(manifest.spec, state=vector, motion=motion), recipe)


def changed(values, index, value):
    return [value if i == index else each for i, each in enumerate(values)]


def test_usual_statistics_have_no_note():
    assert notes() == []
    assert notes(deviations([0, 100, -5, 2, 0, 1], [0.1, 30, 2, 0.5, 1, 0.02])) == []
    assert notes(action=ranges([0.0] * 6, [0.01] * 6)) == []  # metres a step


@pytest.mark.parametrize(
    ("state", "told"),
    [
        # openpi issue 814: a joint that stood still
        (
            ranges(changed(LOW, 2, 1.568643), changed(HIGH, 2, 1.569622)),
            "value 2 .*q01 to q99 spans 0.000979.*2,043 t",
        ),
        (ranges(changed(LOW, 0, -0.0005), changed(HIGH, 0, 0.0005)), "value 0 .*spans 0.001.*2,000 times"),
        (
            ranges(changed(LOW, 4, 2047.0), changed(HIGH, 4, 2049.0)),
            "value 4 .*spans 2",
        ),  # ticks of an encoder
        (ranges([-90.0] * 5 + [3.0], [90.0] * 5 + [3.1]), "value 5 .*spans 0.1"),  # degrees beside others
        (deviations([0.0] * 6, [1.0, 0.5, 2.0, 0.0004, 1.0, 1.0]), "value 3 .*std spans 0.0004.*2,500 times"),
        (
            ranges(changed(LOW, 1, 7.0), changed(HIGH, 1, 7.0)),
            "value 1 did not vary in training and is magnified",
        ),
        (
            deviations([0.0] * 6, changed([1.0] * 6, 2, 0.0)),
            "value 2 did not vary in training and is magnified",
        ),
        (ranges(changed(LOW, 1, -1e12)), "statistics up to 1e\\+12, expected at most 1e\\+09"),
    ],
)
def test_states_that_hardly_vary(state, told):
    (note,) = notes(state)
    assert note.startswith("processing.state: ")
    import re

    assert re.search(told, note), note


def test_names_of_joints_are_in_the_note():
    names = tuple(f"joint{i}" for i in range(6))
    (note,) = notes(ranges(changed(LOW, 2, 1.568643), changed(HIGH, 2, 1.569622)), names=names)
    assert "value 2 (joint2) hardly varied" in note


def test_actions_that_hardly_vary():
    (note,) = notes(action=ranges(changed(LOW, 3, 0.2), changed(HIGH, 3, 0.2001)))
    assert "processing.action: value 3" in note
    assert "the policy moves it by no more than that" in note
    found = notes(action=ranges(LOW, LOW))
    assert any("every chunk is the same" in each for each in found)


RELATIVE = (AddState(tuple(range(5))),)  # the gripper stays absolute


@pytest.mark.parametrize(
    ("state", "action", "told"),
    [
        # LeRobot pull request 4700: the ranges of the state
        (ranges(), ranges(), "5 of 5 ranges are those of the state"),
        (
            ranges([-100.0] * 6, [100.0] * 6),
            ranges([-80, -70, -90, 20, 30, -1], [-20, -10, -15, 80, 90, 1]),
            "5 of 5 ranges do not contain zero",
        ),
        (
            deviations([50, -40, 90, 30, 20, 0], [5] * 6),
            deviations([51, -40, 90, 30.5, 20, 0], [5] * 6),
            "ranges are those of the state|do not contain zero",
        ),
    ],
)
def test_relative_actions_with_statistics_of_absolute_ones(state, action, told):
    found = notes(state, action, RELATIVE)
    import re

    assert any(re.search(told, note) and "relative to the state" in note for note in found), found
    assert not notes(state, action)  # absolute actions with these are as they should be


@pytest.mark.parametrize(
    "action",
    [
        ranges([-3.0, -20, -0.2, -0.5, -2, -0.5], [2.5, 25, 0.3, 0.4, 2, 0.7]),
        ranges([0.0, -20, 0.01, -0.5, -2, -0.5], [2.5, 25, 0.3, 0.4, 2, 0.7]),  # some go in one direction
        deviations([0.1, -0.5, 0, 0.2, 0, 0], [1, 10, 0.1, 0.3, 0.5, 0.2]),
    ],
)
def test_statistics_of_relative_actions_have_no_note(action):
    assert notes(action=action, steps=RELATIVE) == []


def test_absolute_actions_with_statistics_of_relative_ones():
    state = ranges([50.0] * 6, [90.0] * 6)
    action = ranges([-3.0] * 6, [3.0] * 6)
    (note,) = notes(state, action, motion=MotionSpec("absolute"))
    assert "6 of 6 ranges do not overlap the range of the state" in note
    assert notes(state, action) == []  # nothing says that they are absolute


@pytest.mark.parametrize(
    ("stats", "told"),
    [
        ({"min": [0, 5], "max": [1, 2]}, ["max is below min for value 1"]),
        ({"min": [0, 0], "max": [1, 1], "mean": [0.5, 3]}, ["mean is outside of min to max for value 1"]),
        ({"min": [0, 0], "max": [1, 1], "std": [0.4, 0.8]}, ["std is above half of max - min for value 1"]),
        (
            {"min": [0, 0], "max": [1, 1], "q01": [-1, 0], "q99": [1, 1]},
            ["q01 is outside of min to max for value 0"],
        ),
        ({"min": [0, 3], "max": [1, 3], "mean": [0.2, 3.0000001], "std": [0.5, 0]}, []),
        ({"mean": [9], "std": [0]}, []),
    ],
)
def test_statistics_that_contradict_each_other(stats, told):
    assert statistics.impossible(stats) == told


def test_they_are_told_at_conversion_at_load_and_by_the_doctor(golden, tmp_path, caplog):
    path = tmp_path / "checkpoint"
    shutil.copytree(golden / "act-2cam" / "checkpoint", path)
    for file in path.glob("policy_*step*.safetensors"):
        found = load_file(file)
        if "observation.state.std" in found:
            found["observation.state.std"][1] = 1e-4
            found["observation.state.min"] = np.full_like(found["observation.state.std"], 50.0)
            found["observation.state.max"] = np.full_like(found["observation.state.std"], 60.0)
        save_file(found, file)
    out = convert(path, tmp_path / "out.gguf")
    noted = Bundle(out).manifest.provenance.notes
    assert any("value 1 hardly varied in training (std spans 0.0001)" in note for note in noted)
    assert any("impossible for any data set: mean is outside of min to max" in note for note in noted)
    with caplog.at_level(logging.WARNING):
        load(out, engine="eager").close()
    assert any("value 1 hardly varied" in message for message in caplog.messages)
    check = next(each for each in check_bundle(out, {"engine": "eager"}) if each.name == "bundle statistics")
    assert check.status == "warn"
    assert "value 1 hardly varied" in check.detail
    clean = convert(golden / "act-2cam" / "checkpoint", tmp_path / "clean.gguf")
    check = next(
        each for each in check_bundle(clean, {"engine": "eager"}) if each.name == "bundle statistics"
    )
    assert check.status == "ok", json.dumps(check.detail)

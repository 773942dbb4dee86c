"""What is done for whoever says nothing is what our own tables show to be best, and is the same everywhere."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.handovers import TASKS, point
from benchmarks.side_by_side import SideBySide
from sinew.cli import main
from sinew.cli.run import ChunkFlags
from sinew.core import BundleError, MotionSpec
from sinew.policy import load, open_bundle
from sinew_client.control import AS_IS, Settings, choose, parse_handover, parse_rule
from sinew_client.control.defaults import HANDOVER, REPLAN
from tests.cli.test_run import BLOCKS

from sinew_eval.cli.dataset import dataset
from sinew_eval.episodes.runner import EpisodeSettings
from sinew_eval.episodes.settings import Variant
from sinew_eval.report.stats import mcnemar, paired_difference

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "handovers" / "defaults.json"
ASSETS = ROOT / "sinew" / "assets"
OFFSETS = {"kind": "offsets", "action": [0], "state": [0], "scale": 0.5}

# ----------------------------------------------------------------------------- one place says it


def test_everybody_has_the_same_defaults() -> None:
    for owner in (Settings, EpisodeSettings, Variant, ChunkFlags):
        own = {field.name: field.default for field in fields(owner)}
        assert (own["handover"], own["replan"]) == (HANDOVER, REPLAN), owner
    assert inspect.signature(dataset).parameters["replan"].default == REPLAN


@pytest.mark.parametrize(
    ("motion", "policy", "expected", "followed", "because"),
    [
        (None, None, "freeze", None, "waiting is right for all kinds; set --motion to let the robot continue"),
        (None, {"kind": "absolute"}, "aligned", {"kind": "absolute"}, "the policy states that actions are absolute"),
        (None, OFFSETS | {"low": None, "high": 1.0}, "freeze", None, "add up wrongly"),
        ({"kind": "absolute"}, OFFSETS, "aligned", {"kind": "absolute"}, "--motion states"),
        ({"kind": "relative", "action": [0], "state": [0]}, None, "aligned",
         {"kind": "relative", "action": [0], "state": [0]}, "relative targets"),
        (None, asdict(MotionSpec("relative", (0,), (1,))), "aligned",
         {"kind": "relative", "action": [0], "state": [1]}, "the policy states that actions are relative"),
        (None, asdict(MotionSpec("absolute")), "aligned", {"kind": "absolute"}, "the policy states"),
        (None, asdict(MotionSpec("absolute", (0,), (3,))), "aligned",
         {"kind": "absolute", "action": [0], "state": [3]}, "the policy states"),
        (OFFSETS, None, "freeze", OFFSETS, "--motion states"),
        (AS_IS, {"kind": "absolute"}, "freeze", AS_IS, "is unknown"),
    ],
)  # fmt: skip
def test_the_hand_over_follows_from_what_actions_are(
    motion: Any, policy: Any, expected: str, followed: Any, because: str
) -> None:
    found = choose(motion=motion, policy={"motion": policy})
    assert (found.handover, found.motion) == (expected, followed)
    assert because in str(found)
    Settings(20.0, motion=found.motion).controller(1)


def test_what_is_asked_for_is_done_and_follows_what_the_policy_states() -> None:
    stated = {"motion": {**OFFSETS, "action": (0,), "low": None, "high": None}}
    assert choose("aligned", None, stated).motion == OFFSETS
    assert choose("naive", None, stated).motion is None  # a chunk from its first row adds up as it comes
    assert choose("aligned", AS_IS, stated).motion == AS_IS
    assert choose("auto", None, stated, refined=True).handover == "aligned"
    assert choose("auto", None, stated, refined=True).motion is None  # an adapter knows its own
    driven = choose(robot={"kind": "absolute"})
    assert (driven.handover, driven.motion) == ("aligned", {"kind": "absolute"})
    assert "the robot's driver states that actions are absolute" in driven.reason
    assert choose(policy=stated, robot={"kind": "absolute"}).handover == "freeze"
    with pytest.raises(ValueError, match="handover: expected one of"):
        choose("late", None, stated)
    settings = Settings(20.0, motion={"kind": "absolute"})
    assert settings.controller(1).player.handover == parse_handover("aligned")
    assert Settings(20.0).controller(1).player.handover.stops
    assert (parse_rule(REPLAN).horizon(32), parse_rule(REPLAN).horizon(24)) == (8, 6)


# ----------------------------------------------------------------------------- what a bundle states


def test_the_packaged_policies_say_what_their_actions_are() -> None:
    said = {
        name: open_bundle(ASSETS / f"{name}.gguf").manifest.spec for name in ("blocks", "blocks-rtc", "pen")
    }
    assert {name: choose(policy=spec.to_dict()).handover for name, spec in said.items()} == {
        "blocks": "freeze",
        "blocks-rtc": "freeze",
        "pen": "aligned",
    }
    assert said["blocks"].motion.scale == 0.017


@pytest.mark.parametrize(
    "motion",
    [
        MotionSpec("absolute", (0,), (0,)),
        MotionSpec("offsets"),
        MotionSpec("offsets", (0,), (4,)),
        MotionSpec("offsets", (0, 0), (0, 1)),
        MotionSpec("offsets", (0,), (0,), scale=0.0),
        MotionSpec("offsets", (0,), (0,), low=0.5),
        MotionSpec("relative", (0,), (0,), scale=2.0),
    ],
)
def test_a_motion_that_no_robot_can_follow_is_refused_by_name(motion: MotionSpec) -> None:
    from dataclasses import replace

    manifest = open_bundle(BLOCKS).manifest
    with pytest.raises(BundleError, match=r"spec\.motion: (absolute|offsets|relative): expected"):
        replace(manifest, spec=replace(manifest.spec, motion=motion)).check()


@pytest.mark.usefixtures("dry_ends")
def test_convert_takes_it_and_run_prints_what_follows(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = golden / "smolvla-2cam", tmp_path / "policy.gguf"
    words = ["convert", str(source / "checkpoint"), str(out), "--vlm", str(source / "vlm"), "--json"]
    assert main([*words, "--motion", '{"kind": "sideways"}']) == 1
    assert "--motion" in capsys.readouterr().err
    assert main([*words, "--motion", '{"kind": "offsets", "action": [0], "state": [0], "scale": 0.1}']) == 0
    assert open_bundle(out).manifest.spec.motion == MotionSpec("offsets", (0,), (0,), 0.1)
    capsys.readouterr()
    assert main(["run", str(BLOCKS), "--prompt", "go", "--seconds", "600", "--json"]) == 0
    printed = capsys.readouterr()
    assert "hand-over freeze: the policy states that actions are delta actions" in " ".join(
        printed.err.split()
    )
    result = json.loads(printed.out.splitlines()[-1])
    assert (result["settings"]["handover"], result["settings"]["replan"]) == ("freeze", REPLAN)
    assert result["settings"]["motion"] is None


# ----------------------------------------------------------------------------- held against the tables


def _outcomes(found: Mapping[str, Any]) -> dict[int, bool]:
    return {found["first_seed"] + k: each == "1" for k, each in enumerate(found["outcomes"])}


def test_no_table_of_ours_shows_anything_better() -> None:
    """Success of the default is within the paired 95 % interval of every alternative that was played beside it, on
    every embedded task and delay, and the table was made with what is the default today."""
    points = json.loads(TABLE.read_text())
    defaults = {(p["task"], p["latency"]): p for p in points if p["handover"] == "auto"}
    assert {task for task, _ in defaults} == set(TASKS)
    assert all({latency for _, latency in defaults} == {"0ms", "67ms", "100ms", "200ms"} for _ in TASKS)
    for (task, _), there in defaults.items():
        bundle = open_bundle(ASSETS / TASKS[task]["bundle"]).manifest.spec
        assert there["plays"] == str(choose(policy=bundle.to_dict()))
        assert there["replan"] == REPLAN
    for other in points:
        default = defaults[other["task"], other["latency"]]
        assert default["episodes"] == other["episodes"] >= 100
        _, _, high = paired_difference(_outcomes(default), _outcomes(other))
        what = f"{other['task']} {other['latency']}: {other['handover']} beside {default['plays']}"
        assert other is default or high >= 0.0, f"{what}, {mcnemar(_outcomes(default), _outcomes(other))}"


@pytest.mark.parametrize(
    ("task", "latency", "worse", "at_most"),
    [
        # In the tables the default has 97 to 100 %: 17 of 20 and fewer are a chance of at most 0.003. aligned as rows
        # come has 58 %: 17 and more are a chance of 0.01; freeze has 0 % of the pens.
        pytest.param("blocks", "200ms", "aligned", 16, marks=pytest.mark.slow),
        ("pen", "100ms", "freeze", 2),
    ],
)
def test_the_default_wins_where_another_choice_loses(
    task: str, latency: str, worse: str, at_most: int
) -> None:
    what = TASKS[task]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = SideBySide(load(ASSETS / what["bundle"], "cpu", engine="plan", threads=1))
        found = {h: point(what, policy, h, latency, range(5000, 5020), 20) for h in ("auto", worse)}
    finally:
        torch.set_num_threads(before)
    wins = {handover: each["outcomes"].count("1") for handover, each in found.items()}
    assert wins["auto"] >= 18
    assert wins[worse] <= at_most

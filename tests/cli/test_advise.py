"""``sinew recording advise``: from a recorded run of a built-in task to the advice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.cli import main
from sinew.core import ActionChunk
from sinew.policy import Policy, open_bundle
from sinew.records.recorder import record_files

pytest.importorskip("mujoco", reason="the built-in tasks need mujoco")
from benchmarks.truth import ASSETS, opened, record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the pen with whole chunks, which are too old: the log, and the frames in a folder beside it.

    The run is in simulated time, because a busy machine would make its commands late or leave the robot without any.
    """
    folder = tmp_path_factory.mktemp("run")
    record("pen", opened("pen"), {"replan": "full", "latency": "17ms", "handover": "aligned"}, folder)
    return folder


def test_old_plans_of_the_pen_give_a_shorter_interval(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    figure = tmp_path / "ages.png"
    inputs = ("--frames", str(run / "frames"), "--policy", "pen", "--draws", "3", "--plot", str(figure))
    assert main(["recording", "advise", str(run / "run.jsonl"), *inputs, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The pen succeeds with interval 8, not with 12 (research/log/2026-11-29.md).
    (replan,) = (each for each in result["advice"] if each["topic"] == "replan interval")
    assert replan["flags"] in ("--replan 8", "--replan 4", "--replan 2", "--replan 1")
    outdated = {each["age"]: each["outdated_episodes"] for each in result["plans"]["ages"]}
    assert outdated[4] <= 1
    assert outdated[16] >= 5
    assert result["plans"]["abrupt"] == []
    own = result["settings"][0]
    assert own["held"] == result["held"]
    assert figure.stat().st_size > 0


def test_the_seeds_of_an_observation_share_what_the_model_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The actions are those of a policy that reads each observation anew, for each seed."""
    timings = []
    infer = Policy.infer

    def watched(self: Policy, observation: Any) -> ActionChunk:
        chunk = infer(self, observation)
        again = infer(anew, observation)
        assert np.array_equal(chunk.actions, again.actions)
        timings.append(chunk.timing)
        return chunk

    frames = tmp_path / "frames"
    frames.mkdir()
    for file in record_files(run / "frames")[:3]:
        shutil.copy(file, frames)
    with Policy(open_bundle("pen")) as anew:
        monkeypatch.setattr(Policy, "infer", watched)
        flags = ("--frames", str(frames), "--policy", "pen", "--draws", "2")
        assert main(["recording", "advise", str(run / "run.jsonl"), *flags]) == 0
    assert len(timings) == 6
    assert not timings[0].reused_prefix
    assert all(timing.reused_prefix for timing in timings[1::2])
    assert "2 seeds" in capsys.readouterr().out


def test_a_policy_without_noise_needs_one_seed(
    tmp_path: Path, dry_ends: None, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = str(ASSETS / "act.gguf")
    files = ("--record", str(tmp_path / "run.jsonl"), "--frames", str(tmp_path / "frames"))
    assert main(["run", policy, "--robot", "dry", "--seconds", "60", *files]) == 0
    flags = ("--frames", str(tmp_path / "frames"), "--policy", policy, "--draws", "3")
    assert main(["recording", "advise", str(tmp_path / "run.jsonl"), *flags]) == 0
    assert ", 1 seed, 1 episode" in " ".join(capsys.readouterr().out.split())


def test_the_log_alone_gives_no_advice_about_age(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["recording", "advise", str(run / "run.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "the same requests with other settings" in text
    assert "cannot be determined:" in text
    assert "pass --frames and --policy" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "pen"), "--frames FOLDER: --frames and --policy are needed together"),
        (("--frames", "."), "--policy POLICY: --frames and --policy are needed together"),
        (("--plot", "x.png"), "--plot: the figure shows the age of plans"),
        (("--engine", "eager"), "--engine: expected --policy, because this flag is for the policy's engine"),
        (("--policy", "pen", "--frames", "."), "no records (*.npz) in this folder"),
    ],
)
def test_inputs_that_do_not_fit_are_named(
    run: Path, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recording", "advise", str(run / "run.jsonl"), *options]) == 1
    assert says in capsys.readouterr().err


def test_a_file_of_another_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert main(["recording", "advise", str(tmp_path / "x.jsonl")]) == 1
    assert "expected a decision log; write one with `sinew run ... --record FILE`" in capsys.readouterr().err

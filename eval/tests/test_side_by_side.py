"""Episodes beside each other: the chunks and the outcomes of episodes that are played alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.handovers import TASKS, episode_of, play, point
from benchmarks.side_by_side import SideBySide
from sinew.policy import Policy, load

from sinew_eval.episodes.policies import InProcess
from sinew_eval.episodes.runner import EpisodeSettings
from sinew_eval.episodes.settings import Latency

BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"
pytestmark = pytest.mark.skipif(not BLOCKS.exists(), reason="no trained policy")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load(BLOCKS, "cpu", engine="plan", threads=1)


@pytest.mark.parametrize("kind", ["guided", "no-jacobian", "ramp"])
def test_a_batch_gives_each_request_its_own_chunk(policy: Policy, kind: str) -> None:
    """Prompts of different lengths; one request that continues a chunk between two that do not."""
    rng = np.random.default_rng(5)
    asked: list[dict[str, Any]] = [
        {
            "images": {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("front", "wrist")},
            "state": np.float32([0.1, -0.05, 0.2, 0.03]),
            "prompt": prompt,
            "seed": seed,
        }
        for seed, prompt in enumerate(("red left", "put the red block into the left bin", "blue, right"))
    ]
    previous = rng.uniform(-1, 1, (20, 4)).astype(np.float32)
    asked[1] |= {"previous": previous, "delay": 4, "horizon": 8, "rtc": kind}
    found = SideBySide(policy).batch([policy.prepare(request) for request in asked])
    for request, chunk in zip(asked, found, strict=True):
        np.testing.assert_allclose(chunk, policy.infer(request).actions, atol=2e-4)


def test_episodes_end_as_those_played_alone(policy: Policy) -> None:
    task = {**TASKS["blocks"], "limit": 20}
    conduct = EpisodeSettings(8, Latency("100ms"), "rtc")
    together = SideBySide(policy)
    beside = together.play(episode_of(task, together, conduct), range(5000, 5003), width=2)
    alone = InProcess(str(BLOCKS), device="cpu", engine="plan", threads=1)
    for episode in beside:
        single = episode_of(task, SingleFrames(alone), conduct)(episode.seed)
        assert (episode.delays, episode.steps) == (single.delays, single.steps)
        assert episode.jerk == pytest.approx(single.jerk, abs=1e-3)


def test_more_episodes_of_a_point_play_those_that_it_lacks(policy: Policy, tmp_path: Path) -> None:
    together, points, path = SideBySide(policy), [], tmp_path / "points.json"
    asked = argparse.Namespace(seed=5000, latency="100ms", handovers="aligned", limit=None, width=2)
    task = {**TASKS["blocks"], "limit": 12, "edge_adapter": ""}
    for episodes in (1, 3, 3):
        play(argparse.Namespace(**vars(asked), episodes=episodes), task, together, points, path)
    assert points == json.loads(path.read_text())
    (found,) = points
    whole = point(task, together, "aligned", "100ms", range(5000, 5003), width=2)
    for name in ("seam", "jerk"):
        assert found[name] == pytest.approx(whole[name], abs=2e-3)
    rounded = dict.fromkeys(("seam", "jerk"))
    assert found | rounded == whole | rounded
    another = argparse.Namespace(**{**vars(asked), "limit": 4}, episodes=1)
    play(another, {**task, "limit": 4}, together, points, path)
    assert [(each["limit"], each["episodes"]) for each in points] == [(12, 3), (4, 1)]


def test_filters_and_limits_are_played(policy: Policy) -> None:
    together, task = SideBySide(policy), {**TASKS["blocks"], "limit": 12, "edge_adapter": ""}
    plain, filtered, limited = (
        point(task, together, f"aligned+offsets{more}", "0ms", range(5000, 5001), width=1)
        for more in ("", "+lowpass:1.5", "+velocity:2+acceleration:20")
    )
    assert filtered["jerk"] < 0.9 * plain["jerk"]
    assert limited["jerk"] < 0.9 * plain["jerk"]
    with pytest.raises(
        SystemExit, match="unknown addition 'median:3'; known are offsets, .*lowpass.*jerk, speed"
    ):
        point(task, together, "aligned+median:3", "0ms", range(5000, 5001), width=1)


def test_what_an_episode_raises_is_raised(policy: Policy) -> None:
    def fails(seed: int) -> None:
        raise ValueError(f"seed {seed}")

    with pytest.raises(ValueError, match="seed 3"):
        SideBySide(policy).play(fails, [3], width=4)


class SingleFrames:
    """A policy that draws the frames of benchmarks.handovers itself."""

    def __init__(self, policy: InProcess):
        self.policy, self.chunk_size, self.start = policy, policy.chunk_size, policy.start
        self.committed_rows, self.motion = policy.committed_rows, policy.motion
        self.served = policy.served

    def infer(self, observation: Any, seed: int) -> tuple[np.ndarray, float]:
        images = {name: frame() for name, frame in observation["images"].items()}
        return self.policy.infer({**observation, "images": images}, seed)

    def close(self) -> None:
        self.policy.close()

"""Requests that contain an older frame while a camera's newest one is not needed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sinew_client import ClientError
from sinew_client.control.listeners.views import ViewRefresh, ViewRule

from sinew.cli import main
from sinew.policy import load


def frame(value: int) -> np.ndarray:
    return np.full((16, 16, 3), value, np.uint8)


def used(rule: ViewRule, values: list[int]) -> list[int]:
    return [int(rule.frame(frame(value))[0, 0, 0]) for value in values]


def test_each_nth_frame_is_new() -> None:
    rule = ViewRule("front:every:3")
    assert used(rule, [1, 2, 3, 4, 5, 6, 7]) == [1, 1, 1, 4, 4, 4, 7]
    assert (rule.requests, rule.repeated) == (7, 4)


def test_a_frame_is_new_if_the_picture_has_changed_enough() -> None:
    assert used(ViewRule("front:change:4"), [10, 12, 14, 15, 16, 20]) == [10, 10, 10, 15, 15, 20]
    noise = np.random.default_rng(0).integers(-20, 21, (16, 16, 3))
    rule = ViewRule("front:change:8")
    first = rule.frame(frame(100))
    assert rule.frame((frame(100) + noise).astype(np.uint8)) is first  # noise of single pixels is averaged


def test_an_episode_begins_with_the_newest_frame() -> None:
    rule = ViewRule("front:never")
    assert used(rule, [1, 2, 3]) == [1, 1, 1]
    rule.reset()
    assert used(rule, [4, 5]) == [4, 4]


def test_a_frame_in_use_does_not_change_with_the_camera_buffer() -> None:
    rule, buffer = ViewRule("front:never"), frame(1)
    rule.frame(buffer)
    buffer[:] = 9
    assert used(rule, [9]) == [1]


@pytest.mark.parametrize(
    "text", ["", "front", "front:sometimes", "front:every", "front:every:0", "front:every:1.5", "front:change:-1",
             "front:change:x", "front:change:999", "front:never:3", ":never", "front:never,front:every:2"],
)  # fmt: skip
def test_rules_of_another_form_are_rejected(text: str) -> None:
    with pytest.raises(ClientError, match=r"refresh: expected"):
        ViewRefresh.parse(text)


def test_a_camera_that_the_policy_lacks_is_named() -> None:
    with pytest.raises(ClientError, match="expected one of the cameras front, wrist, got 'top'"):
        ViewRefresh.parse("top:never").check(["front", "wrist"])


def test_a_policy_computes_fewer_views_of_repeated_frames() -> None:
    """The vision tower does not run for an older frame, and the actions are those of that frame."""
    policy, plain = load("blocks", reuse=True, engine="plan"), load("blocks", engine="plan")
    rule, rng = ViewRule("front:every:2"), np.random.default_rng(0)
    views = []
    for _ in range(4):
        observation: dict[str, Any] = {
            "images": {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("front", "wrist")},
            "state": np.zeros(4, np.float32),
            "prompt": "put the red block into the left bin",
            "seed": 1,
        }
        observation["images"]["front"] = rule.frame(observation["images"]["front"])
        chunk = policy.infer(observation)
        views.append(2 - chunk.timing.reused_views)
        assert np.allclose(chunk.actions, plain.infer(observation).actions, atol=1e-4)
    assert views == [2, 1, 2, 1]


def test_a_run_states_how_many_frames_were_older(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco", reason="the built-in tasks need mujoco")
    line = ("run", "pen", "--robot", "gym:sinew/Pen-v0", "--episodes", "1")
    assert main([*line, "--set", "refresh=now:every:2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    repeated, total = (int(word) for word in result["refresh"].split() if word.isdecimal())
    assert 0 < repeated <= total / 2
    assert main([*line, "--set", "refresh=top:never"]) == 1
    assert "expected one of the cameras" in capsys.readouterr().err

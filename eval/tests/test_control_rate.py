"""The built-in tasks at other control rates (``python -m benchmarks.control_rate``): the world keeps its own time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the built-in tasks need mujoco")

import gymnasium
from benchmarks.control_rate import TASKS, AtRate

import sinew_eval.sim  # noqa: F401 - registers the tasks

OWN_HZ = {"pen": 60.0, "blocks": 20.0, "shove": 20.0}


def actions(env: Any, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    space = env.action_space
    return [
        rng.uniform(space.low, space.high).astype(np.float32) * (space.shape[0] > 1) for _ in range(count)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_at_its_own_rate_a_task_is_as_it_was(task: str) -> None:
    other, own = AtRate(TASKS[task], OWN_HZ[task]), gymnasium.make(TASKS[task], disable_env_checker=True)
    assert other.max_steps == own.spec.max_episode_steps
    for a, b in zip(other.reset(seed=3), own.reset(seed=3), strict=True):
        np.testing.assert_equal(a, b)
    for action in actions(own, 12):
        for a, b in zip(other.step(action)[:4], own.step(action)[:4], strict=True):
            np.testing.assert_equal(a, b)


@pytest.mark.parametrize(("hz", "steps"), [(30.0, 20), (60.0, 10), (90.0, 7), (120.0, 5)])
def test_the_pen_falls_as_fast_at_any_rate(hz: float, steps: int) -> None:
    env = AtRate(TASKS["pen"], hz)
    env.reset(seed=0)
    for action in actions(env, 10):
        info = env.step(action)[-1]
    assert env.inner._slot == steps
    assert info["frame_age"] >= 0.0


@pytest.mark.parametrize(("hz", "seconds"), [(10.0, 1.0), (20.0, 0.5), (40.0, 0.25)])
def test_a_command_of_the_blocks_lasts_one_period(hz: float, seconds: float) -> None:
    env = AtRate(TASKS["blocks"], hz)
    env.reset(seed=0)
    begun = env.inner._data.time
    for action in actions(env, 10):
        env.step(action)
    assert env.inner._data.time - begun == pytest.approx(seconds)

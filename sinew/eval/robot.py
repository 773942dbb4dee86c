"""A gymnasium environment as a robot for the controller's loop: its time passes when it is acted on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.control import Stopped
from sinew_client.control.robots import renamed

if TYPE_CHECKING:
    import gymnasium

    from sinew.eval.adapters import EnvAdapter


class SimulatedRobot:
    """Steps an environment once per command or hold. Begins a new episode when one is over; ends after ``episodes``.

    successes: how many of the finished episodes succeeded. on_episode: called with a reason and the instruction when
    another one has begun. cameras: camera of the policy -> the environment's; the same names where absent.
    """

    concurrent_hold = False  # a hold is a step of its world, which it takes one after the other

    def __init__(
        self,
        env: gymnasium.Env,
        adapter: EnvAdapter,
        episodes: int | None = None,
        seed: int = 5000,
        cameras: Mapping[str, str] | None = None,
    ):
        self.env, self.adapter, self.episodes, self._seed = env, adapter, episodes, seed
        self.finished = self.successes = 0
        self.on_episode: Callable[[str, str], None] | None = None
        self._cameras = cameras or {}
        self._last: Any = None
        self._begin()

    def observe(self) -> dict[str, Any]:
        seen = self.adapter.observation(self._raw)
        age = float(self._info.get("frame_age", 0.0))
        return {
            "images": renamed(seen["images"], self._cameras),
            "state": seen["state"],
            "time": time.monotonic() - age,
        }

    @property
    def task(self) -> str:
        """The environment's own instruction of this episode, "" where it has none."""
        return str(self.adapter.observation(self._raw).get("prompt", ""))

    def act(self, row: np.ndarray) -> None:
        self._step(self.adapter.action(row))

    def hold(self) -> None:
        if not self._over:
            self._step(self.adapter.hold(self._last))

    @property
    def _over(self) -> bool:
        return self.episodes is not None and self.finished >= self.episodes

    def _step(self, action: Any) -> None:
        self._last = action
        self._raw, reward, terminated, truncated, self._info = self.env.step(action)
        self._steps += 1
        if terminated or truncated or self._steps >= self.adapter.max_steps:
            self.finished += 1
            self.successes += self.adapter.success(self._info, terminated, float(reward))
            if self._over:
                raise Stopped(f"{self.finished} episodes, {self.successes} successes")
            self._begin()
            if self.on_episode is not None:
                self.on_episode("a new episode", self.task)

    def _begin(self) -> None:
        self._raw, self._info = self.env.reset(seed=self._seed + self.finished)
        self._last = None
        self._steps = 0

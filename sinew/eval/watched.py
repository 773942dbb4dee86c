"""An environment that somebody follows step by step: who records, films or logs an episode while it is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium


class WatchedSteps(gymnasium.Wrapper):
    """Tells ``before(observation, action, step)`` of every step before it is taken: the environment's own observation,
    what it is given, and how many steps of the episode were taken before."""

    def __init__(self, env: gymnasium.Env, before: Callable[[Any, Any, int], None]):
        super().__init__(env)
        self._before = before
        self._raw: Any = None
        self._steps = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._raw, info = self.env.reset(**options)
        self._steps = 0
        return self._raw, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._before(self._raw, action, self._steps)
        self._steps += 1
        self._raw, *rest = self.env.step(action)
        return self._raw, *rest  # type: ignore[return-value]

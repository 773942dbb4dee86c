"""Episodes that are played become a data set: every control step, with what was seen and what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from sinew.eval.dataset.writer import DatasetFrame

if TYPE_CHECKING:
    from sinew.eval.adapters import EnvAdapter


class RecordedEpisode(gymnasium.Wrapper):
    """An environment that keeps the frames of its episode: what was shown before a step, and the step's action."""

    def __init__(self, env: gymnasium.Env, adapter: EnvAdapter):
        super().__init__(env)
        self._adapter = adapter
        self._raw: Any = None
        self.frames: list[DatasetFrame] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._raw, info = self.env.reset(**options)
        self.frames = []
        return self._raw, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        seen = self._adapter.observation(self._raw)
        images = {name: np.array(image) for name, image in seen["images"].items()}
        self.frames.append(
            DatasetFrame(
                images, np.array(seen["state"]), np.array(action, np.float32), str(seen.get("prompt", ""))
            )
        )
        self._raw, *rest = self.env.step(action)
        return self._raw, *rest  # type: ignore[return-value]

"""Episodes that are played become a data set: every control step, with what was seen and what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from sinew.eval.dataset.writer import DatasetFrame
from sinew.eval.watched import WatchedSteps

if TYPE_CHECKING:
    from sinew.eval.adapters import EnvAdapter


class RecordedEpisode(WatchedSteps):
    """An environment that keeps the frames of its episode: what was shown before a step, and the step's action."""

    def __init__(self, env: gymnasium.Env, adapter: EnvAdapter):
        super().__init__(env, self._keep)
        self._adapter = adapter
        self.frames: list[DatasetFrame] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.frames = []
        return super().reset(**options)

    def _keep(self, raw: Any, action: Any, _step: int) -> None:
        seen = self._adapter.observation(raw)
        images = {name: np.array(image) for name, image in seen["images"].items()}
        task = str(seen.get("prompt", ""))
        self.frames.append(DatasetFrame(images, np.array(seen["state"]), np.array(action, np.float32), task))

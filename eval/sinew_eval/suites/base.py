"""Base classes of the simulators: several tasks in one gymnasium environment, and frames that are drawn on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from sinew.core import SinewError


class SimulatorFrame:
    """An image that is drawn when it is read, because most control steps of an episode request no chunk.

    The image shows the simulator at the time of reading, so it must be read before the next step.
    """

    def __init__(self, draw: Callable[[], np.ndarray]):
        self._draw = draw

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._draw(), dtype)

    def copy(self) -> SimulatorFrame:
        return self


class Tasks(gymnasium.Env):
    """Environment with several tasks. A task is opened when an episode needs it. Subclasses implement opening,
    resetting and stepping.

    The seed of ``reset`` determines the episode: task = seed modulo the number of tasks, trial = quotient.
    """

    max_steps: int
    task_description = ""

    def __init__(self, tasks: Sequence[str]):
        self.tasks = tuple(tasks)
        self._current = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            raise SinewError("reset: these environments need a seed, which determines the task; pass one")
        task, trial = self.tasks[seed % len(self.tasks)], seed // len(self.tasks)
        if task != self._current:
            self.close()
            self.open(task)
            self._current = task
        return self.begin(trial), {"task": self.label(task), "is_success": False}

    def open(self, task: str) -> None:
        """Build the simulator for a task. :meth:`begin` then starts its episodes."""
        raise NotImplementedError

    def begin(self, trial: int) -> Any:
        """Start the episode with the number ``trial`` of the open task. Returns the raw observation."""
        raise NotImplementedError

    def label(self, task: str) -> str:
        """Return the task's name in reports. "/" separates parts, and reports have a row for each part."""
        return task

    def close(self) -> None:
        self._current = ""


class Registered(Tasks):
    """Tasks that are registered gymnasium environments. Their own time limit is disabled, because the limit of the
    mapping applies.

    Args:
        tasks: Gymnasium ids.
        **options: Arguments of the environments' constructors.
    """

    def __init__(self, tasks: Sequence[str], **options: Any):
        super().__init__(tasks)
        self._options = options
        self._env: gymnasium.Env | None = None

    def open(self, task: str) -> None:
        with drawing():
            made = gymnasium.make(
                task, disable_env_checker=True, max_episode_steps=1_000_000, **self._options
            )
        self._env = made

    @property
    def env(self) -> gymnasium.Env:
        assert self._env is not None
        return self._env

    def begin(self, trial: int) -> Any:
        with drawing():
            return self.env.reset(seed=trial)[0]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.env.step(action)

    def label(self, task: str) -> str:
        return task.partition("/")[2]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
        super().close()


@contextmanager
def drawing() -> Iterator[None]:
    """Replace the various errors of a missing OpenGL by one error that states the next step."""
    try:
        yield
    except SinewError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(word in text for word in ("GL", "gl", "OSMesa", "display", "Vulkan", "vulkan")):
            raise SinewError(
                f"this simulator cannot draw here ({' '.join(text.split())[:200]}). Frames need OpenGL without a"
                " display: install libegl1 and libegl-mesa0 (MUJOCO_GL=egl, the default here) or libosmesa6"
                " (MUJOCO_GL=osmesa)"
            ) from error
        raise

"""Follow episodes step by step, to record, film or log them while they are played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from sinew_client.untrusted import read_npz

from sinew_eval.episodes.adapters import EnvAdapter, make_env
from sinew_eval.episodes.player import EpisodePlayer, one_thread
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant

MAX_FILM = 1 << 34  # largest size of an episode's frames, in bytes
CAMERA = "camera/"  # prefix of a camera's name in a file of watched steps


class WatchedSteps(gymnasium.Wrapper):
    """Environment wrapper that reports every step before it is executed.

    Args:
        env: The environment.
        before: Called with the environment's observation, the action, and the number of steps so far in the episode.
    """

    def __init__(self, env: gymnasium.Env, before: Callable[[Any, Any, int], None]):
        super().__init__(env)
        self._before = before
        self.raw: Any = None
        self.steps = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.raw, info = self.env.reset(**options)
        self.steps = 0
        return self.raw, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._before(self.raw, action, self.steps)
        self.steps += 1
        self.raw, *rest = self.env.step(action)
        return self.raw, *rest  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class WatchedMoment:
    """State of an episode before one control step, or at its end.

    Attributes:
        step: Number of steps before this one.
        images: The policy's frame of each camera, by the camera's name, uint8 [H, W, 3] or floats in [0, 1].
        state: State of the robot, [S].
        action: Executed action, float32 [A]. Zeros at the end of the episode.
        prompt: Instruction.
        scene: Picture that the environment draws of itself. None if it draws none.
    """

    step: int
    images: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    prompt: str
    scene: np.ndarray | None = None


class WatchedEpisode(WatchedSteps):
    """Wrapper around an environment that stores the control steps of its episode for a film.

    Args:
        env: The environment.
        adapter: Converts its observations to frames.
        every: Control steps between two stored steps.
        draws: True to store a picture of the whole scene with each step.
    """

    def __init__(self, env: gymnasium.Env, adapter: EnvAdapter, every: int = 1, draws: bool = False):
        super().__init__(env, self._pass)
        self._adapter, self._every, self._draws = adapter, every, draws
        self.moments: list[WatchedMoment] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.moments = []
        return super().reset(**options)

    def end(self) -> None:
        """Store the state at the end of the episode."""
        self._keep(self.raw, np.zeros_like(self.moments[0].action))

    def _pass(self, raw: Any, action: Any, step: int) -> None:
        if step % self._every == 0:
            self._keep(raw, action)

    def _keep(self, raw: Any, action: Any) -> None:
        seen = self._adapter.observation(raw)
        images = {name: np.array(image) for name, image in seen["images"].items()}
        scene: Any = self.env.render() if self._draws else None
        state, did = np.array(seen["state"]), np.array(action, np.float32)
        self.moments.append(WatchedMoment(self.steps, images, state, did, str(seen.get("prompt", "")), scene))


class WatchedPlayer(EpisodePlayer):
    """A player that stores the control steps of its last episode, and the end of the episode.

    Args:
        task: The task.
        fps: Maximum number of stored steps per second of simulated time, with a picture of the scene if the
            environment draws one. 0 to store every step without pictures.
    """

    def __init__(self, task: Task, fps: float = 0.0):
        super().__init__(task)
        modes = self.env.metadata.get("render_modes") or ()
        if fps and "rgb_array" in modes and self.env.render_mode is None:
            self.env.close()
            self.env, self.adapter = make_env(
                task.env, task.adapter, task.env_options, render_mode="rgb_array"
            )
        draws = bool(fps) and self.env.render_mode == "rgb_array"
        self.env = self.watched = WatchedEpisode(
            self.env, self.adapter, every(self.adapter.control_hz, fps), draws
        )

    def play(self, variant: Variant, seed: int) -> Episode:
        episode = super().play(variant, seed)
        self.watched.end()
        return episode


def every(control_hz: float, fps: float) -> int:
    """Return the number of control steps between two stored steps. 1 if ``fps`` is 0."""
    return max(1, round(control_hz / fps)) if fps else 1


def watch(
    task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], fps: float = 0.0
) -> Iterator[tuple[int, Episode, list[WatchedMoment]]]:
    """Play episodes and store their control steps.

    Args:
        task: The task.
        variants: The variants.
        todo: Pairs of the index of a variant and a seed.
        fps: Maximum number of stored steps per second of simulated time. 0 for all.

    Yields:
        The index of the variant, the episode, and its stored steps.
    """
    player = WatchedPlayer(task, fps)
    try:
        with one_thread(variants):
            for index, seed in todo:
                yield index, player.play(variants[index], seed), player.watched.moments
    finally:
        player.close()


def write_moments(path: Path, moments: Sequence[WatchedMoment]) -> None:
    """Write stored steps to a file NAME.npz, for :func:`read_moments`."""
    names = ("step", "state", "action", "prompt")
    arrays: dict[str, Any] = {name: [getattr(each, name) for each in moments] for name in names}
    if moments[0].scene is not None:
        arrays["scene"] = [each.scene for each in moments]
    for name in moments[0].images:
        arrays[CAMERA + name] = [each.images[name] for each in moments]
    np.savez(path, **arrays)


def read_moments(path: Path) -> list[WatchedMoment]:
    """Read the stored steps of a file from :func:`write_moments`."""
    arrays = read_npz(path, max_unpacked=MAX_FILM)
    scenes = arrays.get("scene", [None] * len(arrays["step"]))
    cameras = {name.removeprefix(CAMERA): each for name, each in arrays.items() if name.startswith(CAMERA)}
    return [
        WatchedMoment(
            int(arrays["step"][index]),
            {name: frames[index] for name, frames in cameras.items()},
            arrays["state"][index],
            arrays["action"][index],
            str(arrays["prompt"][index]),
            scenes[index],
        )
        for index in range(len(arrays["step"]))
    ]

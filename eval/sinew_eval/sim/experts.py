"""Scripted experts of simulated tasks: policies that read the simulator, where others have to see."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from sinew.core import (
    ActionChunk,
    MotionSpec,
    Observation,
    PolicySpec,
    SinewError,
    Timing,
    VectorSpec,
)
from sinew_client.open_policy import OpenPolicy, refuse_words
from sinew_client.solver import SINGLE

# Returns the expert's actions in the simulator's present state, float32 [H, D].
Act = Callable[[], np.ndarray]


class Expert(OpenPolicy):
    """A policy whose ``begin(env)`` returns what it does in the episode of an environment that has been reset."""

    def __init__(self, spec: PolicySpec, begin: Callable[[Any], Act]):
        self.spec, self._begin = spec, begin
        self._act: Act | None = None

    def start(self, env: gymnasium.Env) -> None:
        """A new episode begins in ``env``, which has been reset."""
        self._refuse_closed()
        self._act = self._begin(env.unwrapped)

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the expert's action. The observation and ``timeout`` are not used, because nothing here takes long."""
        self._refuse_closed()
        if self._act is None:
            raise SinewError(f"{self.spec.name}: expected start(env) before the first observation")
        refuse_words(observation, "an expert")
        begin = time.perf_counter()
        actions = self._act()
        return ActionChunk(actions, Timing(total_ms=1e3 * (time.perf_counter() - begin)))

    def _release(self) -> None:
        self._act = None


def expert_spec(
    name: str, action: VectorSpec, chunk_size: int = 1, motion: MotionSpec | None = None
) -> PolicySpec:
    """Return an expert's specification, without cameras and state, because it reads neither."""
    return PolicySpec(
        "expert", name, (), VectorSpec(0), action, chunk_size, 0, 1, 0, solver=SINGLE, motion=motion
    )


def _blocks(env: Any) -> Act:
    """One action a chunk, since it needs to see the state again."""
    from sinew_eval.sim import blocks_expert

    return lambda: blocks_expert.act(env.world())[None]


def _pen(env: Any) -> Act:
    """What somebody could know at the moment of the newest frame: the ceiling of every policy on this task."""
    from sinew_eval.sim import pen

    def act() -> np.ndarray:
        fps, delay = env.camera_fps, env.camera_delay
        frame = max(0, int(np.floor((env.time - delay) * fps + 1e-9))) / fps
        return pen.expert_chunk(env.drop, frame, PEN.chunk_size)[:, None]

    return act


def _egg(env: Any) -> Act:
    """What somebody does who sees the newest frame and feels the present force: one action a chunk."""
    from sinew_eval.sim import egg

    return lambda: egg.act(env)[None]


PEN = expert_spec("pen expert", VectorSpec(1), 24, MotionSpec("absolute"))
# Prefix of environment ids -> (specification, expert).
EXPERTS: dict[str, tuple[PolicySpec, Callable[[Any], Act]]] = {
    "sinew/Blocks": (
        expert_spec("blocks expert", VectorSpec(4, ("x", "y", "z", "gripper"))),
        _blocks,
    ),
    "sinew/Pen": (PEN, _pen),
    "sinew/Egg": (expert_spec("egg expert", VectorSpec(1)), _egg),
}


def open_target(place: str, **options: Any) -> Expert:
    """Open the expert that ``expert:ENV`` names (entry point of ``sinew.targets``).

    Raises:
        SinewError: No environment is named, it has no expert, or an option is given.
    """
    if not place:
        raise SinewError("expert: expected expert:ENV, such as expert:sinew/Blocks-v0")
    if options:
        raise SinewError(f"expert:{place}: an expert takes no option {next(iter(options))}")
    return open_expert(place)


def open_expert(env_id: str) -> Expert:
    """Return the expert of an environment. Raises :class:`SinewError` where there is none."""
    for start, (spec, begin) in EXPERTS.items():
        if env_id.startswith(start):
            return Expert(spec, begin)
    raise SinewError(f"there is no scripted expert for {env_id}")

"""Scripted experts of simulated tasks. They read the state of the simulator instead of images."""

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
    """A scripted policy.

    Args:
        spec: Specification of the policy.
        begin: Function of an environment after its reset. Returns the function that computes the actions of the
            episode.
    """

    def __init__(self, spec: PolicySpec, begin: Callable[[Any], Act]):
        self.spec, self._begin = spec, begin
        self._act: Act | None = None

    def start(self, env: gymnasium.Env) -> None:
        """Begin a new episode in ``env``, which has just been reset."""
        self._refuse_closed()
        self._act = self._begin(env.unwrapped)

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the expert's action. The observation and ``timeout`` are not used, because the expert reads the
        simulator and computes quickly.
        """
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
    """Return an expert's specification, which has neither cameras nor a state."""
    return PolicySpec(
        "expert", name, (), VectorSpec(0), action, chunk_size, 0, 1, 0, solver=SINGLE, motion=motion
    )


def _blocks(env: Any) -> Act:
    """Start the expert of the blocks task. A chunk has one action, because the next action needs the new state."""
    from sinew_eval.sim import blocks_expert

    return lambda: blocks_expert.act(env.world())[None]


def _pen(env: Any) -> Act:
    """Start the expert of the pen task. It knows only the state at the time of the newest frame, so its success is
    the upper limit of all policies.
    """
    from sinew_eval.sim import pen

    def act() -> np.ndarray:
        return pen.expert_chunk(env.drop, env.camera.frame_time(env.time), PEN.chunk_size)[:, None]

    return act


def _egg(env: Any) -> Act:
    """Start the expert of the egg task. It uses the newest frame and the present force. A chunk has one action."""
    from sinew_eval.sim import egg

    return lambda: egg.act(env)[None]


PEN = expert_spec("pen expert", VectorSpec(1), 24, MotionSpec("absolute"))
# Key: prefix of environment ids. Value: (specification, expert).
EXPERTS: dict[str, tuple[PolicySpec, Callable[[Any], Act]]] = {
    "sinew/Blocks": (
        expert_spec("blocks expert", VectorSpec(4, ("x", "y", "z", "gripper"))),
        _blocks,
    ),
    "sinew/Pen": (PEN, _pen),
    "sinew/Egg": (expert_spec("egg expert", VectorSpec(1)), _egg),
}


def open_target(place: str, **options: Any) -> Expert:
    """Open the expert of ``expert:ENV`` (entry point of ``sinew.targets``).

    Args:
        place: Gymnasium id of the environment.
        **options: Not supported.

    Raises:
        SinewError: No environment is named, the environment has no expert, or an option is given.
    """
    if not place:
        raise SinewError("expert: name an environment as expert:ENV, such as expert:sinew/Blocks-v0")
    if options:
        raise SinewError(f"expert:{place}: an expert has no option {next(iter(options))}; omit it")
    return open_expert(place)


def open_expert(env_id: str) -> Expert:
    """Return the expert of an environment.

    Raises:
        SinewError: The environment has no expert.
    """
    for start, (spec, begin) in EXPERTS.items():
        if env_id.startswith(start):
            return Expert(spec, begin)
    raise SinewError(
        f"there is no scripted expert for {env_id}; choose an environment of {', '.join(EXPERTS)}"
    )

"""Use a gymnasium environment as a robot for the control loop. Its time advances with each action. Its expert can
take over from a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew.core import SinewError
from sinew_client.control import Stopped
from sinew_client.control.facts import RobotFacts
from sinew_client.control.robots import renamed

if TYPE_CHECKING:
    import gymnasium

    from sinew_eval.episodes.adapters import EnvAdapter


def opener(
    env_id: str, adapting: str, options: dict[str, Any], cameras: Mapping[str, str], episodes: int | None
) -> Callable[[dict[str, Any]], SimulatedRobot]:
    """Make an environment, and return a function that makes a robot from it (``sinew run --robot gym:ENV``).

    Args:
        env_id: The environment.
        adapting: Name of its adapter. "" for the adapter that the id implies.
        options: Arguments of the environment's constructor.
        cameras: For each camera of the policy, the camera of the environment.
        episodes: Number of episodes after which the robot ends the run. None for no end.

    Returns:
        A function of the policy's metadata that returns the robot.

    Raises:
        SinewError: The environment does not exist, or it needs an adapter.
    """
    from sinew_eval.episodes.adapters import make_env

    env, adapter = make_env(env_id, adapting, options)

    def simulated(policy: dict[str, Any]) -> SimulatedRobot:
        if fit := getattr(adapter, "fit_actions" if cameras else "fit", None):
            fit(policy)
        return SimulatedRobot(env, adapter, episodes, cameras=cameras)

    return simulated


class SimulatedRobot:
    """Robot that steps an environment once per command or hold. After an episode, it begins the next one.

    Attributes:
        successes: Number of successful episodes.
        on_episode: Called with a reason and the instruction when another episode has begun.
        success: Outcome of a trial (:meth:`set_up`). None while the trial runs.
        actions: Actions that the environment executed in this episode, one for each of its ``steps``.
        info: Info dict of the last reset or step.

    Args:
        env: The environment.
        adapter: Its adapter.
        episodes: Number of episodes after which the robot ends the run. None for no end.
        seed: Seed of the first episode. The others follow.
        cameras: For each camera of the policy, the camera of the environment. None if the names are equal.
        options: Options of the environment's reset.
    """

    # Observation of the present control step. It is None until the loop requests the observation.
    _seen: dict[str, Any] | None

    def __init__(
        self,
        env: gymnasium.Env,
        adapter: EnvAdapter,
        episodes: int | None = None,
        seed: int = 5000,
        cameras: Mapping[str, str] | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.env, self.adapter, self.episodes, self._seed = env, adapter, episodes, seed
        self.finished = self.successes = 0
        self.on_episode: Callable[[str, str], None] | None = None
        self.success: bool | None = None
        self._cameras, self._options = cameras or {}, options
        # True in a trial: the simulation does not advance before the first command.
        self._waits = False
        self._begin()

    def set_up(self, seed: int) -> None:
        """Begin the single episode of a trial. The simulation does not advance before the first command.

        Args:
            seed: Seed of the scene.
        """
        self._seed, self.episodes, self._waits, self.success = seed, 1, True, None
        self.finished = self.successes = 0
        self._begin()

    def facts(self) -> RobotFacts:
        """Return the facts about a simulated robot. A hold is a step of the simulation, so only the loop's thread may
        hold it.
        """
        return RobotFacts(
            hz=self.adapter.control_hz,
            physical=False,
            task=lambda: self.task,
            concurrent_hold=False,
            episodes=self,
            scenes=self,
            success=lambda: self.success,
            leader=self._expert,
        )

    def _expert(self, **options: Any) -> ExpertLeader:
        return ExpertLeader(self, **options)

    def observe(self) -> dict[str, Any]:
        """Return the environment's observation, which is drawn once per step. It has an ``age`` in seconds only if
        the environment states the ``frame_age``. Otherwise the setting ``camera_delay`` is the age.
        """
        return dict(self._look())

    def _look(self) -> dict[str, Any]:
        if self._seen is None:
            seen = dict(self.adapter.observation(self._raw))
            if self._cameras:
                seen["images"] = renamed(seen["images"], self._cameras)
            age = self.info.get("frame_age")
            self._seen = seen if age is None else {**seen, "age": float(age)}
        return self._seen

    @property
    def task(self) -> str:
        """Return the environment's instruction of this episode. "" if the environment has none."""
        return str(self._look().get("prompt", ""))

    @property
    def steps(self) -> int:
        return len(self.actions)

    def act(self, row: np.ndarray) -> None:
        self._step(self.adapter.action(row))

    def hold(self) -> None:
        if not (self._over or (self._waits and not self.actions)):
            self._step(self.adapter.hold(self.actions[-1] if self.actions else None))

    @property
    def _over(self) -> bool:
        return self.episodes is not None and self.finished >= self.episodes

    def _step(self, action: Any) -> None:
        self.actions.append(action)
        self._raw, reward, terminated, truncated, self.info = self.env.step(action)
        self._seen = None
        if terminated or truncated or self.steps >= self.adapter.max_steps:
            self.finished += 1
            self.success = bool(self.adapter.success(self.info, terminated, float(reward)))
            self.successes += self.success
            if self._over:
                raise Stopped(f"{self.finished} episodes, {self.successes} successes")
            self._begin()
            if self.on_episode is not None:
                self.on_episode("a new episode", self.task)

    def _begin(self) -> None:
        self._raw, self.info = self.env.reset(seed=self._seed + self.finished, options=self._options)
        self._seen = None
        self.actions: list[Any] = []


class StreamedRobot(SimulatedRobot):
    """Robot for streams: each frame appears in one observation, with its own age. The state is in every observation."""

    # Capture time of the newest frame that was returned, in seconds.
    _shown: float | None = None

    def observe(self) -> dict[str, Any]:
        seen = super().observe()
        if "camera_age" in self.info:
            seen["age"] = float(self.info["camera_age"])
        taken = round(self.steps / self.adapter.control_hz - seen.get("age", 0.0), 6)
        if taken == self._shown:
            del seen["images"]
        self._shown = taken
        return seen


class ExpertLeader:
    """Leader that executes the actions of the environment's expert. Implements ``Leader`` of
    ``sinew_client.control``.

    If ``after`` is longer than a usual successful episode, the expert corrects only the episodes that would fail.

    Args:
        robot: The robot.
        after: Control steps of an episode after which the expert takes over until the next episode. None to take over
            only on request.
    """

    def __init__(self, robot: SimulatedRobot, after: int | None = None):
        spec = robot.env.spec
        if spec is None:
            raise SinewError(
                "--takeover expert: the environment has no id, so its expert is unknown; use a built-in task"
            )
        if after is not None and (isinstance(after, bool) or not isinstance(after, int) or after < 1):
            raise SinewError(f"takeover_options: after: expected a whole number of steps, got {after!r}")
        self._robot, self._after = robot, after
        from sinew_eval.sim.experts import open_expert

        self._expert = open_expert(spec.id)
        self._episode = -1

    @property
    def wanted(self) -> bool:
        """Return True if the present episode takes longer than ``after`` control steps."""
        return self._after is not None and self._robot.steps >= self._after

    def read(self) -> np.ndarray:
        """Return the expert's command in the environment's present state, float32 [D]."""
        if self._episode != self._robot.finished:
            self._expert.start(self._robot.env)
            self._episode = self._robot.finished
        return self._expert.infer({"images": {}, "state": np.zeros(0, np.float32)}).actions[0]

    def close(self) -> None:
        self._expert.close()

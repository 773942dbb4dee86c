"""A gymnasium environment as a robot for the controller's loop, whose time passes when it is acted on; its expert as a
leader, which takes over from a policy."""

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
    """Make an environment and return what makes a robot of it for a policy (``sinew run --robot gym:ENV``).

    Args:
        env_id: The environment.
        adapting: Its adapter; "" for the one that its id implies.
        options: Arguments of its constructor.
        cameras: Camera of the policy -> the environment's.
        episodes: Episodes after which the robot ends the run. None for no end.

    Raises:
        SinewError: There is no such environment, or it needs an adapter.
    """
    from sinew_eval.episodes.adapters import make_env

    env, adapter = make_env(env_id, adapting, options)

    def simulated(policy: dict[str, Any]) -> SimulatedRobot:
        if fit := getattr(adapter, "fit_actions" if cameras else "fit", None):
            fit(policy)
        return SimulatedRobot(env, adapter, episodes, cameras=cameras)

    return simulated


class SimulatedRobot:
    """Steps an environment once per command or hold. Begins a new episode when one is over; ends after ``episodes``.

    successes: how many of the finished episodes succeeded. on_episode: called with a reason and the instruction when
    another one has begun. cameras: camera of the policy -> the environment's; the same names where absent.
    options: of the environment's resets. success: of a trial (:meth:`set_up`), None while it goes on.
    actions: what the environment was given in this episode, one for each of its ``steps``. info: what it said last.
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
        """Begin the one episode of a trial, in the scene of a seed. Its world stands still until the first command."""
        self._seed, self.episodes, self._waits, self.success = seed, 1, True, None
        self.finished = self.successes = 0
        self._begin()

    def facts(self) -> RobotFacts:
        """Return the facts of a simulation. A hold is a step of its world, so no other thread may hold it."""
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
        """Return the environment's observation, drawn once per step. ``age`` counts from the frame of a chunk."""
        return dict(self._look())

    def _look(self) -> dict[str, Any]:
        if self._seen is None:
            seen = dict(self.adapter.observation(self._raw))
            if self._cameras:
                seen["images"] = renamed(seen["images"], self._cameras)
            self._seen = {**seen, "age": float(self.info.get("frame_age", 0.0))}
        return self._seen

    @property
    def task(self) -> str:
        """The environment's own instruction of this episode, "" where it has none."""
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
    """Shows each frame once, with its own age; the state at every look."""

    # Capture time of the newest frame that was returned, in seconds.
    _shown: float | None = None

    def observe(self) -> dict[str, Any]:
        seen = super().observe()
        seen["age"] = float(self.info.get("camera_age", seen["age"]))
        taken = round(self.steps / self.adapter.control_hz - seen["age"], 6)
        if taken == self._shown:
            del seen["images"]
        self._shown = taken
        return seen


class ExpertLeader:
    """What the expert of a robot's environment would do now. Implements ``Leader`` of ``sinew_client.control``.

    after: control steps of an episode after which it takes over by itself, until the next one begins; None: when told
    alone. A policy that succeeds is done by then, so it corrects those that fail.
    """

    def __init__(self, robot: SimulatedRobot, after: int | None = None):
        spec = robot.env.spec
        if spec is None:
            raise SinewError(
                "--takeover expert: expected an environment with an expert, got one without a name"
            )
        if after is not None and (isinstance(after, bool) or not isinstance(after, int) or after < 1):
            raise SinewError(f"--takeover-options: after: expected a whole number of steps, got {after!r}")
        self._robot, self._after = robot, after
        from sinew_eval.sim.experts import open_expert

        self._expert = open_expert(spec.id)
        self._episode = -1

    @property
    def wanted(self) -> bool:
        """Return True if the present episode takes longer than it should."""
        return self._after is not None and self._robot.steps >= self._after

    def read(self) -> np.ndarray:
        """Return the expert's command in the environment's present state, float32 [D]."""
        if self._episode != self._robot.finished:
            self._expert.start(self._robot.env)
            self._episode = self._robot.finished
        return self._expert.infer({"images": {}, "state": np.zeros(0, np.float32)}).actions[0]

    def close(self) -> None:
        self._expert.close()

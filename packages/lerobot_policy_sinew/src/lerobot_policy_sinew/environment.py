"""The environment type ``sinew`` (``--env.type=sinew``): Sinew's simulated tasks for LeRobot's evaluation."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

NAMES = ("Blocks-v0", "BlocksShove-v0", "Pen-v0")
# LeRobot adds keys with this prefix to the options of `reset`. The options of Sinew's tasks never have this prefix.
OWN = "lerobot_"
# These keys only state that an episode begins. They are ignored, because each `reset` of a task begins an episode.
MARKERS = ("lerobot_new_rollout",)


@EnvConfig.register_subclass("sinew")
@dataclass
class SinewEnvConfig(EnvConfig):
    """The configuration of a simulated task.

    Attributes:
        task: Name of the task: Blocks-v0, BlocksShove-v0 or Pen-v0.
        fps: Control rate, Hz. It is set from the task.
        features: The task's cameras, state and action. They are set from the task.
        features_map: LeRobot's name of each feature. It is set from the task.

    Raises:
        ValueError: The task is unknown.
    """

    task: str = "Blocks-v0"
    fps: int = 20
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if self.task not in NAMES:
            raise ValueError(f"env.task: expected one of {', '.join(NAMES)}, got {self.task!r}")
        env = Task(self.task)
        self.fps = int(env.metadata["render_fps"])
        pixels, state = env.observation_space["pixels"], env.observation_space["agent_pos"]
        self.features = {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=env.action_space.shape)}
        self.features["agent_pos"] = PolicyFeature(type=FeatureType.STATE, shape=state.shape)
        self.features_map = {ACTION: ACTION, "agent_pos": OBS_STATE}
        for camera, box in pixels.items():
            # Do not use "pixels/CAMERA" as LeRobot's own environments do. --eval.recording uses these names as columns
            # of a data set, and column names must not contain a slash.
            key = f"{OBS_IMAGES}.{camera}"
            self.features[key] = PolicyFeature(type=FeatureType.VISUAL, shape=box.shape)
            self.features_map[key] = key
        env.close()

    @property
    def package_name(self):
        return __name__

    @property
    def gym_id(self):
        return f"lerobot_policy_sinew/{self.task}"

    @property
    def gym_kwargs(self):
        return {}


class Task(gymnasium.Env):
    """A simulated task of Sinew with the attributes that LeRobot's evaluation needs.

    LeRobot reads ``task_description`` and ``_max_episode_steps`` from the outermost environment. So this class must not
    be inside a wrapper of gymnasium, and it ends episodes itself.

    Args:
        name: Name of the task, such as "Blocks-v0".
        render_mode: Render mode of gymnasium.
    """

    def __init__(self, name: str, render_mode: str = "rgb_array"):
        import sinew_eval.sim  # noqa: F401 - the import registers the tasks

        self._env = gymnasium.make(f"sinew/{name}", render_mode=render_mode)
        self._max_episode_steps = self._env.spec.max_episode_steps
        self.metadata, self.render_mode = self._env.metadata, render_mode
        inner = self._env.observation_space
        self.observation_space = gymnasium.spaces.Dict(
            {"pixels": inner["images"], "agent_pos": inner["state"]}
        )
        self.action_space = self._env.action_space

    @property
    def task_description(self):
        """The instruction of this episode."""
        return self._env.unwrapped.task_description

    @property
    def task(self):
        """The instruction of this episode."""
        return self.task_description

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        observation, info = self._env.reset(seed=seed, options=_for_the_task(options))
        return self._seen(observation), {**info, "is_success": False}

    def step(self, action):
        observation, reward, terminated, truncated, info = self._env.step(action)
        info = {**info, "is_success": bool(info.get("is_success", terminated))}
        return self._seen(observation), reward, terminated, truncated, info

    def render(self):
        return self._env.render()

    def close(self):
        self._env.close()

    @staticmethod
    def _seen(observation):
        return {"pixels": observation["images"], "agent_pos": observation["state"]}


def _for_the_task(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Remove the options that LeRobot adds for its own wrappers from the options of ``reset``.

    An unknown option of LeRobot may come from a newer release. It is removed with a warning. The task itself rejects
    all other unknown options.

    Args:
        options: The options of ``reset``; None for no options.

    Returns:
        The options for the task.
    """
    options = dict(options or {})
    for key in [key for key in options if key.startswith(OWN)]:
        value = options.pop(key)
        if key not in MARKERS:
            supported_options = ", ".join(MARKERS)
            warnings.warn(
                f"options: the only supported option of LeRobot is {supported_options}, got {key}={value!r}, which is"
                " ignored",
                stacklevel=3,
            )
    return options


for _name in NAMES:
    gymnasium.register(
        f"lerobot_policy_sinew/{_name}",
        entry_point=f"{__name__}:Task",
        kwargs={"name": _name},
        order_enforce=False,
        disable_env_checker=True,
    )

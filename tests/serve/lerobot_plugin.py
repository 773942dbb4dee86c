"""LeRobot's own factory and commands with the plugin of packages/lerobot_policy_sinew, in the clients' interpreter.

``python lerobot_plugin.py factory FILE.npz OPTIONS...`` makes a policy from each JSON object with LeRobot's factory, as
its commands do, lets it act on the observations in FILE.npz, and writes its actions, or why there is no such policy;
the first is also saved, and made again from its folder; of one with a ``spec``, how many rows it executes. ``refusals
OPTIONS...`` makes a policy from each, shows it a frame, which its ``batch`` changes, or one for each of its ``steps``,
and prints the shape of the last action or why there is none. ``resets OPTIONS...`` begins an episode of Blocks-v0 with
each JSON object and prints what came of it. ``lerobot-eval FLAGS`` is that command, by its entry point; so are
LeRobot's others.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import torch

# PyPI's torchvision is compiled against CUDA's torch; see lerobot_robot.py.
_operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import lerobot  # noqa: E402
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.envs.configs import EnvConfig  # noqa: E402
from lerobot.envs.factory import make_env  # noqa: E402
from lerobot.envs.utils import preprocess_observation  # noqa: E402
from lerobot.policies.factory import (  # noqa: E402
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)
from lerobot.utils.import_utils import register_third_party_plugins  # noqa: E402
from sinew_client import PolicySpec  # noqa: E402


def factory(file: str, *options: str) -> None:
    register_third_party_plugins()
    observations = Path(file)
    seen = np.load(observations)
    actions = {}
    for index, text in enumerate(options):
        given = json.loads(text)
        shape = tuple(given.pop("action_shape", seen["state"].shape[-1:]))
        spec = given.pop("spec", None)
        config = make_policy_config("sinew", **given)
        if spec is not None:
            module = importlib.import_module("lerobot_policy_sinew.modeling_sinew")
            actions[str(index)] = np.array(module.rows_executed(config, PolicySpec.from_dict(spec)))
            continue
        config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=shape)}
        try:
            policy = get_policy_class("sinew")(config)
        except ValueError as error:
            actions[str(index)] = np.array(str(error))
            continue
        pipelines = make_pre_post_processors(config)
        actions[str(index)] = act(seen, policy.to(config.device).eval(), *pipelines)
        if index == 0:
            folder = observations.with_name("saved")
            policy.save_pretrained(folder)
            for pipeline in pipelines:
                pipeline.save_pretrained(folder)
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    actions["saved"] = act(seen, policy, *make_pre_post_processors(config, pretrained_path=str(folder)))
    np.savez(observations.with_name("actions.npz"), **actions)


def act(seen, policy, before, after) -> np.ndarray:
    """Return what a policy does on the observations, [steps, batch, action_dim]."""
    cameras = [name for name in seen.files if name not in ("state", "task")]
    policy.reset()
    rows = []
    for state, *frames in zip(seen["state"], *(seen[name] for name in cameras), strict=True):
        raw = {"agent_pos": state, "pixels": dict(zip(cameras, frames, strict=True))}
        batch = before({**preprocess_observation(raw), "task": [str(seen["task"])] * len(state)})
        rows.append(after(policy.select_action(batch)).numpy())
    policy.reset()
    return np.stack(rows)


def refusals(*options: str) -> None:
    register_third_party_plugins()
    found = []
    for text in options:
        given = json.loads(text)
        changes, folder, steps = given.pop("batch", {}), given.pop("folder", None), given.pop("steps", 1)
        try:
            if folder is None:
                policy = get_policy_class("sinew")(make_policy_config("sinew", **given))
            else:
                policy = get_policy_class("sinew").from_pretrained(folder)
            policy.reset()
            rows = [policy.select_action(batch(**changes, step=step)) for step in range(steps)]
            found.append(list(rows[-1].shape))
        except Exception as error:  # noqa: BLE001 - its type is what is asked
            found.append(f"{type(error).__name__}: {error}")
    print(json.dumps(found))


def batch(frames: int = 1, states: int = 1, tasks: int = 1, value: float = 0.5, step: int = 0) -> dict:
    """Return what a policy is shown: so many of each, the value of every pixel, and the step as the state."""
    return {
        "observation.images.front": torch.full((frames, 3, 8, 8), value),
        "observation.state": torch.full((states, 2), float(step)),
        "task": ["go"] * tasks,
    }


def resets(*options: str) -> None:
    register_third_party_plugins()
    config = EnvConfig.get_choice_class("sinew")()
    ((env,),) = (envs.values() for envs in make_env(config, n_envs=1).values())
    found = []
    for text in options:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                seen, _ = env.reset(seed=[7], options=json.loads(text))
                result = {"state": seen["agent_pos"].tolist(), "task": env.call("task_description")[0]}
            except ValueError as error:
                result = {"error": str(error)}
        told = [str(each.message) for each in told if str(each.message).startswith("options:")]
        found.append({**result, "warnings": told})
    env.close()
    print(json.dumps(found))


if __name__ == "__main__":
    print(f"lerobot {lerobot.__version__}", file=sys.stderr)
    program = sys.argv[1]
    if program in ("factory", "refusals", "resets"):
        globals()[program](*sys.argv[2:])
    else:
        (point,) = entry_points(group="console_scripts", name=program)
        sys.argv = sys.argv[1:]
        sys.exit(point.load()())

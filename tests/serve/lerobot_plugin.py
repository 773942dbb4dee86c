"""LeRobot's own factory and evaluation with the plugin of packages/lerobot_policy_sinew, in the clients' interpreter.

``python lerobot_plugin.py factory FILE.npz OPTIONS...`` makes a policy from each JSON object with LeRobot's factory, as
its commands do, lets it act on the observations in FILE.npz, and writes its actions, or why there is no such policy.
``python lerobot_plugin.py eval FLAGS`` is ``lerobot-eval FLAGS``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

# PyPI's torchvision is compiled against CUDA's torch; see lerobot_robot.py.
_operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.envs.utils import preprocess_observation  # noqa: E402
from lerobot.policies.factory import (  # noqa: E402
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)
from lerobot.utils.import_utils import register_third_party_plugins  # noqa: E402


def factory(observations: Path, *options: str) -> None:
    register_third_party_plugins()
    seen = np.load(observations)
    cameras = [name for name in seen.files if name not in ("state", "task")]
    actions = {}
    for index, text in enumerate(options):
        given = json.loads(text)
        shape = tuple(given.pop("action_shape", seen["state"].shape[-1:]))
        config = make_policy_config("sinew", **given)
        config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=shape)}
        try:
            policy = get_policy_class("sinew")(config)
        except ValueError as error:
            actions[str(index)] = np.array(str(error))
            continue
        policy.to(config.device)
        policy.eval()
        before, after = make_pre_post_processors(config)
        policy.reset()
        rows = []
        for state, *frames in zip(seen["state"], *(seen[name] for name in cameras), strict=True):
            raw = {"agent_pos": state, "pixels": dict(zip(cameras, frames, strict=True))}
            batch = before({**preprocess_observation(raw), "task": [str(seen["task"])] * len(state)})
            rows.append(after(policy.select_action(batch)).numpy())
        policy.reset()
        actions[str(index)] = np.stack(rows)
    np.savez(observations.with_name("actions.npz"), **actions)


if __name__ == "__main__":
    if sys.argv[1] == "factory":
        factory(Path(sys.argv[2]), *sys.argv[3:])
    else:
        from lerobot.scripts.lerobot_eval import main

        sys.argv = ["lerobot-eval", *sys.argv[2:]]
        main()

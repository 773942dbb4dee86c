"""Compare LIBERO in Sinew with LeRobot's environment and observation processor, with the actions of Sinew's expert.

Call it as ``python libero_beside_lerobot.py SINEW CLIENT LEROBOT... TASK TRIAL STEPS`` in the Python environment of
LIBERO. SINEW, CLIENT and LEROBOT... are folders for the import path, and the folders of LeRobot and torch come last.
Prints the differences as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(MUJOCO_GL="egl", PYOPENGL_PLATFORM="egl")
ours, client, *theirs, TASK, TRIAL, STEPS = sys.argv[1:]
sys.path[:0] = [ours, client]
sys.path += theirs
sys.modules["triton"] = None  # type: ignore[assignment] # torch also works without Triton; Triton's LLVM and Mesa's LLVM together crash the process

import numpy as np  # noqa: E402
import torch  # noqa: E402

from sinew_eval.episodes.adapters import Mapped  # noqa: E402
from sinew_eval.suites import libero  # noqa: E402

# PyPI's torchvision is compiled for the CUDA build of torch; see lerobot_robot.py.
_operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

EVERY = 8  # the camera frames of every 8th step are compared, which is about the interval between two chunks


def play_ours() -> tuple[list, list, list]:
    env = libero.Simulator([TASK])
    adapter = Mapped(env, libero.MAPPING)
    raw, _ = env.reset(seed=int(TRIAL))
    expert = env.expert()
    expert.start(env)
    actions, seen, success = [], [look(adapter, raw)], []
    for step in range(int(STEPS)):
        actions.append(adapter.action(expert.infer({}).actions[0]))
        raw, _, done, _, info = env.step(actions[-1])
        success.append(adapter.success(info, done, 0.0))
        seen.append(look(adapter, raw) if (step + 1) % EVERY == 0 else {"state": adapter._state(raw)})
        if done:
            break
    env.close()
    return actions, seen, success


def look(adapter: Mapped, raw: dict) -> dict:
    seen = adapter.observation(raw)
    return {**seen, "images": {name: np.array(frame) for name, frame in seen["images"].items()}}


def play_theirs(actions: list) -> tuple[list, list, str]:
    from lerobot.envs.libero import LiberoEnv, _get_suite
    from lerobot.envs.utils import preprocess_observation
    from lerobot.processor.env_processor import LiberoProcessorStep

    benchmark, _, task = TASK.partition("/")
    env = LiberoEnv(
        _get_suite(benchmark), int(task), benchmark, obs_type="pixels_agent_pos", episode_index=int(TRIAL)
    )

    def processed(raw: dict) -> dict:
        state = raw["robot_state"]
        batch = {
            part: {key: torch.from_numpy(value)[None] for key, value in of.items()}
            for part, of in state.items()
        }
        seen = preprocess_observation({"pixels": raw["pixels"]}) | {"observation.robot_state": batch}
        seen = LiberoProcessorStep().observation(seen)
        frames = {
            name: (seen[f"observation.images.{name}"][0].permute(1, 2, 0) * 255).round().byte().numpy()
            for name in raw["pixels"]
        }
        return {"state": seen["observation.state"][0].numpy(), "images": frames}

    raw, _ = env.reset(seed=7)  # the seed that Sinew's LIBERO adapter uses by default
    seen, success = [processed(raw)], []
    for action in actions:
        raw, _, _, _, info = env.step(action)
        seen.append(processed(raw))
        success.append(bool(info["is_success"]))
    return seen, success, env.task_description


def main() -> None:
    actions, mine, won = play_ours()
    other, also_won, their_prompt = play_theirs(actions)
    state = max(np.abs(a["state"] - b["state"]).max() for a, b in zip(mine, other, strict=True))
    frames = [
        int((a["images"][name] != b["images"][name]).sum())
        for a, b in zip(mine, other, strict=True)
        for name in a.get("images", ())
    ]
    found = {
        "steps": len(actions),
        "prompts": [mine[0]["prompt"], their_prompt],
        "state": float(state),
        "frames": len(frames),
        "pixels": sum(frames),
        "success": [won, also_won],
    }
    print("@" + json.dumps(found))


if __name__ == "__main__":
    main()

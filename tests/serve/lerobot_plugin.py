"""Run LeRobot's own factory and commands with the plugin in packages/lerobot_policy_sinew, in the clients'
interpreter.

``python lerobot_plugin.py COMMAND ...`` has these commands:

* ``factory FILE.npz OPTIONS...`` makes a policy from each JSON object with LeRobot's factory, and lets it act on the
  observations in FILE.npz. It writes the actions, or the error. The first policy is also saved and loaded again. For a
  policy with a ``spec``, it writes the number of executed actions.
* ``refusals OPTIONS...`` makes a policy from each JSON object, with LeRobot's settings ``rtc`` if there are any. It
  shows the policy a frame, which ``batch`` changes, or one frame for each of its ``steps``. It prints the shape of the
  last action, or the ``row`` itself, or the error.
* ``resets OPTIONS...`` begins an episode of Blocks-v0 with each JSON object and prints the result.
* ``episodes ADDRESS`` prints how many actions LeRobot's rtc engine gets around resets.
* ``ahead ADDRESS`` prints the actions of two episodes.
* ``guidance CASES...`` solves a toy head with LeRobot's real-time chunking, and with the request of the plugin.
* ``dataset FOLDER`` opens a data set with LeRobot's class and prints its frames.
* ``reference FLAGS`` runs the module of the plugin with this name.
* ``libero FLAGS`` runs research/policies/libero_reference.py.
* ``lerobot-eval FLAGS`` and LeRobot's other commands run by their entry points.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import warnings
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import lerobot
import numpy as np
import torch
import torchvision_operators  # noqa: F401 - beside this file, and before LeRobot
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.factory import make_env
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import (
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.utils.import_utils import register_third_party_plugins
from sinew_client import PolicySpec

REFERENCES = {"reference": "lerobot_policy_sinew.reference", "libero": "research.policies.libero_reference"}


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
    """Return the actions of a policy for the observations, [steps, batch, action_dim]."""
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
        rtc, whole = given.pop("rtc", None), given.pop("row", False)
        try:
            if folder is None:
                policy = get_policy_class("sinew")(make_policy_config("sinew", **given))
            else:
                policy = get_policy_class("sinew").from_pretrained(folder)
            if rtc is not None:
                policy.config.rtc_config = RTCConfig(**rtc)
                policy.init_rtc_processor()
            policy.reset()
            rows = [policy.select_action(batch(**changes, step=step)) for step in range(steps)]
            found.append(rows[-1][0].tolist() if whole else list(rows[-1].shape))
        except Exception as error:  # noqa: BLE001 - its type is what is asked
            found.append(f"{type(error).__name__}: {error}")
    print(json.dumps(found))


def batch(frames: int = 1, states: int = 1, tasks: int = 1, value: float = 0.5, step: int = 0) -> dict:
    """Return an observation batch.

    Args:
        frames: Number of frames.
        states: Number of states.
        tasks: Number of instructions.
        value: Value of every pixel.
        step: Value of the state.
    """
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


def episodes(address: str) -> None:
    register_third_party_plugins()
    policy = get_policy_class("sinew")(make_policy_config("sinew", address=address))
    policy.config.rtc_config = RTCConfig()
    policy.init_rtc_processor()
    asked = {"inference_delay": 2, "prev_chunk_left_over": None}
    found = []

    def ask(step: int) -> None:
        found.append(policy.predict_action_chunk(batch(step=step), **asked).shape[1])

    policy.reset()
    for step in (
        1,
        1,
        2,
        2,
    ):  # the answers to older frames twice, then the answers to the present frame twice
        ask(step)
    policy.reset()
    for step in (2, 3):
        ask(step)
    thread = threading.Thread(target=ask, args=(4,))
    thread.start()
    time.sleep(0.2)
    policy.reset()  # reset the policy while it waits for that answer
    thread.join()
    policy.reset()
    began = time.monotonic()
    while found[-1] == 0:  # the robot always shows the same frame
        ask(5)
    print(json.dumps({"rows": found[:7], "last": found[-1], "waited": time.monotonic() - began}))


def ahead(address: str) -> None:
    register_third_party_plugins()
    given = {"handover": "aligned", "motion": "absolute", "address": address}
    policy = get_policy_class("sinew")(make_policy_config("sinew", **given))
    found = []
    for step in range(80):
        if step in (0, 40):
            policy.reset()
        found.append(policy.select_action(batch(step=step))[0].tolist())
        time.sleep(0.02)
    policy.reset()
    print(json.dumps(found))


def guidance(*options: str) -> None:
    """Print three values for each case: the largest difference to LeRobot, the difference to no guidance, and the
    request."""
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.modeling_rtc import RTCProcessor
    from lerobot_policy_sinew.rtc import Continued

    from sinew.core import ContinuationRequest
    from sinew.engine.guidance import guide
    from sinew.models.solvers import FLOW, solve
    from sinew.processing.continuation import continuation

    rows, width, steps = 12, 3, 10
    about = {"action": {"dim": width}, "state": {"dim": width}, "motion": {"kind": "absolute"}, "cameras": []}
    spec = PolicySpec.from_dict(
        {"architecture": "toy", "name": "toy", "chunk_size": rows, "noise_dim": width, "solver_steps": steps}
        | {"max_prompt_tokens": 1, **about}
    )

    class Same:
        width = 3
        normalize = staticmethod(lambda actions: np.asarray(actions, np.float32))

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows * width, rows * width, generator=generator) / 6
    noise, chunk = torch.randn(2, 1, rows, width, generator=generator)

    def velocity(x: torch.Tensor, time: float) -> torch.Tensor:
        return torch.tanh(x.reshape(1, -1) @ weight + time).reshape(x.shape)

    found = []
    for text in options:
        case = json.loads(text)
        used, delay, committed = case.pop("used"), case.pop("delay"), case.pop("committed", 0)
        schedule = RTCAttentionSchedule(case.pop("schedule"))
        settings = RTCConfig(prefix_attention_schedule=schedule, **case)
        left = chunk[0, used:][: settings.execution_horizon]
        theirs, alone = noise.clone(), noise.clone()
        processor = RTCProcessor(settings)
        for step in range(steps):
            time = 1.0 - step / steps
            guided = processor.denoise_step(theirs, left, delay, time, lambda x, time=time: velocity(x, time))
            theirs, alone = theirs - guided / steps, alone - velocity(alone, time) / steps
        continued = Continued(settings, replace(spec, committed_rows=committed), {})
        state = np.zeros(width, np.float32)
        continued.answered(chunk[0].numpy(), state, continued.episode)
        padded = torch.zeros(settings.execution_horizon, width)  # LeRobot's engine passes a padded array
        padded[: len(left)] = left
        fields = continued.fields(padded.numpy(), delay, state)
        asked = continuation(ContinuationRequest(**fields), spec, Same, (), state, width)
        if asked is None:
            ours = alone
        else:
            guided, begun = guide([asked], FLOW, noise.numpy(), torch.from_numpy)
            ours = solve(
                velocity, torch.from_numpy(begun), FLOW.steps(steps), FLOW.times(steps), None, guided
            )
        differences = [float((one - other).abs().max()) for one, other in ((ours, theirs), (theirs, alone))]
        found.append([*differences, fields.get("rtc", "")])
    print(json.dumps(found))


def dataset(folder: str) -> None:
    from lerobot.datasets import LeRobotDataset

    found = LeRobotDataset("sinew/rollout_test", root=folder)
    frames = []
    for index in range(len(found)):
        frame = found[index]
        cameras = [key for key in frame if key.startswith("observation.images.")]
        frames.append(
            {
                "action": frame["action"].tolist(),
                "state": frame["observation.state"].tolist(),
                "episode": int(frame["episode_index"]),
                "task": frame["task"],
                "intervention": bool(frame["intervention"]) if "intervention" in frame else None,
                "bright": {key.rpartition(".")[2]: float(frame[key].mean()) for key in cameras},
                "shapes": [list(frame[key].shape) for key in cameras],
            }
        )
    print(json.dumps({"episodes": found.num_episodes, "fps": found.fps, "frames": frames}))


if __name__ == "__main__":
    print(f"lerobot {lerobot.__version__}", file=sys.stderr)
    program = sys.argv[1]
    if program in ("factory", "refusals", "resets", "dataset", "guidance", "episodes", "ahead"):
        globals()[program](*sys.argv[2:])
    elif program in REFERENCES:
        sys.argv = sys.argv[1:]
        importlib.import_module(REFERENCES[program]).main()
    else:
        (point,) = entry_points(group="console_scripts", name=program)
        sys.argv = sys.argv[1:]
        sys.exit(point.load()())

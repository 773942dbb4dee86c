"""Built-in tasks at another control rate than the policy's: an environment for `sinew eval` and `sinew run`.

    python -m benchmarks.control_rate pen OUT [--hz 30 60 120] [--episodes 100] [--replan 2] [--latency 33ms]

Each rate plays the same episodes with the same noise. The last line is JSON. To record a run at a wrong rate, for the
advice of `sinew recording advise`:

    sinew run pen --robot gym:benchmarks.control_rate:AtRate --robot-options '{"env": "sinew/Pen-v0", "hz": 30}' ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from sinew.cli import main as sinew

TASKS = {"pen": "sinew/Pen-v0", "blocks": "sinew/Blocks-v0", "shove": "sinew/BlocksShove-v0"}


class AtRate(gymnasium.Env):
    """A built-in task whose robot gets a command every 1 / hz seconds. The world keeps its own time.

    The pen's world advances in steps of 1/60 s with the newest command, which is a target. The world of the blocks
    advances for the duration of a command, whose target is a distance from the hand's position.

    Args:
        env: Id of the task.
        hz: Commands per second.
    """

    def __init__(self, env: str, hz: float):
        import sinew_eval.sim  # noqa: F401 - registers the tasks

        made = gymnasium.make(env, disable_env_checker=True)
        assert made.spec is not None
        assert made.spec.max_episode_steps
        self.inner: Any = made.unwrapped
        self.control_hz, self.scale = hz, hz / self.inner.control_hz
        self.max_steps = round(made.spec.max_episode_steps * self.scale)
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        self.cameras, self.metadata = self.inner.cameras, self.inner.metadata
        self.pen = "Pen" in env
        if getattr(self.inner, "shove_step", None) is not None:
            self.inner.shove_step = round(self.inner.shove_step * self.scale)

    @property
    def task(self) -> str:
        return str(self.inner.task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.commands = 0
        seen, info = self.inner.reset(seed=seed, options=options)
        self.newest = seen, 0.0, False, False, info
        return seen, info

    def step(self, action: np.ndarray):
        self.commands += 1
        if not self.pen:
            return self._blocks_step(action)
        while self.inner.time < self.commands / self.control_hz - 1e-9:
            self.newest = self.inner.step(action)
            if self.newest[2]:
                return self.newest
        seen, reward, done, truncated, info = self.newest
        # The world may be up to one of its own steps ahead of the commands or behind them.
        late = self.commands / self.control_hz - self.inner.time
        return seen, reward, done, truncated, {**info, "frame_age": max(0.0, info["frame_age"] + late)}

    def _blocks_step(self, action: np.ndarray):
        from sinew_eval.sim import blocks_scene

        usual = blocks_scene.SUBSTEPS
        blocks_scene.SUBSTEPS = round(usual / self.scale)
        try:
            return self.inner.step(action)
        finally:
            blocks_scene.SUBSTEPS = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hz", type=float, nargs="+", required=True)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--replan", default="2")
    parser.add_argument("--latency", default="33ms")
    arguments = parser.parse_args()
    rows = []
    for hz in arguments.hz:
        out = arguments.out / f"{arguments.task}-{hz:g}"
        options = json.dumps({"env": TASKS[arguments.task], "hz": hz})
        policy = "pen" if arguments.task == "pen" else "blocks"
        line = ["eval", policy, "--env", "benchmarks.control_rate:AtRate", "--env-options", options]
        line += ["--replan", arguments.replan, "--latency", arguments.latency, "--workers", "1"]
        if sinew([*line, "--episodes", str(arguments.episodes), "--out", str(out)]):
            raise SystemExit(f"{hz:g} Hz failed")
        (variant,) = json.loads((out / "report.json").read_text())["variants"]
        rows.append(
            {"hz": hz, **{name: variant[name] for name in ("wins", "episodes", "interval", "failed_seeds")}}
        )
        print(rows[-1], flush=True)
    print(json.dumps({"task": arguments.task, "episodes": arguments.episodes, "rows": rows}))


if __name__ == "__main__":
    main()

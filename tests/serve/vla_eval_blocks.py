"""The blocks task as a benchmark of vla-eval, with vla-eval's own program, as users of that package run it.

``python -m tests.serve.vla_eval_blocks URL OUT EPISODES [WORKERS]`` plays with vla-eval's own orchestrator, in one
process for each worker and with one queue of episodes. It prints one JSON object per line for each benchmark.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import gymnasium
import sinew_eval.sim  # noqa: F401 - registers the tasks
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.orchestrator import Orchestrator
from vla_eval.specs import IMAGE_RGB, LANGUAGE, RAW, DimSpec

SEED = 5000


class Blocks(StepBenchmark):
    """A benchmark with one task, whose episodes have the seeds of ``sinew eval``."""

    render_backends = frozenset({"gpu", "cpu"})

    @classmethod
    def configure_render(cls, mode: str) -> dict[str, str]:
        return {}

    def __init__(self, env: str = "sinew/Blocks-v0", seed: int = SEED, send_state: bool = False) -> None:
        super().__init__()
        self.env, self.seed, self.send_state = gymnasium.make(env), seed, send_state

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": "blocks", "suite": "sinew"}]

    def reset(self, task: dict[str, Any]) -> Any:
        seen, _ = self.env.reset(seed=self.seed + task["episode_idx"])
        return seen

    def step(self, action: dict[str, Any]) -> StepResult:
        seen, reward, terminated, truncated, info = self.env.step(action["actions"])
        return StepResult(seen, float(reward), terminated or truncated, info)

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        found = {"images": raw_obs["images"], "task_description": raw_obs["prompt"]}
        return {**found, "states": raw_obs["state"]} if self.send_state else found

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": bool(step_result.info["is_success"])}

    def get_hold_action(self, last_action: Any) -> dict[str, Any]:
        return last_action or {"actions": self.env.action_space.sample() * 0}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {"actions": RAW}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {"image": IMAGE_RGB, "language": LANGUAGE, **({"state": RAW} if self.send_state else {})}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": 200}


def main(url: str, out: str, episodes: str, workers: str = "1", mode: str = "sync") -> None:
    """Play the episodes and print vla-eval's results."""
    benchmark = {
        "benchmark": "tests.serve.vla_eval_blocks:Blocks",
        "episodes_per_task": int(episodes),
        "params": {"seed": SEED},
        **({"mode": "live", "hz": 200.0, "paced": False} if mode == "live" else {}),
    }
    config = {
        "server": {"url": url, "timeout": 60.0},
        "render": "cpu",
        "output_dir": out,
        "benchmarks": [benchmark],
    }

    def shard(index: int) -> list[dict[str, Any]]:
        split = {"shard_id": index, "num_shards": int(workers)} if int(workers) > 1 else {}
        return anyio.run(Orchestrator(config, no_save=True, **split).run)

    with ThreadPoolExecutor(int(workers)) as pool:
        for results in pool.map(shard, range(int(workers))):
            for result in results:
                print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

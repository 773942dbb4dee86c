"""What the cameras and joints of the embedded tasks look like, into their bundles: ``python -m research.policies.seen
[TASK ...]``.

The weights stay as they are, to the bit. The graphs that borrow them lie in folders that are named after the content of
the bundles, and are moved along.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the environments
from sinew_eval.sim import blocks_expert, egg, pen

from sinew.bundle import Bundle
from sinew.bundle.schema import Seen
from sinew.bundle.writer import rewrite
from sinew.checks.wiring.thumbnails import Gathering
from sinew.engine.onnx.borrowed import SHIPPED, shipped_folder

FIRST_SEED = 1_000_000  # as of the demonstrations; evaluation uses small seeds
STEPS = 150
TASKS: dict[str, tuple[str, Callable[[gymnasium.Env], np.ndarray]]] = {
    "blocks": ("sinew/Blocks-v0", lambda env: blocks_expert.act(env.unwrapped.world())),  # type: ignore[attr-defined]
    "act": ("sinew/BlocksGoal-v0", lambda env: blocks_expert.act(env.unwrapped.world())),  # type: ignore[attr-defined]
    "pen": ("sinew/Pen-v0", lambda env: pen.act(env.unwrapped)),  # type: ignore[arg-type]
    "egg": ("sinew/Egg-v0", lambda env: egg.act(env.unwrapped)),  # type: ignore[arg-type]
}


def gathered(task: str, episodes: int) -> Seen:
    """Return what the expert of a task sees in so many episodes."""
    name, expert = TASKS[task]
    env, found = gymnasium.make(name), Gathering()
    for seed in range(FIRST_SEED, FIRST_SEED + episodes):
        seen, _ = env.reset(seed=seed)
        for _ in range(STEPS):
            found.add(seen["images"], seen["state"])
            seen, _, over, cut, _ = env.step(expert(env))
            if over or cut:
                break
    env.close()
    return found.seen(f"{episodes} episodes of {name}, played by its expert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="all, if none is named")
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    records = {task: gathered(task, args.episodes) for task in args.tasks or TASKS}
    for path in sorted(SHIPPED.parent.glob("*.gguf")):
        if (task := path.stem.partition("-")[0]) in records:
            bundle, graphs = Bundle(path), shipped_folder(path)
            rewrite(bundle, replace(bundle.manifest, seen=records[task]), path)
            if graphs.is_dir():  # a policy that has just been trained has none yet
                graphs.rename(shipped_folder(path))


if __name__ == "__main__":
    main()

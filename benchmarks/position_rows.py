"""Appendix E of the vla.cpp supplement on the demo policy: what a wrong row of the position table does.

    python -m benchmarks.position_rows --observations 40 --episodes 50

SmolVLM looks patch positions up by a computed index. The rule that computes it in float32, where the model was made
with the exact one, is off by a row for most patches, and nothing reports an error. For each number of solver steps
this prints how far the action chunk moves (same observation, same noise), beside two harmless perturbations:
bfloat16 weights, and the solver's own discretisation error. Then it plays episodes with the wrong rows.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sinew.eval.adapters import make_env
from sinew.eval.policies import InProcess
from sinew.eval.report import stats
from sinew.eval.runner import Conduct, run_episode
from sinew.layers import vit
from sinew.policy import Policy, load

BUNDLE = Path(__file__).resolve().parents[1] / "sinew" / "assets" / "blocks.gguf"
STEPS = (1, 2, 4, 8, 16)
REFINED = 64  # solver steps of the solution that discretisation error is measured against


def naive_rows(rows: int, cols: int, side: int) -> torch.Tensor:
    """The rule as upstream evaluates it, in float32: coordinates and boundaries both rounded."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    row, col = (
        torch.bucketize(torch.arange(n, dtype=torch.float32) / n * (1 - 1e-6), boundaries, right=True)
        for n in (rows, cols)
    )
    return (row[:, None] * side + col).flatten()


@contextlib.contextmanager
def wrong_rows() -> Iterator[None]:
    """Inside, every vision tower looks its positions up by the naive rule."""
    exact = vit.position_rows
    vit.position_rows = naive_rows
    try:
        yield
    finally:
        vit.position_rows = exact


def observations(count: int) -> list[dict[str, Any]]:
    """From the middle of expert episodes: states that a policy meets."""
    from sinew.sim import blocks_expert

    env, adapter = make_env("sinew/Blocks-v0", "", None)
    found = []
    for seed in track(range(9000, 9000 + count), "observations", console=Console(stderr=True)):
        raw, _ = env.reset(seed=seed)
        for _ in range(seed % 30):
            raw, _, ended, cut, _ = env.step(blocks_expert.act(env.unwrapped.world()))
            if ended or cut:
                break
        found.append({**adapter.observation(raw), "seed": seed})
    env.close()
    return found


def chunks(policy: Policy, seen: list[dict[str, Any]], steps: int) -> np.ndarray:
    """[observations, H, D]"""
    return np.stack([policy.infer({**each, "solver_steps": steps}).actions for each in seen])


def displacement(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference within a chunk, mean over the observations; in action units (1 = 2 cm per step)."""
    return float(np.abs(a - b).max(axis=(1, 2)).mean())


def play(episodes: int) -> int:
    env, adapter = make_env("sinew/Blocks-v0", "", None)
    policy = InProcess(str(BUNDLE), "cpu", None, None)
    seeds = track(range(5000, 5000 + episodes), "episodes", console=Console(stderr=True))
    wins = sum(run_episode(env, adapter, policy, Conduct(), seed).success for seed in seeds)
    env.close()
    return wins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    seen = observations(arguments.observations)
    policy, half = load(BUNDLE, "cpu", engine="eager"), load(BUNDLE, "cpu", "bf16", "eager")
    refined = chunks(policy, seen, REFINED)
    with wrong_rows():
        refined_wrong = chunks(policy, seen, REFINED)
    table = Table("solver steps", "wrong rows", "bfloat16", "discretisation, exact", "discretisation, wrong")
    rows = []
    for steps in track(STEPS, "solver steps", console=Console(stderr=True)):
        exact = chunks(policy, seen, steps)
        with wrong_rows():
            wrong = chunks(policy, seen, steps)
        row = {
            "steps": steps,
            "wrong_rows": displacement(exact, wrong),
            "bfloat16": displacement(exact, chunks(half, seen, steps)),
            "discretisation_exact": displacement(exact, refined),
            "discretisation_wrong": displacement(wrong, refined_wrong),
        }
        rows.append({name: round(value, 4) for name, value in row.items()})
        table.add_row(*(f"{value:g}" for value in rows[-1].values()))
    ids = vit.position_rows(8, 8, 8), naive_rows(8, 8, 8)
    moved = int((ids[0] != ids[1]).sum())
    with wrong_rows():
        wins = play(arguments.episodes)
    low, high = stats.wilson(wins, arguments.episodes)
    Console().print(table)
    print(f"{moved} of {len(ids[0])} patches read another row")
    print(
        f"episodes with the wrong rows: {wins}/{arguments.episodes} ({100 * low:.1f} to {100 * high:.1f} %)"
    )
    result = {"displacement": rows, "patches_moved": moved, "wins": wins, "episodes": arguments.episodes}
    print(json.dumps({"schema": "sinew.position_rows/1", "observations": len(seen), **result}))


if __name__ == "__main__":
    main()

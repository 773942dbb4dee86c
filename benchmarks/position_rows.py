"""Measure the effect of wrong rows of the position table on the demo policy (appendix E of the vla.cpp supplement).

    python -m benchmarks.position_rows --observations 40 --episodes 50

SmolVLM computes the index of the position of each patch. A rule that computes the index in float32 is wrong by one row
for most patches, if the model was trained with the exact rule. No error is reported. For several numbers of solver
steps, this program prints the change of the action chunk for the same observation and noise. For comparison, it prints
two harmless changes: bfloat16 weights, and the discretisation error of the solver. Then it plays episodes with the
wrong rows.

    python -m benchmarks.position_rows --resized BUNDLE

This mode measures the other half of table 7. The vision tower of GR00T N1.6 resizes its position table in half
precision. The rounding changes the chunk for every number of solver steps. The last line of the output is JSON.
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
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.policies import InProcess
from sinew_eval.episodes.runner import EpisodeSettings, run_episode

from sinew.cli.bench import make_observation
from sinew.core import statistics
from sinew.layers import vit
from sinew.policy import Policy, load

BUNDLE = Path(__file__).resolve().parents[1] / "sinew" / "assets" / "blocks.gguf"
STEPS = (1, 2, 4, 8, 16)
REFINED = 64  # solver steps of the reference for the discretisation error


def naive_rows(rows: int, cols: int, side: int, device: torch.device | None = None) -> torch.Tensor:
    """Compute the rows as the upstream code does, in float32, with rounded coordinates and boundaries."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    row, col = (
        torch.bucketize(torch.arange(n, dtype=torch.float32) / n * (1 - 1e-6), boundaries, right=True)
        for n in (rows, cols)
    )
    return (row[:, None] * side + col).flatten().to(device)


@contextlib.contextmanager
def wrong_rows() -> Iterator[None]:
    """Within the block, every vision tower uses the float32 rule for its positions."""
    exact = vit.position_rows
    vit.position_rows = naive_rows
    try:
        yield
    finally:
        vit.position_rows = exact


@contextlib.contextmanager
def resized_in_half() -> Iterator[None]:
    """Within the block, towers resize their position table in float16."""
    exact = vit.ResizedPositions.positions

    def positions(self: vit.ResizedPositions, rows: int, cols: int) -> torch.Tensor:
        side, weight = self.config.side, self.position_embedding.weight
        table = weight.half().unflatten(0, (side, side))
        down, across = (vit.antialias_matrix(side, count, table.device).half() for count in (rows, cols))
        resized = torch.einsum("rtc,kt->rkc", torch.einsum("rs,stc->rtc", down, table), across)
        return resized.flatten(0, 1).to(weight.dtype)

    vit.ResizedPositions.positions = positions
    try:
        yield
    finally:
        vit.ResizedPositions.positions = exact


def relative_error(tower: vit.VisionTransformer, rows: int, cols: int, change: Any) -> float:
    """Return the relative error of the positions of a tower inside the context ``change``, in the Frobenius norm."""
    with torch.inference_mode():
        exact = tower.positions(rows, cols).float()
        with change:
            wrong = tower.positions(rows, cols).float()
    return float((wrong - exact).norm() / exact.norm())


def resized(bundle: Path, count: int) -> dict[str, Any]:
    """Return the second row of table 7 for a bundle: error of the table, and change of the chunk by solver steps."""
    policy = load(bundle, "cpu", engine="eager", allow_missing_cameras=True)
    towers = [each for each in policy.engine.model.modules() if isinstance(each, vit.ResizedPositions)]
    if not towers:
        raise SystemExit(f"{bundle}: expected a policy whose tower resizes its position table, got none")
    seen = [
        {**make_observation(policy.spec, None, "pick it up", None), "seed": seed} for seed in range(count)
    ]
    grids: list[tuple[int, int]] = []
    positions = vit.ResizedPositions.positions

    def noted(self: vit.ResizedPositions, rows: int, cols: int) -> torch.Tensor:
        grids.append((rows, cols))
        return positions(self, rows, cols)

    vit.ResizedPositions.positions = noted
    try:
        policy.infer(seen[0])
    finally:
        vit.ResizedPositions.positions = positions
    errors = [relative_error(tower, *grid, resized_in_half()) for tower in towers for grid in set(grids)]
    rows = []
    for steps in STEPS:
        exact = chunks(policy, seen, steps)
        with resized_in_half():
            half = chunks(policy, seen, steps)
        spread = float(np.abs(exact).max())
        rows.append({"steps": steps, "resized_in_half": displacement(exact, half), "largest_action": spread})
    return {
        "grids": sorted(set(grids)),
        "side": towers[0].config.side,
        "relative_error": max(errors),
        "rows": rows,
    }


def observations(count: int) -> list[dict[str, Any]]:
    """Return observations from the middle of expert episodes, with states that occur in the task."""
    from sinew_eval.sim import blocks_expert

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
    """Return the chunks of the observations, [observations, H, D]."""
    return np.stack([policy.infer({**each, "solver_steps": steps}).actions for each in seen])


def displacement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference within a chunk, as a mean over the observations. In action units (1 = 2 cm per
    step)."""
    return float(np.abs(a - b).max(axis=(1, 2)).mean())


def play(episodes: int) -> int:
    env, adapter = make_env("sinew/Blocks-v0", "", None)
    # Engine eager is used, because a plan has fixed rows.
    policy = InProcess(str(BUNDLE), device="cpu", engine="eager")
    seeds = track(range(5000, 5000 + episodes), "episodes", console=Console(stderr=True))
    wins = sum(run_episode(env, adapter, policy, EpisodeSettings(), seed).success for seed in seeds)
    env.close()
    return wins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--resized", type=Path, help="a bundle whose tower resizes its position table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.resized is not None:
        found = resized(arguments.resized, min(arguments.observations, 8))
        table = Table("solver steps", "resized in half precision", "largest action")
        for row in found["rows"]:
            table.add_row(*(f"{value:.3g}" for value in row.values()))
        Console().print(table)
        print(f"relative error of the positions: {found['relative_error']:.2g}")
        print(json.dumps({"schema": "sinew.position_table/1", "bundle": str(arguments.resized), **found}))
        return

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
    low, high = statistics.wilson(wins, arguments.episodes)
    Console().print(table)
    print(f"{moved} of {len(ids[0])} patches use a wrong row")
    tower = policy.engine.model.vision
    error = relative_error(tower, tower.config.side, tower.config.side, wrong_rows())
    print(f"relative error of the positions: {error:.2g}; the appendix: 0.32")
    print(
        f"episodes with the wrong rows: {wins}/{arguments.episodes} ({100 * low:.1f} to {100 * high:.1f} %)"
    )
    result = {
        "relative_error": error,
        "displacement": rows,
        "patches_moved": moved,
        "wins": wins,
        "episodes": arguments.episodes,
    }
    print(json.dumps({"schema": "sinew.position_rows/1", "observations": len(seen), **result}))


if __name__ == "__main__":
    main()

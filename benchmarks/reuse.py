"""Measure the time that ``sinew.load(reuse=True)`` saves when observations repeat, for example for a robot at rest.

python -m benchmarks.reuse BUNDLE [--engine plan] [--threads 1] [--rounds 3]

One process has two policies from one file. One policy reuses results of repeated inputs, and the other computes
everything. In each round, both policies get every kind of observation, and their actions must have the same bits. The
times are milliseconds of processor time of the process, and elapsed milliseconds. A printed ratio is the median of the
ratios of all rounds. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from sinew.core import machine

KINDS = ("all new", "one view new", "instruction new", "state new", "nothing new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default="plan")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from sinew.policy import load

    computes, keeps = (
        load(arguments.bundle, engine=arguments.engine, dtype="fp32", threads=arguments.threads, reuse=reuse)
        for reuse in (False, True)
    )
    keeps.infer(keeps.dummy_observation())  # this inference also runs the trial of the policy
    print(f"reuse: {keeps.describe()['reuse']}", flush=True)
    computes.infer(computes.dummy_observation())
    rng, cameras = np.random.default_rng(0), computes.spec.cameras

    def frame(index: int) -> np.ndarray:
        return rng.integers(0, 256, (cameras[index].height, cameras[index].width, 3), dtype=np.uint8)

    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(arguments.rounds):
        images = {camera.name: frame(index) for index, camera in enumerate(cameras)}
        state = rng.uniform(-0.1, 0.1, computes.spec.state.dim).astype(np.float32)
        first = replace(computes.dummy_observation(), images=images, state=state, seed=number)
        second = replace(first, images={**images, cameras[-1].name: frame(-1)})
        third = replace(second, prompt=f"put it down {number}")
        fourth = replace(third, state=state + np.float32(0.01))
        for kind, observation in zip(KINDS, (first, second, third, fourth, fourth), strict=True):
            row = []
            for policy in (computes, keeps):
                begun = time.process_time(), time.perf_counter()
                chunk = policy.infer(observation)
                row += [1e3 * (time.process_time() - begun[0]), 1e3 * (time.perf_counter() - begun[1])]
                if policy is computes:
                    wanted = chunk.actions
            assert np.array_equal(chunk.actions, wanted), kind
            found[kind].append([*row, chunk.timing.reused_views, chunk.timing.reused_prefix])
    rows = {}
    for kind, rounds in found.items():
        computed, kept = (statistics.median(row[at] for row in rounds) for at in (0, 2))
        rows[kind] = {
            "computed_cpu_ms": round(computed, 1),
            "kept_cpu_ms": round(kept, 1),
            "cpu_ratio": round(statistics.median(row[2] / row[0] for row in rounds), 3),
            "clock_ratio": round(statistics.median(row[3] / row[1] for row in rounds), 3),
            "reused_views": rounds[-1][4],
            "reused_prefix": rounds[-1][5],
        }
        print(f"{kind:16} {rows[kind]}", flush=True)
    print(
        json.dumps(
            {
                "hardware": machine.cpu_model(),
                **{name: getattr(arguments, name) for name in ("engine", "threads", "rounds")},
                "load_average": os.getloadavg()[0],
                "reuse": keeps.describe()["reuse"],
                "kinds": rows,
            }
        )
    )


if __name__ == "__main__":
    main()

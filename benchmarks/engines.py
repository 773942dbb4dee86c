"""Engines side by side, in paired runs of one process: eager, plan, ONNX Runtime in fp32 and in int8.

python benchmarks/engines.py BUNDLE [QUANTISED] [--engines eager plan onnx] [--dtype fp32] [--pairs 7]

Every round runs each engine once, in an order that turns from round to round; ratios are taken within a round,
so that a neighbour who slows a round slows both sides. GFLOP/s are against sgemm of this process, the better
of numpy's and torch's at 2048^3. QUANTISED is what `sinew quantize` made of BUNDLE. --dtype is of the PyTorch
engines; ONNX Runtime computes in fp32. --without REWRITE adds the plan less that rewrite.

A policy of billions of parameters does not fit every machine in every engine at once: name some, and give its
own precision. For pi0, whose bundle `python benchmarks/full_size.py OUT --only pi0 --keep` writes:

python benchmarks/engines.py OUT/pi0.gguf --engines eager plan --dtype native --pairs 3

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from sinew import machine

machine.limit_spinning()  # before torch

import numpy as np  # noqa: E402

from sinew.core import Observation  # noqa: E402
from sinew.engine.example import Shapes  # noqa: E402
from sinew.engine.plan.engine import ON_CPU, PlannedEngine  # noqa: E402
from sinew.engine.plan.plan import REWRITES, Plan  # noqa: E402
from sinew.perf.machine.achieved import sgemm_gflops  # noqa: E402
from sinew.perf.machine.bench import PROMPT, make_observation  # noqa: E402
from sinew.perf.machine.fit import work  # noqa: E402
from sinew.perf.program import PublishedProgram, of_engine  # noqa: E402
from sinew.perf.request import TracedRequest  # noqa: E402
from sinew.policy import Policy, load  # noqa: E402

STAGES = ("vision", "prefix", "head", "total")


def gflop(policy: Policy, tokens: int) -> dict[str, float]:
    """Per stage of one inference."""
    image, spec = policy.manifest.processing.image, policy.spec
    shapes = Shapes(len(spec.cameras), image.height, image.width, tokens, spec.solver_steps)
    if policy.engine_name == "onnx":
        program = PublishedProgram.load(policy.bundle.path, dtypes="fp32", engine="plan")
        program = program.at(TracedRequest(prompt_tokens=tokens))
    else:
        program = of_engine(policy.engine, shapes, spec.name)
    parts = program.components("fused")
    return {p.name: 1e-9 * p.repeats * sum(r.count * r.flops for r in work(p)) for p in parts}


def once(policy: Policy, observation: dict[str, Any], seed: int) -> dict[str, float]:
    timing = policy.infer({**observation, "seed": seed}).timing
    return {
        "vision": timing.vision_ms,
        "prefix": timing.prefix_ms,
        "head": timing.head_ms,
        "total": timing.total_ms,
    }


def _plan_without(rewrite: str, arguments: argparse.Namespace) -> Policy:
    policy = load(arguments.bundle, dtype=arguments.dtype, engine="eager", threads=arguments.threads)
    rewrites = [name for name in ON_CPU if name != rewrite]
    plan = Plan.of(policy.engine.model, policy.spec.solver_steps, rewrites)
    policy.engine, policy.engine_name = PlannedEngine(plan, policy.device), "plan"
    return policy


def _dtype(engine: str, dtype: str) -> str:
    return "fp32" if engine == "onnx" else dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("quantised", type=Path, nargs="?")
    parser.add_argument(
        "--engines", nargs="+", choices=["eager", "plan", "onnx"], default=["eager", "plan", "onnx"]
    )
    parser.add_argument("--without", action="append", default=[], choices=list(REWRITES))
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or native")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    peaks = sgemm_gflops(arguments.threads)
    peak = max(peaks.values())
    sources = {name: (arguments.bundle, name) for name in arguments.engines}
    if arguments.quantised is not None:
        sources["onnx quantised"] = (arguments.quantised, "onnx")
    policies = {
        name: load(path, dtype=_dtype(engine, arguments.dtype), engine=engine, threads=arguments.threads)
        for name, (path, engine) in sources.items()
    }
    for rewrite in arguments.without:
        policies[f"plan without {rewrite}"] = _plan_without(rewrite, arguments)
    first = next(iter(policies))
    observation = make_observation(policies[first].spec, None, PROMPT, None)
    tokens = len(policies[first].processor.inputs(Observation.from_mapping(observation)).tokens)
    for policy in policies.values():
        once(policy, observation, 0)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    order = list(policies)
    for pair in range(arguments.pairs):
        for name in order[pair % len(order) :] + order[: pair % len(order)]:
            samples[name].append(once(policies[name], observation, pair))
    rows = {}
    for name, policy in policies.items():
        work_of = gflop(policy, tokens)
        median = {stage: statistics.median(s[stage] for s in samples[name]) for stage in STAGES}
        ratios = [e["total"] / s["total"] for e, s in zip(samples[first], samples[name], strict=True)]
        rows[name] = {
            "ms": {stage: round(value, 1) for stage, value in median.items()},
            "speed_up": round(statistics.median(ratios), 3),
            "speed_up_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "gflops": {stage: round(1e3 * work_of[stage] / median[stage], 1) for stage in work_of},
            "of_sgemm": {stage: round(1e3 * work_of[stage] / median[stage] / peak, 3) for stage in work_of},
            "totals_ms": [round(s["total"], 1) for s in samples[name]],
        }
        print(f"{name:26} {rows[name]['ms']} x{rows[name]['speed_up']} {rows[name]['of_sgemm']}")
    chunks = {name: policy.infer({**observation, "seed": 0}).actions for name, policy in policies.items()}
    scale = np.abs(chunks[first]).max()
    result = {
        "hardware": machine.cpu_model(),
        "threads": arguments.threads,
        "dtype": {name: policy.dtype for name, policy in policies.items()},
        "recipes": {name: policy.recipe for name, policy in policies.items() if policy.recipe},
        "pairs": arguments.pairs,
        "prompt_tokens": tokens,
        "load_average": [load_before, os.getloadavg()[0]],
        "sgemm_gflops": {name: round(value, 1) for name, value in peaks.items()},
        "against": first,
        "max_abs_of_scale": {
            name: float(np.abs(c - chunks[first]).max() / scale) for name, c in chunks.items()
        },
        "peak_rss_mib": machine.resident_bytes()["peak"] >> 20,
        "engines": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

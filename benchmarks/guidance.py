"""Measure the cost of classifier-free guidance, which computes two prompts for the same views.

    python -m benchmarks.guidance [--rounds 40] [--engines eager plan onnx]

The first part counts the operations of products, convolutions and attention at published sizes, on models without
memory. The frames are encoded once for both prompts.

The second part measures times of the demo policy (sinew/assets/blocks.gguf), whose prompt gets a place for an
advantage label. Each round sends one request without a guidance scale, and then one with a scale. The printed quotient
is the median over the rounds with its 95 % interval. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cyclopts import run
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paired import median_interval
from sinew.bundle import Bundle
from sinew.bundle.writer import rewrite
from sinew.engine.example import Inputs, Shapes
from sinew.families.published import published
from sinew.models import build_on_meta
from sinew.policy import Policy, load
from sinew.steps.prompt.advantage import Advantage

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ("smolvla", "pi0", "pi0.5", "gr00t-n1.7", "evo1")


@torch.no_grad()
def operations(preset: str) -> dict[str, float]:
    """Return the GFLOP of vision, of a chunk with one prompt, and of a chunk with two prompts, at a published size."""
    size = published(preset)
    model = build_on_meta(size.architecture, size.config).eval()
    shapes = Shapes(size.views, size.side, size.width or size.side, size.tokens, size.steps)
    seen = Inputs.example(model, shapes, "meta")
    found: dict[str, float] = {}
    for prompts, name in ((1, "one"), (2, "two")):
        rest = Inputs.example(model, shapes, "meta", prompts)[1:]
        with FlopCounterMode(display=False) as meter:
            image_tokens = model.embed_images(seen.pixels)
            found["vision"] = meter.get_total_flops() / 1e9
            context = model.read(image_tokens.repeat(prompts, 1, 1, 1), *rest)
            noise = torch.empty(prompts, *model.noise_shape, device="meta")
            for time_embedding in model.time_embeddings(size.steps):
                model.act(noise, time_embedding, context)
        found[name] = meter.get_total_flops() / 1e9
    return found | {"quotient": found["two"] / found["one"]}


def with_advantages(folder: Path) -> Path:
    """Write the demo policy with a place for an advantage in its prompt. The labels are words of the policy's
    vocabulary."""
    bundle, out = Bundle(ROOT / "sinew" / "assets" / "blocks.gguf"), folder / "blocks.gguf"
    processing = bundle.manifest.processing
    step = Advantage((("positive", " the left"), ("negative", " the right")))
    prompt = replace(processing.prompt, steps=(step, *processing.prompt.steps))
    rewrite(bundle, replace(bundle.manifest, processing=replace(processing, prompt=prompt)), out)
    return out


def paired(policy: Policy, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a request without and with a guidance scale, and their quotient."""
    policy.warm_up()
    seen = {**vars(policy.dummy_observation()), "prompt": "put the red block into the left bin"}
    requests = [{**seen, "advantage": "positive"}, {**seen, "advantage": "positive", "guidance_scale": 2.0}]
    took: list[list[float]] = [[], []]
    for number in range(rounds + 3):
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            policy.infer(requests[which])
            if number >= 3:
                took[which].append(1e3 * (time.perf_counter() - begun))
    quotients = [two / one for one, two in zip(*took, strict=True)]
    middle, low, high = median_interval(quotients)
    one, two = (sorted(each)[len(each) // 2] for each in took)
    return {"one_ms": one, "two_ms": two, "quotient": middle, "low": low, "high": high, "rounds": rounds}


def main(*, rounds: int = 40, engines: tuple[str, ...] = ("eager", "plan", "onnx")) -> None:
    found: dict[str, Any] = {"operations": {}, "times": {}}
    for preset in PRESETS:
        found["operations"][preset] = counts = operations(preset)
        print(
            f"{preset}: vision {counts['vision']:.1f} GFLOP, one prompt {counts['one']:.1f},"
            f" two {counts['two']:.1f}: factor {counts['quotient']:.2f}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = with_advantages(Path(folder))
        for engine in engines:
            policy = load(path, engine=engine, device="cpu", threads=1)
            found["times"][engine] = row = paired(policy, rounds)
            print(
                f"{engine}: {row['one_ms']:.1f} ms and {row['two_ms']:.1f} ms: {row['quotient']:.2f} times"
                f" ({row['low']:.2f} to {row['high']:.2f}) in {rounds} rounds"
            )
    print(json.dumps(found))


if __name__ == "__main__":
    run(main)

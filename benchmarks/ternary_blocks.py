"""Compare BitVLA's blocks at full width: ternary weights with compiled kernels, and the same weights dense in
float32.

    python -m benchmarks.ternary_blocks [--layers 2] [--rounds 5]

The whole network in float32 needs 10 GB. So both sides have only a few layers of each tower, with BitVLA's widths,
views and tokens. A layer costs the same at any depth. The dense side is engine plan, and the ternary side is engine
cpu. The sides alternate. The times are CPU seconds of the process with one thread. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from sinew.bundle.quant import pack_ternary
from sinew.core import machine
from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.example import Inputs, Shapes
from sinew.engine.plan.engine import ON_CPU
from sinew.engine.plan.plan import Plan
from sinew.families.published import published
from sinew.layers.stores.codes import codes_of
from sinew.layers.stores.lowbit import dequantize
from sinew.models import build_on_meta
from sinew.models.base import Model


def models(layers: int) -> tuple[Model, Model, Shapes]:
    """Return BitVLA with ``layers`` layers for each tower, ternary and dense with the same weights, and its shapes."""
    found = published("bitvla")
    config = found.config
    tower = replace(config.vision[0], num_layers=layers)
    language = replace(config.language, num_layers=layers)
    config = replace(config, vision=(tower,), language=language, vocab_size=512, stop_token=1)
    ternary = build_on_meta(found.architecture, config)
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    wide: dict[str, torch.Tensor] = {}
    for name, parameter in ternary.named_parameters():
        module, _, part = name.rpartition(".")
        layer = ternary.get_submodule(module)
        if not (codes_of(layer) and part in ("weight", "scale")):
            near = 1.0 if "norm" in name else 0.0
            state[name] = wide[name] = near + 0.02 * torch.randn(parameter.shape)
        elif part == "weight":
            values = torch.randint(-1, 2, (layer.out_features, layer.in_features), dtype=torch.int8)
            state[name] = torch.from_numpy(pack_ternary(values.numpy()))
            state[f"{module}.scale"] = torch.full((1,), 0.02)
            scale = state[f"{module}.scale"]
            wide[name] = dequantize(state[name], scale, "ternary", layer.in_features)
    ternary.load_state_dict(state, strict=True, assign=True)
    plain = replace(
        config, vision=(replace(tower, ternary=False),), language=replace(language, ternary=False)
    )
    dense = build_on_meta(found.architecture, plain)
    dense.load_state_dict(wide, strict=True, assign=True)
    shapes = Shapes(found.views, found.side, found.side, found.tokens, found.steps)
    return ternary.eval().requires_grad_(False), dense.eval().requires_grad_(False), shapes


def stages(model: Any, inputs: Inputs) -> tuple[float, float]:
    """Return the CPU seconds of the vision stage and of the prefix stage."""
    start = time.process_time()
    tokens = model.embed_images(inputs.pixels)
    middle = time.process_time()
    model.read(tokens, *inputs[1:])
    return middle - start, time.process_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels = extension().kernels
    ternary, dense, shapes = models(arguments.layers)
    inputs = Inputs.example(dense, shapes)
    rewrites = set(ON_CPU)
    sides = {
        "dense": Plan.of(dense, shapes.steps, rewrites).model,
        "ternary": compile_floats(Plan.of(ternary, shapes.steps, rewrites - {"sigmoid-gelu"})).model,
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with torch.inference_mode():
        for index in range(arguments.rounds + 1):
            for name in list(sides)[:: -1 if index % 2 else 1]:
                found = stages(sides[name], inputs)
                if index:  # the first round only warms up
                    taken[name].append(found)
                    print(f"round {index}  {name:8} vision {found[0]:.2f}, prefix {found[1]:.2f}", flush=True)
    rows = {}
    for at, stage in enumerate(("vision", "prefix")):
        ratios = [d[at] / t[at] for d, t in zip(taken["dense"], taken["ternary"], strict=True)]
        rows[stage] = {
            "faster": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
            **{name: round(min(each[at] for each in values), 3) for name, values in taken.items()},
        }
        print(stage, rows[stage])
    about = {"hardware": machine.cpu_model(), "kernels": kernels, "load_average": os.getloadavg()[0]}
    print(json.dumps({**about, "layers": arguments.layers, "stages": rows}))


if __name__ == "__main__":
    main()

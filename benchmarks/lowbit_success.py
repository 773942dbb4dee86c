"""Closed-loop success of recipes on the embedded tasks, on the episodes that the gates recorded in float32.

python benchmarks/lowbit_success.py sinew/assets/pen.gguf [--episodes 200] [--recipe vision=q4_0,head=int8]

Each recipe is written into a temporary folder and played with engine cpu; episodes, seeds and noise are those of the
gate, as many as it has. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sinew.bundle import Bundle, write_bundle
from sinew.convert.lowbit import lowbit_sources, plan_formats
from sinew.core import SinewError
from sinew.engine.choose import choose
from sinew.engine.onnx.quantize import parse_recipe
from sinew.eval.gating import gate_of, play_gate
from sinew.eval.report.gate import read_gate

RECIPES = (
    "vision=int8,language=int8,head=int8",
    "vision=q8_0,language=q8_0,head=q8_0",
    "vision=q4_0,language=q4_0,head=int8",
    "vision=q4_0,language=q4_0,head=fp32",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--recipe", action="append", default=[])
    parser.add_argument("--episodes", type=int, default=200)
    arguments = parser.parse_args()
    bundle = Bundle(arguments.bundle)
    gate, why = gate_of(arguments.bundle)
    if gate is None:
        raise SinewError(f"{arguments.bundle}: {why}")
    results = {}
    for recipe in arguments.recipe or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            small = Path(folder) / "small.gguf"
            manifest = bundle.manifest
            sources = lowbit_sources(bundle, plan_formats(bundle, parse_recipe(recipe)))
            write_bundle(small, lambda manifest=manifest: manifest, sources)
            choice = choose(Bundle(small))
            found = play_gate(read_gate(gate), small, choice, arguments.episodes)
        results[recipe] = {"engine": choice.engine, "bytes": sum(s.nbytes for s in sources), **found}
        print(f"{recipe}: {json.dumps(results[recipe])}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

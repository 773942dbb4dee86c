"""Convert, load and run a random OpenVLA-OFT at full size (7.5 B numbers): time and memory of each phase.

``python -m benchmarks.openvla_full_size OUT [--runs N]``; needs 31 GB of disk. The checkpoint is written in upstream's
layout with the tiny fixture's config, tokenizer and statistics (``sinew/presets/openvla_checkpoint.py``). The last line
is JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

from cyclopts import run

from benchmarks.pi_full_size import convert, infer, phase
from sinew.presets.openvla_checkpoint import LAYERS, oft_config, write_openvla_checkpoint

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "openvla-oft" / "checkpoint"


def write(checkpoint: Path, layers: int) -> dict:
    write_openvla_checkpoint(checkpoint, FIXTURE, oft_config(layers))
    return {"bytes": sum(file.stat().st_size for file in checkpoint.iterdir())}


def main(
    out: Path, /, *, dtype: str = "native", engine: str = "eager", runs: int = 1, layers: int = LAYERS
) -> None:
    """layers: of the language model, fewer than published for a shorter look. runs: 0 for none."""
    checkpoint, bundle = out / "openvla-oft", out / "openvla-oft.gguf"
    results: dict = {"architecture": "openvla_oft", "layers": layers, "dtype": dtype, "engine": engine}
    if not bundle.exists():
        if not (checkpoint / "proprio_projector--1_checkpoint.pt").exists():
            results["write"] = phase(write, checkpoint, layers)
        results["convert"] = phase(convert, checkpoint, bundle)
        results["bundle_bytes"] = bundle.stat().st_size
    if runs:
        results["infer"] = phase(infer, bundle, dtype, runs, engine)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)

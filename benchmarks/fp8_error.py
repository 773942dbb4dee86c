"""Compute the error of chunks in FP8: relative L2 distance to eager float32, emulated on the CPU with PyTorch.

``python -m benchmarks.fp8_error`` uses the golden cases (tests/cases.py), with one checkpoint for each case. It tests
the language model and only its MLPs in FP8, with calibrated scales of several headrooms. For comparison, it also tests
bfloat16 weights and weights with noise.

With ``--trained``, it uses the trained policies of the package, on episodes of their tasks. It calibrates the scales
on the first 16 observations, and compares the chunks of 32 other observations. The last line of the output is JSON.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinew.convert import convert
from sinew.engine.clone import clone_model
from sinew.engine.cuda.fp8 import scales as calibration
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.plan.plan import Plan
from sinew.policy import Policy, load
from tests.cases import golden_cases
from tests.golden import Golden, relative_l2

CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")
CPU, STEPS = torch.device("cpu"), 10
SEEN, COMPARED = 16, 32  # number of observations for the calibration, and for the comparison
HEADROOMS = (1.0, 2.0, 4.0)
PARTS = ("language.mlp", "language")


def bundle(case: Path, folder: Path) -> Path:
    out = folder / f"{case.name}.gguf"
    sources = {"arch": case / "arch.json"} if (case / "arch.json").exists() else {"vlm": case / "vlm"}
    convert(case / "checkpoint", out, name=case.name, **sources)
    return out


def rows(case: Path, path: Path) -> Iterator[dict[str, Any]]:
    policy, golden = load(path, "cpu", engine="eager"), Golden(case)
    inputs = policy.processor.inputs(replace(policy.dummy_observation(), **golden.observation()))
    noise = golden.numpy("noise")[0]

    def chunk(engine: Any) -> torch.Tensor:
        return torch.from_numpy(engine.run(inputs.batched(), noise[None], STEPS)[0])

    wanted, model = chunk(policy.engine), policy.engine.model
    yield {"what": "bfloat16", "error": relative_l2(chunk(load(path, "cpu", "bf16", "eager").engine), wanted)}
    yield {
        "what": "1 % noise on the weights of the vision tower",
        "error": relative_l2(chunk(noisy(policy)), wanted),
    }
    for planned in (False, True):
        for part in PARTS:
            for headroom in HEADROOMS:
                changed = Plan.of(model, STEPS).model if planned else clone_model(model)
                engine = EagerEngine(changed, CPU)
                layers = calibration.linears(changed, (part,))
                calibration.HEADROOM = headroom
                runs = [lambda e=engine: chunk(e)]
                scales = calibration.calibrate(layers, runs, "0" * 64, case.name).scales
                calibration.use_fp8(changed, layers, scales)
                error = relative_l2(chunk(engine), wanted)
                what = part, "planned" if planned else "eager", headroom
                yield {"what": " ".join(map(str, what)), "layers": len(layers), "error": error}


def noisy(policy: Policy) -> EagerEngine:
    torch.manual_seed(0)
    model = copy.deepcopy(policy.engine.model)
    for parameter in model.vision.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data * (1 + 0.01 * torch.randn_like(parameter))
    return EagerEngine(model, CPU)


def trained(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the median and the largest error of a trained policy for bfloat16 and each choice of FP8 layers."""
    from sinew.checks.judges import observations as episodes
    from sinew.checks.validate.observations import observations

    policy = load(path, "cpu", engine="eager")
    origin, stream = observations(policy, None, episodes)
    data = [
        (policy.processor.inputs(o), policy.processor.noise(o)[0]) for o in islice(stream, SEEN + COMPARED)
    ]
    steps, width = policy.spec.solver_steps, policy.spec.action.dim

    def chunks(engine: Any, part: list[Any]) -> list[torch.Tensor]:
        found = [engine.run(inputs.batched(), noise[None], steps)[0] for inputs, noise in part]
        return [torch.from_numpy(chunk[:, :width]) for chunk in found]

    wanted = chunks(policy.engine, data[SEEN:])

    def row(what: str, engine: Any) -> dict[str, Any]:
        pairs = zip(chunks(engine, data[SEEN:]), wanted, strict=True)
        errors = [relative_l2(got, want) for got, want in pairs]
        return {"what": what, "source": origin, "error": float(np.median(errors)), "largest": max(errors)}

    yield row("bfloat16", load(path, "cpu", "bf16", "eager").engine)
    for part in PARTS:
        model = clone_model(policy.engine.model)
        engine = EagerEngine(model, CPU)
        if not (layers := calibration.linears(model, (part,))):
            continue
        runs = [lambda one=one, e=engine: chunks(e, [one]) for one in data[:SEEN]]
        scales = calibration.calibrate(layers, runs, "0" * 64, origin).scales
        calibration.use_fp8(model, layers, scales)
        yield row(part, engine)


def main_trained() -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((Path(__file__).resolve().parents[1] / "sinew" / "assets").glob("*.gguf")):
        for row in trained(path):
            found.setdefault(path.stem, []).append(row)
            print(
                f"{path.stem:8} {row['what']:36} {row['error']:.2e}, largest {row['largest']:.2e}", flush=True
            )
    print(json.dumps(found))


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            found[name] = []
            for row in rows(golden_cases() / name, bundle(golden_cases() / name, Path(folder))):
                found[name].append(row)
                print(f"{name:14} {row['what']:44} {row['error']:.2e}", flush=True)
    errors = [row["error"] for each in found.values() for row in each]
    assert np.isfinite(errors).all()
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--trained"]:
        main_trained()
    elif len(sys.argv) == 1:
        main()
    else:
        sys.exit("usage: python -m benchmarks.fp8_error [--trained]")

"""``sinew quantize``: a bundle that says which components run in int8, and what that was measured to cost.

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter, validators

from sinew.core import Observation, ObservationError, SinewError

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.bundle.schema import Quantization
    from sinew.engine.onnx.engine import OnnxEngine
    from sinew.policy import Policy

TASKS = ("sinew/Blocks-v0", "sinew/Pen-v0")
FIRST_SEED = 9000  # episodes that neither training nor the gates have seen
REPLAN = 8
SQUARE = 16  # pixels of one colour in a random frame


def quantize(
    bundle: Path,
    /,
    *,
    recipe: str = "vision=int8,language=int8,head=fp32",
    out: Path,
    observations: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 32,
) -> int:
    """Choose a precision per component and measure what it costs; the ONNX Runtime engine follows it.

    Weights are copied as they are: the recipe and the measured error go into the header, and graphs in that
    precision beside the new bundle.

    Args:
        bundle: the bundle file.
        recipe: COMPONENT=PRECISION,...: vision, language, head; int8, int8-rows (a scale per token: slower, and
            exact where few tokens are far larger than the rest) or fp32; fp32 for those not named.
        out: the bundle to write.
        observations: over which the error is measured, from episodes of an embedded task where the policy fits
            one, else random frames.
    """
    from sinew.bundle import Bundle
    from sinew.engine.onnx.cache import cached_graphs
    from sinew.engine.onnx.engine import OnnxEngine
    from sinew.engine.onnx.opening import graphs_of
    from sinew.engine.onnx.quantize import parse_recipe, quantize_graphs, weight_bits
    from sinew.policy import Policy

    chosen = parse_recipe(recipe)
    bits, why = weight_bits()
    opened = Bundle(bundle)
    if opened.manifest.quantization is not None or not opened.infos:
        raise SinewError(f"{bundle}: expected a bundle with weights and without a recipe")
    if out.resolve() == bundle.resolve():
        raise SinewError(f"--out {out}: expected another file than the bundle that is read")
    source = graphs_of(opened)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{out.stem}.onnx.", dir=out.parent))
    try:
        quantize_graphs(source, folder, chosen, bits)
        reference = Policy(opened, engine="onnx")
        errors, origin = measure(reference, OnnxEngine(folder), observations)
        record = _record(chosen, bits, errors, origin)
        write(opened, record, out)
        cached_graphs(out, lambda cache: shutil.copytree(folder, cache, dirs_exist_ok=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"recipe   {', '.join(f'{name} {kind}' for name, kind in chosen.items())}")
    print(f"weights  {bits} bits per output channel: {why}")
    print(f"error    {record.error:.2e} median, {record.error_max:.2e} largest: relative L2 of the chunk")
    print(f"         over {record.observations} observations from {record.source}")
    print(json.dumps({"out": str(out), **asdict(record)}))
    return 0


def _record(recipe: dict[str, Any], bits: Any, errors: list[float], origin: str) -> Quantization:
    from sinew.bundle.schema import Quantization
    from sinew.engine.onnx.providers import runtime

    median, largest = (float(f"{value:.4g}") for value in (np.median(errors), np.max(errors)))
    version = f"onnxruntime {runtime().__version__}"
    return Quantization(recipe, bits, median, largest, len(errors), origin, version)


def measure(reference: Policy, engine: OnnxEngine, count: int) -> tuple[list[float], str]:
    """Relative L2 of the chunk (model units, the action's own columns) per observation, and where they come
    from. The reference plays the episodes."""
    steps, width = reference.spec.solver_steps, reference.spec.action.dim
    found = _episodes(reference)
    origin, stream = ("random frames", _random(reference)) if found is None else found
    errors = []
    for observation in islice(stream, count):
        inputs, noise = reference.processor.inputs(observation), reference.processor.noise(observation)[0]
        wanted, _ = reference.engine.run(inputs, noise, steps)
        got, _ = engine.run(inputs, noise, steps)
        wanted, got = wanted[:, :width], got[:, :width]
        errors.append(float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)))
    return errors, origin


def _episodes(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    """Observations of the embedded task that this policy fits, one per chunk it is asked for."""
    try:
        from sinew.eval.adapters import make_env
    except ModuleNotFoundError:  # gymnasium and mujoco are an extra
        return None
    for task in TASKS:
        env, adapter = make_env(task, "", None)
        raw, _ = env.reset(seed=FIRST_SEED)
        try:
            policy.check(adapter.observation(raw))
        except ObservationError:
            env.close()
            continue
        return f"episodes of {task}", _play(policy, env, adapter)
    return None


def _play(policy: Policy, env: Any, adapter: Any) -> Iterator[Observation]:
    seed = FIRST_SEED
    while True:
        raw, _ = env.reset(seed=seed)
        done, replan = False, 0
        while not done:
            observation = Observation.from_mapping({**adapter.observation(raw), "seed": seed + replan})
            yield observation
            for row in policy.infer(observation).actions[:REPLAN]:
                raw, _, terminated, truncated, _ = env.step(adapter.action(row))
                if done := bool(terminated or truncated):
                    break
            replan += 1
        seed += 1


def _random(policy: Policy) -> Iterator[Observation]:
    """Frames of coloured squares, states as spread as those of the training data."""
    spec, seed = policy.spec, 0
    while True:
        rng = np.random.default_rng(seed)
        images = {}
        for camera in spec.cameras:
            shape = -(-camera.height // SQUARE), -(-camera.width // SQUARE), 3
            squares = rng.integers(0, 256, shape, dtype=np.uint8)
            frame = squares.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
            images[camera.name] = np.ascontiguousarray(frame[: camera.height, : camera.width])
        state = policy.processor.state_normalizer.unnormalize(rng.standard_normal(spec.state.dim))
        base = replace(policy.dummy_observation(), seed=seed)
        yield replace(base, images=images, state=np.asarray(state, np.float32))
        seed += 1


def write(bundle: Bundle, record: Quantization, out: Path) -> None:
    """The bundle's tensors, byte for byte, under a header with the recipe."""
    from sinew.bundle import TensorSource, write_bundle
    from sinew.bundle.writer import FileSlice

    tensors = [
        TensorSource(t.name, t.shape, t.type, t.nbytes, FileSlice(bundle.path, t.offset, t.nbytes))
        for t in sorted(bundle.infos.values(), key=lambda info: info.offset)
    ]
    manifest = replace(bundle.manifest, quantization=record)
    write_bundle(out, lambda: manifest, tensors)

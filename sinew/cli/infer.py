"""``sinew infer``: one observation from files and flags, one action chunk on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from sinew.cli.options import Engine, Providers
from sinew.core import ActionChunk, ObservationError, PolicySpec


def infer(
    bundle: Path,
    /,
    *,
    image: Annotated[list[str], Parameter(negative="")],
    state: Annotated[str, Parameter(allow_leading_hyphen=True)],
    prompt: str,
    seed: int | None = None,
    solver_steps: int | None = None,
    engine: Engine | None = None,
    provider: Providers = (),
    device: str = "cpu",
    dtype: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Run a bundle once on image files and a state, and print the action chunk.

    Args:
        bundle: the bundle file, or a folder that `sinew export` wrote.
        image: CAMERA=FILE, once per camera; a bare FILE where the bundle has a single camera.
        state: numbers in world units, separated by commas.
        prompt: the instruction.
        seed: of the noise that starts the solver; drawn and reported if absent.
        solver_steps: instead of the bundle's own number.
        engine: eager, plan, onnx or cuda; onnx for an exported folder, else eager.
        provider: of ONNX Runtime, in order of preference: cpu, cuda, tensorrt, openvino, coreml, qnn.
        device: cpu, or cuda:N.
        dtype: compute type; the device's default if absent.
        json_output: print one JSON object instead of a table.
    """
    import sinew

    policy = sinew.load(bundle, device, dtype, engine, providers=provider)
    observation = {
        "images": read_images(image, policy.spec),
        "state": parse_vector("state", state),
        "prompt": prompt,
        "seed": seed,
        "solver_steps": solver_steps,
    }
    chunk = policy.infer(observation)
    if json_output:
        print(json.dumps(chunk_to_dict(chunk)))
    else:
        print_chunk(chunk, policy.spec)
    return 0


def read_images(arguments: Sequence[str], spec: PolicySpec) -> dict[str, np.ndarray]:
    """``CAMERA=FILE`` arguments to camera name -> uint8 [height, width, 3]."""
    images = {}
    for argument in arguments:
        camera, separator, name = argument.partition("=")
        if not separator:
            if len(spec.cameras) != 1:
                cameras = ", ".join(slot.name for slot in spec.cameras)
                raise ObservationError("--image", f"CAMERA=FILE with a camera of {cameras}", repr(argument))
            camera, name = spec.cameras[0].name, argument
        if camera in images:
            raise ObservationError("--image", "each camera once", f"{camera!r} twice")
        images[camera] = read_image(Path(name), f"images.{camera}")
    return images


def read_image(path: Path, field: str) -> np.ndarray:
    """Decode one file to uint8 RGB [height, width, 3], turned upright as its EXIF data says."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileNotFoundError:
        raise ObservationError(field, "an image file", f"{path}, which does not exist") from None
    except (UnidentifiedImageError, OSError) as error:
        raise ObservationError(field, "an image file", f"{path}, which does not decode: {error}") from None


def parse_vector(field: str, text: str) -> np.ndarray:
    try:
        return np.array([float(part) for part in text.replace(",", " ").split()], dtype=np.float32)
    except ValueError as error:
        raise ObservationError(field, "numbers separated by commas", str(error)) from None


def chunk_to_dict(chunk: ActionChunk) -> dict[str, object]:
    return {"actions": chunk.actions.tolist(), "seed": chunk.seed, "timing": asdict(chunk.timing)}


def print_chunk(chunk: ActionChunk, spec: PolicySpec, rows: int | None = None) -> None:
    """The chunk as a table, a row per action; ``rows`` cuts a long one short."""
    names = spec.action.names or tuple(str(i) for i in range(spec.action.dim))
    units = spec.action.units or ("",) * spec.action.dim
    table = Table(title=f"action chunk of {spec.name}: {len(chunk.actions)} actions, seed {chunk.seed}")
    table.add_column("step", justify="right")
    for name, unit in zip(names, units, strict=True):
        table.add_column(f"{name} [{unit}]" if unit else name, justify="right", no_wrap=True)
    shown = chunk.actions if rows is None else chunk.actions[:rows]
    for step, action in enumerate(shown):
        table.add_row(str(step), *(f"{value:.4f}" for value in action))
    if len(shown) < len(chunk.actions):
        table.caption = f"the first {len(shown)} of {len(chunk.actions)}"
    console = Console()
    # A robot with many joints needs more columns than a terminal: let the lines run over, never cut digits.
    console.print(table, width=max(console.width, 12 * len(names)), soft_wrap=True)
    timing = chunk.timing
    console.print(
        f"total {timing.total_ms:.1f} ms: preprocess {timing.preprocess_ms:.1f}, vision {timing.vision_ms:.1f},"
        f" prefix {timing.prefix_ms:.1f}, solver {timing.solver_ms:.1f} in {len(timing.step_ms)} steps,"
        f" postprocess {timing.postprocess_ms:.1f} (first inference of this process)",
        highlight=False,
        soft_wrap=True,
    )

"""Measure the FP8 scales of a bundle over observations once, and store them under the bundle's fingerprint."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sinew.bundle import Bundle
from sinew.core import SinewError
from sinew.engine.cuda.fp8 import scales as fp8_calibration
from sinew.engine.cuda.fp8.scales import Fp8Calibration
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.fingerprint import fingerprint
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model
from sinew.processing import ModelInputs


def calibrate(
    bundle: Bundle,
    model: Model,
    observations: Iterable[tuple[ModelInputs, np.ndarray]],
    source: str,
    steps: int | None = None,
) -> tuple[Fp8Calibration, Path]:
    """Run the planned ``model`` over observations, and store the largest input of each linear layer of the language
    model.

    Args:
        bundle: The bundle.
        model: The bundle's model.
        observations: Inputs (with pixels) and noise for each observation.
        source: The origin of the observations, as text.
        steps: Number of solver steps, by default the bundle's number.

    Returns:
        The calibration, and the path of its file.
    """
    device = model.device
    steps = steps or bundle.manifest.spec.solver_steps
    engine = PlannedEngine(Plan.of(model, steps, ON_CUDA), torch.device(device))
    layers = fp8_calibration.linears(engine.model, ("language",))
    runs = (partial(engine.run, inputs.batched(), noise[None], steps) for inputs, noise in observations)
    made = fp8_calibration.calibrate(layers, runs, fingerprint(bundle.path), source)
    return made, fp8_calibration.store(made)


def scales(bundle: Bundle) -> dict[str, float]:
    """Return the FP8 scale of each layer's input, by the layer's name.

    The scales come from the bundle's quantisation recipe, or from a calibration on this machine.

    Raises:
        SinewError: There are no scales.
    """
    recipe = bundle.manifest.quantization
    if recipe is not None and recipe.scales:
        return recipe.scales
    made = fp8_calibration.load(fingerprint(bundle.path))
    if made is None:
        raise SinewError(
            f"{bundle.path}: not calibrated for FP8; write a bundle with scales with"
            " `sinew quantize --recipe language=fp8`"
        )
    return made.scales

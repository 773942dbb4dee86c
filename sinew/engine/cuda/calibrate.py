"""FP8 scales of a bundle: measured over real observations once, kept under the bundle's fingerprint."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.engine.cuda.fp8 import scales as fp8_calibration
from sinew.engine.cuda.fp8.scales import Fp8Calibration
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.fingerprint import fingerprint
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model
from sinew.processing import ModelInputs

log = logging.getLogger(__name__)


def calibrate(
    bundle: Bundle,
    model: Model,
    observations: Iterable[tuple[ModelInputs, np.ndarray]],
    source: str,
    steps: int | None = None,
) -> tuple[Fp8Calibration, Path]:
    """Run the planned ``model`` over pairs of inputs (with pixels) and noise, and keep what its layers saw.

    All components, so that any of them can be asked for later. source: what the observations are, for people.
    """
    device = model.device
    steps = steps or bundle.manifest.spec.solver_steps
    engine = PlannedEngine(Plan.of(model, steps, ON_CUDA), torch.device(device))
    layers = fp8_calibration.linears(engine.model, COMPONENTS)
    runs = (partial(engine.run, inputs.batched(), noise[None], steps) for inputs, noise in observations)
    made = fp8_calibration.calibrate(layers, runs, fingerprint(bundle.path), source)
    return made, fp8_calibration.store(made)


def scales(bundle: Bundle) -> dict[str, float]:
    """Of layers' inputs, by name: from the bundle's recipe, else measured on this machine before; empty where
    neither is there."""
    recipe = bundle.manifest.quantization
    if recipe is not None and recipe.scales:
        return recipe.scales
    made = fp8_calibration.load(fingerprint(bundle.path))
    if made is None:
        log.warning("%s: not calibrated for FP8; each row of an input is scaled by itself", bundle.path)
        return {}
    return made.scales

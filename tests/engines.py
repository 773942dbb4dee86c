"""Run engines on one observation, without the batch axis."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from sinew.core import Timing, machine
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.engine import Engine
from sinew.engine.watch import Trace, Watch
from sinew.models.base import Model
from sinew.processing import ModelInputs
from tests.closeness import Rounding, rounding

LOWERED = machine.half_lowered("bf16")
# for tests in half precision, where engines reject this build of PyTorch (tests/engine/test_choose.py)
needs_half = pytest.mark.skipif(bool(LOWERED), reason=f"PyTorch's attention in bf16 fails with {LOWERED}")


def run_one(
    engine: Engine,
    inputs: ModelInputs,
    noise: np.ndarray,
    steps: int,
    cancel: threading.Event | None = None,
    guidance: Any = None,
    apart: bool = False,
) -> tuple[np.ndarray, Timing]:
    """Return the chunk for noise [H, A], float32 [H, A] in model units, and the times of its stages."""
    watch = Watch(cancel, apart=apart)
    (chunk,) = engine.run(inputs.batched(), noise[None], steps, guidance, watch)
    return chunk, watch.timing()


def eager_rounding(model: Model, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Rounding:
    """Return eager's chunk, as :func:`run_one` does, and the effect of rounding on it. This is the bound of all other
    engines."""
    engine = EagerEngine(model, torch.device("cpu"))
    return rounding(lambda: run_one(engine, inputs, noise, steps)[0])


def trace_one(engine: Engine, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
    """Return the results of each stage for noise [H, A]."""
    return engine.trace(inputs.batched(), noise[None], steps)

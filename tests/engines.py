"""What tests ask of engines: one observation at a time, without the axis of a batch."""

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
# Of tests that compute in half precision with PyTorch, which engines reject then (tests/engine/test_choose.py)
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
    """Return the chunk of noise [H, A], float32 [H, A] in model units, and the times of its stages."""
    watch = Watch(cancel, apart=apart)
    (chunk,) = engine.run(inputs.batched(), noise[None], steps, guidance, watch)
    return chunk, watch.timing()


def eager_rounding(model: Model, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Rounding:
    """Return eager's chunk, as of :func:`run_one`, and what rounding does to it: the bound of every other engine."""
    engine = EagerEngine(model, torch.device("cpu"))
    return rounding(lambda: run_one(engine, inputs, noise, steps)[0])


def trace_one(engine: Engine, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
    """Return what each stage computes of noise [H, A]."""
    return engine.trace(inputs.batched(), noise[None], steps)

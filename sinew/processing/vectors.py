"""Changes of units and frame between a robot's vectors and those a policy was trained on, as data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinew.bundle.schema import VectorStep
from sinew.steps.vector.rotations import compose


def apply_steps(x: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray | None = None) -> np.ndarray:
    """x: float [..., D] -> the same shape, each step applied in order. Formulas: ``schema.VectorStep``.

    ``state``: float [D], for steps that add it; the state after its own steps.
    """
    if not steps:
        return x
    x = x.copy()
    for step in steps:
        dims = list(step.dims)
        part = x[..., dims]
        if step.kind == "affine":
            part = part * step.scale + step.offset
        elif step.kind == "threshold":
            part = np.where(part > step.offset, step.above, step.below)
        elif step.kind == "linear_to_angle":
            with np.errstate(divide="ignore"):  # an opening of zero is beyond the clip
                sine = (step.horn**2 + part**2 - step.arm**2) / (2 * step.horn * part)
            part = np.arcsin(np.clip(sine, -1.0, 1.0))
        else:
            assert state is not None, "actions relative to the state need the state"
            reference = state[list(step.reads)]
            part = part + reference if step.kind == "add_state" else compose(reference, part)
        x[..., dims] = part
    return x

"""Prove a folder of graphs where its weights are not: it carries what eager float32 made of one observation.

``sinew export`` writes the chunk, ``sinew doctor FOLDER`` computes it again, on whatever machine and provider it is.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from sinew_client.given import opened

from sinew.bundle import Bundle
from sinew.checks.validate.observations import random_observations
from sinew.checks.validate.parity import bounds_of, distance, spread_of
from sinew.core import BundleError
from sinew.policy import Policy

REFERENCE = "reference.npy"  # float32 [chunk, actions], in the robot's units


def write_reference(bundle: Bundle, folder: Path) -> None:
    """Write what eager float32 makes of the first random observation, unquantised, beside the graphs."""
    policy = Policy(bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    (folder / REFERENCE).write_bytes(_bytes(policy.infer(next(random_observations(policy))).actions))


def against_reference(policy: Policy, folder: Path) -> tuple[float, float] | None:
    """Return (relative L2 of the chunk over the spread of the statistics, its bound), or None where there is no
    reference. Raises :class:`SinewError` for a file that is none of this policy."""
    path = folder / REFERENCE
    if not path.exists():
        return None
    got = policy.infer(next(random_observations(policy))).actions
    like = _bytes(np.zeros(got.shape, np.float32))
    try:
        with opened(path) as file:
            data = file.read(len(like) + 1)
    except OSError as error:
        raise BundleError(f"{path}: {error}") from None
    head = len(like) - 4 * got.size
    wanted = np.frombuffer(data[head:], np.float32).reshape(got.shape) if len(data) == len(like) else None
    if wanted is None or data[:head] != like[:head] or not np.isfinite(wanted).all():
        expected = f"finite float32 {list(got.shape)} as numpy writes it"
        raise BundleError(f"{path}: expected {expected}, got another file")
    spread = spread_of(policy)
    return distance(got / spread, wanted / spread), bounds_of(policy)["actions"]


def _bytes(actions: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, np.ascontiguousarray(actions, np.float32))
    return data.getvalue()

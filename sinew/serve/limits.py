"""The limits that a server sets for its policies and their requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Settings of a policy's queue, batches and limits of actions. The fields have the names and defaults of the
    flags of ``sinew serve``.
    """

    queue: int = 64
    max_batch: int | Literal["auto"] = 1
    keep_warm_s: float | None = None
    action_limits: str = "refuse"
    action_margin: float = 10.0
    state_margin: float = 20.0
    max_age: float | None = None
    max_megapixels: float | None = None

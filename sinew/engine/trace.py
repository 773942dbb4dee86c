"""Record the tensors of each stage between an observation and its actions, for comparisons of engines."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Trace:
    """The stages of one inference, in the order in which they ran.

    vision: image tokens [V, tokens, C]. prefix: what each step reads of the observation, by name in the context; a
    rewritten model may hold other tensors than the reference. head: the noisy actions after each step of the solver,
    [H, A] in model units. rows: the indices by which tables of embeddings were read, by module.
    """

    vision: np.ndarray
    prefix: dict[str, np.ndarray] = field(default_factory=dict)
    head: list[np.ndarray] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)

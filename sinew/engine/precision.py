"""The precision in which each component of a loaded model really computes."""

from __future__ import annotations

from collections import Counter

from torch import nn

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES

VISION = ("vision", "connector")  # the modules of a model that belong to the component
WORDS = {long: word for word, long in DTYPES.items()}


def component_of(name: str) -> str:
    """Return the component to which a module or parameter belongs, by its path in the model."""
    first = name.partition(".")[0]
    return "vision" if first in VISION else "language" if first == "language" else "head"


def precision_of(model: nn.Module) -> dict[str, str]:
    """Return component -> precision of its parameters, such as "bf16+fp32", the type of most numbers first."""
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    for name, parameter in model.named_parameters():
        long = str(parameter.dtype).removeprefix("torch.")
        counts[component_of(name)][WORDS.get(long, long)] += parameter.numel()
    return {
        part: "+".join(word for word, _ in found.most_common()) for part, found in counts.items() if found
    }

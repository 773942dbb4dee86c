"""The precision in which each component of a loaded model really computes."""

from __future__ import annotations

from collections import Counter

from torch import nn

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES
from sinew.layers.quantized import QuantizedEmbedding, QuantizedLinear

VISION = ("vision", "connector")  # the modules of a model that belong to the component
LOWBIT = (QuantizedLinear, QuantizedEmbedding)
WORDS = {long: word for word, long in DTYPES.items()}


def component_of(name: str) -> str:
    """Return the component to which a module or parameter belongs, by its path in the model."""
    first = name.partition(".")[0]
    return "vision" if first in VISION else "language" if first == "language" else "head"


def precision_of(model: nn.Module) -> dict[str, str]:
    """Return component -> precision of its parameters, such as "bf16+fp32", the type of most numbers first."""
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    formats = {name: m.name for name, m in model.named_modules() if isinstance(m, LOWBIT)}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        long = str(parameter.dtype).removeprefix("torch.")
        word = formats[module] if part == "weight" and module in formats else WORDS.get(long, long)
        counts[component_of(name)][word] += parameter.numel()
    return {
        part: "+".join(word for word, _ in found.most_common()) for part, found in counts.items() if found
    }

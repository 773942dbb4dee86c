"""The precision in which each component of a loaded model really computes."""

from __future__ import annotations

from collections import Counter

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES
from sinew.layers.quantized import QuantizedEmbedding, QuantizedLinear
from sinew.models.base import Model

LOWBIT = (QuantizedLinear, QuantizedEmbedding)
WORDS = {long: word for word, long in DTYPES.items()}


def precision_of(model: Model) -> dict[str, str]:
    """Return component -> precision of its parameters, such as "bf16+fp32", the type of most numbers first."""
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    formats = {name: m.name for name, m in model.named_modules() if isinstance(m, LOWBIT)}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        long = str(parameter.dtype).removeprefix("torch.")
        word = formats[module] if part == "weight" and module in formats else WORDS.get(long, long)
        counts[model.component_of(name)][word] += parameter.numel()
    return {
        part: "+".join(word for word, _ in found.most_common()) for part, found in counts.items() if found
    }

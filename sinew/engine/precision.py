"""Report the precision in which each component of a loaded model computes. No bundle is read here: a machine with a GPU
and without gguf reports it, too (``make gpu``)."""

from __future__ import annotations

from collections import Counter

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES
from sinew.layers.stores.plain import PLAIN
from sinew.models.base import Model

WORDS = {long: word for word, long in DTYPES.items()}


def precision_of(model: Model) -> dict[str, str]:
    """Return component -> precision of its parameters, such as "bf16+fp32", the type of most numbers first.

    Tables that keep their stored form do not count: nothing is computed in it.
    """
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    stores = {name: getattr(module, "store", PLAIN) for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        long = str(parameter.dtype).removeprefix("torch.")
        if word := stores[module].precision(part, WORDS.get(long, long)):
            counts[model.component_of(name)][word] += parameter.numel()
    for found in counts.values():
        if any(word.startswith("fp32 (") for word in found):
            del found["fp32"]  # norms and biases: the same arithmetic
    return {
        part: "+".join(word for word, _ in found.most_common()) for part, found in counts.items() if found
    }

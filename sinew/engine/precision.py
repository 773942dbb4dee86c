"""Report the precision in which each component of a loaded model computes."""

from __future__ import annotations

from collections import Counter

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES
from sinew.engine.storage import upcast_text
from sinew.layers.quantized import QuantizedLinear
from sinew.layers.tables import StoredRows
from sinew.layers.upcast import UpcastLinear
from sinew.models.base import Model

WORDS = {long: word for word, long in DTYPES.items()}


def precision_of(model: Model) -> dict[str, str]:
    """Return component -> precision of its parameters, such as "bf16+fp32", the type of most numbers first.

    Tables that keep their stored form do not count: nothing is computed in it.
    """
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    formats = {name: m.name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    upcast = {name for name, module in model.named_modules() if isinstance(module, UpcastLinear)}
    tables = {name for name, module in model.named_modules() if isinstance(module, StoredRows)}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        if module in tables:
            continue
        long = str(parameter.dtype).removeprefix("torch.")
        word = formats[module] if part == "weight" and module in formats else WORDS.get(long, long)
        if module in upcast and word != "fp32":
            word = upcast_text(word)
        counts[model.component_of(name)][word] += parameter.numel()
    for found in counts.values():
        if any(word.startswith("fp32 (") for word in found):
            del found["fp32"]  # norms and biases: the same arithmetic
    return {
        part: "+".join(word for word, _ in found.most_common()) for part, found in counts.items() if found
    }

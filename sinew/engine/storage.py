"""Decide, in this one place, whether weights stay in half precision while a CPU computes in float32, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.core import PROMPT_TABLE
from sinew.system import machine

if TYPE_CHECKING:  # the CUDA engine runs where there is no gguf package
    from sinew.bundle import Bundle
    from sinew.engine.backend import Backend

GIB = 1 << 30
WORDS = {"BF16": "bf16", "F16": "fp16"}  # GGUF's names of types
ROOM = GIB  # for activations and the program itself


def half_storage(bundle: Bundle, dtype: str, device: str, backend: Backend) -> tuple[str, str]:
    """Return the half precision ("bf16", "fp16") in which weights stay although products are float32, and why.

    Two empty strings where nothing is upcast: on GPUs, on a CPU that multiplies the weights' own precision, and where
    fp32 was chosen and a copy of all weights fits the memory that is available now (engine cpu makes none anyhow).
    """
    stored = {
        name: info
        for name, info in bundle.infos.items()
        if info.type.name in WORDS and not name.endswith(f"{PROMPT_TABLE}.weight")  # which is never copied
    }
    words = (
        sorted({WORDS[info.type.name] for info in stored.values()})
        if dtype in ("fp32", "native")
        else [dtype]
    )
    if device.partition(":")[0] != "cpu" or not backend.stores_half or not bundle.infos or not words:
        return "", ""
    kind = "+".join(words)
    if dtype == "fp32" and backend.copies_none:
        reason = f"engine {backend.name} copies no weights"
    elif dtype == "fp32":
        copies, available = 2 * sum(info.nbytes for info in stored.values()), machine.memory()[1]
        if copies + ROOM <= available:
            return "", ""
        reason = f"{copies / GIB:.1f} GiB of fp32 copies do not fit the {available / GIB:.1f} GiB available"
    else:
        words = [word for word in words if not machine.half_units(word)]
        if not words:
            return "", ""
        reason = f"this CPU has no {' or '.join(words)} products"
    return kind, f"{reason}: weights stay {kind} and become fp32 block by block as they are multiplied"

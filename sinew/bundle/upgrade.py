"""Bundles of older formats, brought up to the present one while their header is read. Tensors never change."""

from __future__ import annotations

from typing import Any

READS = (1, 2)  # formats that this version understands; it writes the last

# Format 1 named a decoder's norm and activation by a family.
DECODERS = {"llama": {}, "gemma": {"norm": "gemma_rms", "activation": "gelu_tanh"}}


def upgraded(config: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the architecture's record of a bundle of format ``version`` as the present format has it.

    A value that format 1 does not know stays, so that the decoder refuses it by name.
    """
    if version != 1:
        return config
    made = dict(config)
    for part, record in config.items():
        if isinstance(record, dict) and (fields := DECODERS.get(str(record.get("family")))) is not None:
            made[part] = {key: value for key, value in record.items() if key != "family"} | fields
    return made

"""Believable hyper-parameters: a configuration may come from a stranger's file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

MAX_WIDTH = 1 << 20
MAX_LAYERS = 512
MAX_LENGTH = 8192  # tokens or actions


def check_sizes(config: Any) -> None:
    """Every integer field of a frozen config is of a size that a model can have: positive, unless its
    default is zero.

    Raises ValueError that names the field, before anything is allocated for it.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            limit = MAX_LAYERS if field.name == "num_layers" else MAX_WIDTH
            limit = MAX_LENGTH if field.name in ("chunk_size", "prefix_length") else limit
            low = 0 if field.default == 0 else 1
            if not low <= value <= limit:
                raise ValueError(f"{field.name} is {value}, expected {low} to {limit}")

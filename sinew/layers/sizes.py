"""Limits for model sizes, because a configuration may come from an untrusted file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

MAX_WIDTH = 1 << 20
MAX_LAYERS = 512
MAX_LENGTH = 8192  # tokens or actions


def check_sizes(config: Any) -> None:
    """Check that every integer field of a configuration is in the range of a real model, before memory is allocated.

    A field must be positive, or at least zero if its default is zero.

    Raises:
        ValueError: A field is outside its range. The message names the field.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            limit = MAX_LAYERS if field.name == "num_layers" else MAX_WIDTH
            limit = MAX_LENGTH if field.name in ("chunk_size", "prefix_length") else limit
            low = 0 if field.default == 0 else 1
            if not low <= value <= limit:
                raise ValueError(f"{field.name}: expected {low} to {limit}, got {value}")

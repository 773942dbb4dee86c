"""Believable hyper-parameters: a configuration may come from a stranger's file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

MAX_WIDTH = 1 << 20
MAX_LAYERS = 512


def check_sizes(config: Any) -> None:
    """Every integer field of a frozen config is positive and of a size that a model can have.

    Raises ValueError that names the field, before anything is allocated for it.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            limit = MAX_LAYERS if field.name == "num_layers" else MAX_WIDTH
            if not 1 <= value <= limit:
                raise ValueError(f"{field.name} is {value}, expected 1 to {limit}")

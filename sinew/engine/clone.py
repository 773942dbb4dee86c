"""A second tree of modules over the parameters of a loaded model, for whoever changes modules and copies no weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from sinew.models.base import Model


def clone_model(model: Model, changing: Iterable[str] | None = None) -> Model:
    """Return the same parameters in a module tree of their own.

    changing: names of the modules that will be changed; what contains none of them is the model's own module. None:
    any of them may be.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if changing is not None:
        parts = [name.split(".") for name in changing]
        own = {".".join(each[:length]) for each in parts for length in range(len(each) + 1)}
        shared |= {id(module): module for name, module in model.named_modules() if name not in own}
    return copy.deepcopy(model, shared)

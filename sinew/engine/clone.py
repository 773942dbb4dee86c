"""Copy a model's tree of modules without its weights, so that modules can be changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from sinew.models.base import Model

M = TypeVar("M", bound=nn.Module)
ATOMS = {type(None), bool, int, float, str}
CONTAINERS = {dict, OrderedDict, set, list}


def clone_model(model: Model, changing: Iterable[str] | None = None) -> Model:
    """Return a copy of the module tree of ``model``. The copy uses the same parameters, so that it needs almost no
    memory.

    Args:
        model: The model, which is not changed.
        changing: Names of the modules that the caller will change. A module that contains none of them is not copied:
            both trees use it. None copies every module.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if changing is not None:
        parts = [name.split(".") for name in changing]
        own = {".".join(each[:length]) for each in parts for length in range(len(each) + 1)}
        shared |= {id(module): module for name, module in model.named_modules() if name not in own}
    return copy_modules(model, shared)


def copy_modules(module: M, known: dict[int, Any]) -> M:
    """Return a copy of a module tree.

    ``copy.deepcopy`` does the same two to five times slower, because it copies each module's dozen empty dictionaries
    of hooks. An object whose class defines ``__deepcopy__`` is copied by that method.

    Args:
        module: The root of the tree.
        known: The replacement of each tensor or module, by the ``id()`` of the original. The function adds its copies
            to this dict.
    """
    if id(module) in known:
        return known[id(module)]
    if hasattr(module, "__deepcopy__"):
        return copy.deepcopy(module, known)
    copied_module = known[id(module)] = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if type(value) in ATOMS:
            copied = value
        elif not value and type(value) in CONTAINERS:
            copied = type(value)()
        elif name == "_modules":
            copied = {k: None if child is None else copy_modules(child, known) for k, child in value.items()}
        else:
            copied = copy.deepcopy(value, known)
        vars(copied_module)[name] = copied
    return copied_module


def on_meta(model: Model) -> Model:
    """Return a copy of the model on the meta device, which has shapes and dtypes but no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach().to("meta"), requires_grad=False) for tensor in tensors
    }
    return copy_modules(model, empty)

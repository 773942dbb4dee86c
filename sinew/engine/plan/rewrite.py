"""Rewrites, which make a model faster, their outcomes, and the two ways in which they change a model.

A rewrite gets a clone of the loaded model, which is a separate tree of modules with the same parameters. The rewrite
may replace parameters and modules of the clone, or give a module another class (:func:`become`). The loaded model is
never changed.

A rewrite changes only the classes that it was written for (:func:`exactly`). It does not change their subclasses: a
subclass may add norms, rotations or quantisation, which a replaced method would not compute. Unknown modules are left
unchanged, and the outcome names them (:func:`left_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from sinew.layers.linear import Linear
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.store import Store, Tensors
from sinew.models.base import Model

Status = Literal["applied", "built in", "not applicable", "off"]


@dataclass(frozen=True, slots=True)
class RewriteOutcome:
    """The outcome of one rewrite: whether it was applied, and which modules it changed.

    Attributes:
        name: The rewrite's name.
        status: "applied" if the rewrite changed at least one module.
        reason: The reason for the status.
        where: Names of the changed modules.
    """

    name: str
    status: Status
    reason: str
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A change of a model that makes it faster.

    Attributes:
        name: The rewrite's name.
        summary: The effect in one line.
        apply: Changes the clone, and returns (status, reason, modules).
    """

    name: str
    summary: str
    apply: Callable[[Model], tuple[Status, str, tuple[str, ...]]]

    def __call__(self, model: Model) -> RewriteOutcome:
        return RewriteOutcome(self.name, *self.apply(model))


def share(model: Model, other: Model) -> None:
    """Make ``model`` use a tensor of ``other`` wherever the tensors with the same name have the same bits."""
    theirs: dict[str, Tensor] = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        same = theirs.get(name)
        if same is None or (same.shape, same.dtype) != (tensor.shape, tensor.dtype):
            continue
        if same.data_ptr() != tensor.data_ptr() and torch.equal(same, tensor):
            module, _, part = name.rpartition(".")
            setattr(model.get_submodule(module), part, same)


def loaded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had in the loaded model, before rewrites changed the class."""
    return vars(module).get("loaded_class", type(module))


def exactly(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if ``module`` was loaded as one of ``kinds``, not as a subclass."""
    return loaded_class(module) in kinds


def foreign(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return the reason why a rewrite for the class ``kind`` does not change ``module``, if the module belongs to a
    subclass; None for other modules.
    """
    cls = loaded_class(module)
    return (
        f"{cls.__name__} is a subclass of {kind.__name__} and may compute something else"
        if isinstance(module, kind) and cls is not kind
        else None
    )


def left_out(left: Mapping[str, str]) -> str:
    """Return text that lists the modules which a rewrite did not change.

    Args:
        left: The names of unchanged modules, each with the reason.
    """
    whys = ", ".join(sorted(set(left.values())))
    return f"; not {', '.join(spans(list(left)))} ({whys})" if left else ""


def verdict(
    names: Sequence[str], left: Mapping[str, str], reason: str, absent: str
) -> tuple[Status, str, tuple[str, ...]]:
    """Return the outcome of a rewrite: its status ("applied" or "not applicable"), its reason and the changed
    modules.

    Args:
        names: Names of the changed modules.
        left: The names of unchanged modules, each with the reason.
        reason: The reason for the changes.
        absent: The reason if the model had no module to change.
    """
    if not names and not left:
        return "not applicable", absent, ()
    return ("applied" if names else "not applicable"), reason + left_out(left), spans(names)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the methods of ``kind``, before the methods of its own class. ``kind`` must not need attributes
    of its own."""
    cls = type(module)
    vars(module).setdefault("loaded_class", cls)
    bases = (kind,) if issubclass(kind, cls) else (kind, cls)
    module.__class__ = type(f"{kind.__name__}{cls.__name__}", bases, {}) if len(bases) > 1 else kind


def linear(weight: Tensor, bias: Tensor | None = None, store: Store = PLAIN) -> Linear:
    """Return a linear layer that uses existing tensors as its weight and bias. The function allocates no memory."""
    out_size, in_size = store.size(Tensors(weight))
    layer = Linear(in_size, out_size, bias=bias is not None, device="meta")
    layer.store = store
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join the rows of all ``tensors``. The result is a view if the tensors are adjacent in memory, else a copy.

    A bundle stores a layer's q, k and v side by side, so the packed form is often a view of the file.
    """
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata  # noqa: SLF001 - identity
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return torch.cat([t.detach() for t in tensors])
        end += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def spans(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten a list of module names: layers.0.attn and layers.1.attn become layers.0-1.attn."""
    groups: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = name if at is None else ".".join([*parts[:at], "{}", *parts[at + 1 :]])
        groups.setdefault(key, []).append(-1 if at is None else int(parts[at]))
    return tuple(key.format(_ranges(numbers)) if "{}" in key else key for key, numbers in groups.items())


def _ranges(numbers: list[int]) -> str:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if len(numbers) > 2 and all(b - a == step for a, b in pairwise(numbers)):
        return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, numbers))

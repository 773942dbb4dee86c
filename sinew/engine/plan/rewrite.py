"""Rewrites, their reports, and the two ways in which they change a model.

A rewrite gets a clone of the loaded model: its own tree of modules with the same parameters. It may replace
parameters and modules of the clone, and give a module another class (:func:`become`). The loaded model is never
changed.

A rewrite changes only the very classes it was written for (:func:`exactly`), not their subclasses, which may add
norms, rotations or quantisation that a replaced method would lose. Unknown modules are left unchanged, and the
outcome names them (:func:`left_out`).
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
from sinew.layers.stores.store import Store
from sinew.models.base import Model

Status = Literal["applied", "built in", "not applicable", "off"]


@dataclass(frozen=True, slots=True)
class RewriteOutcome:
    """The outcome of one rewrite. ``where``: the modules it changed; ``reason``: why it did or did not."""

    name: str
    status: Status
    reason: str
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewrite:
    """``apply`` changes the clone and returns (status, reason, modules)."""

    name: str
    summary: str
    apply: Callable[[Model], tuple[Status, str, tuple[str, ...]]]

    def __call__(self, model: Model) -> RewriteOutcome:
        return RewriteOutcome(self.name, *self.apply(model))


def share(model: Model, other: Model) -> None:
    """Let ``model`` hold the tensors of ``other`` wherever its own, of the same name, are the same in every bit."""
    theirs: dict[str, Tensor] = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = theirs.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            continue
        if found.data_ptr() != tensor.data_ptr() and torch.equal(found, tensor):
            module, _, part = name.rpartition(".")
            setattr(model.get_submodule(module), part, found)


def loaded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the model gave to ``module``, before any rewrite."""
    return vars(module).get("loaded_class", type(module))


def exactly(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if ``module`` was loaded as one of ``kinds``, not as a subclass."""
    return loaded_class(module) in kinds


def foreign(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return why a rewrite of ``kind`` leaves an instance of it alone: it is a subclass. None if it is not."""
    cls = loaded_class(module)
    return f"{cls.__name__} is not {kind.__name__}" if isinstance(module, kind) and cls is not kind else None


def left_out(left: Mapping[str, str]) -> str:
    """Return the part of a reason that names the modules (name -> why) which a rewrite did not change."""
    whys = ", ".join(sorted(set(left.values())))
    return f"; not {', '.join(spans(list(left)))} ({whys})" if left else ""


def verdict(
    names: Sequence[str], left: Mapping[str, str], reason: str, absent: str
) -> tuple[Status, str, tuple[str, ...]]:
    """Return status, reason and modules of a rewrite that changed ``names`` and left others (name -> why). ``absent``:
    what the model lacks, where there was nothing to change."""
    if not names and not left:
        return "not applicable", absent, ()
    return ("applied" if names else "not applicable"), reason + left_out(left), spans(names)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Put the methods of ``kind`` before the module's own; ``kind`` adds no state of its own making."""
    cls = type(module)
    vars(module).setdefault("loaded_class", cls)
    bases = (kind,) if issubclass(kind, cls) else (kind, cls)
    module.__class__ = type(f"{kind.__name__}{cls.__name__}", bases, {}) if len(bases) > 1 else kind


def linear(weight: Tensor, bias: Tensor | None = None, store: Store = PLAIN) -> Linear:
    """Return a linear layer over finished tensors of floats; nothing is allocated."""
    out_size, in_size = weight.shape
    made = Linear(in_size, out_size, bias=bias is not None, device="meta")
    made.store = store
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join the rows of all ``tensors``: a view if they are adjacent in memory, else a copy.

    A bundle stores a layer's q, k and v side by side, so their packed form often is the file itself.
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
    """Module names with runs of numbers folded: layers.0.attn, layers.1.attn -> layers.0-1.attn."""
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

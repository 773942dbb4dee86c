"""The rewritten model as functions whose arguments and results are only tensors. Engines record these functions, for
example as ONNX graphs.

The model has three stages. ``Vision`` and ``Read`` (the language model) run once per observation. The third stage is
a step: ``StepProgram`` runs once per solver step, or ``NextToken`` once per token of an autoregressive head. Between
the stages, the model's context (the result of ``Read``) is a flat tuple of named tensors. Shapes follow from views,
image size, prompt length and chunk size, and no branch depends on a value. The engine's loop over the solver joins
the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sinew.engine.clone import on_meta
from sinew.engine.example import Inputs, Shapes
from sinew.engine.plan.plan import Plan
from sinew.engine.traced import place
from sinew.models.base import AutoregressiveModel, Context, Model, Spoken

SAID = "context.spoken."  # prefix of the names of tensors in the field ``spoken`` of :class:`TextPrefix`


@dataclass(frozen=True)
class Layout:
    """Converts a context (a tree of tensors) to a flat tuple of tensors, and back. The tuple contains no tensor
    twice.

    Attributes:
        names: Names of the tensors, "context.FIELD.INDEX...".
        spec: The structure of the context.
        leaves: For each leaf of the context, its tensor's index in the tuple, or the leaf itself if it is not a
            tensor.
    """

    names: tuple[str, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, context: Context) -> Layout:
        paths, spec = pytree.tree_flatten_with_path(context)
        places: dict[int, int] = {}
        names: list[str] = []
        leaves: list[Any] = []
        for path, leaf in paths:
            if isinstance(leaf, Tensor):
                if id(leaf) not in places:
                    places[id(leaf)] = len(names)
                    names.append(".".join(["context", *map(place, path)]))
                leaves.append(_Place(places[id(leaf)]))
            else:
                leaves.append(leaf)
        return cls(tuple(names), spec, tuple(leaves))

    def flat(self, context: Context) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(context)
        firsts = {
            place: leaf
            for place, leaf in reversed(list(zip(self.leaves, leaves, strict=True)))
            if isinstance(place, _Place)
        }
        return tuple(firsts[_Place(i)] for i in range(len(self.names)))

    def context(self, tensors: tuple[Tensor, ...]) -> Context:
        leaves = [tensors[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Place:
    index: int


class Vision(nn.Module):
    """The first stage: computes image tokens [B, V, tokens, C] from pixels, float32 [B, V, channels, height, width]."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.embed_images(pixels)


class Read(nn.Module):
    """The second stage: computes the context, as the tensors that ``StepProgram`` or ``NextToken`` reads.

    The inputs are image_tokens [B, V, tokens, C], camera_mask [B, V], tokens and token_mask [B, L], and state [B, S].
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__()
        self.model, self.layout = model, layout

    def forward(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, ...]:
        return self.layout.flat(
            begun(self.model, self.model.read(image_tokens, camera_mask, tokens, token_mask, state))
        )


class StepProgram(nn.Module):
    """The third stage of a model with a solver: computes the head's output [B, H, A] for one solver step.

    The inputs are x [B, H, A], the step's time embedding (a row of ``Plan.time_embeddings``), and the result of
    ``Read``. One program serves every number of steps, because the tables are not part of it.
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__()
        self.model, self.layout = model, layout

    def forward(self, x: Tensor, time_embedding: Tensor, *tensors: Tensor) -> Tensor:
        return self.model.act(x, time_embedding, self.layout.context(tensors))


class TextPrefix(NamedTuple):
    """The context of an autoregressive head, in two parts.

    Attributes:
        prompt: The part of the context that does not change when tokens are generated.
        spoken: The part of the context that each generated token changes.
    """

    prompt: Context
    spoken: Spoken


def begun(model: Model, context: Context) -> Context:
    """Return the context in the form of the stage ``Read``. For an autoregressive head, the first token is generated
    and added.
    """
    return TextPrefix(context, model.first(context)) if isinstance(model, AutoregressiveModel) else context


class NextToken(nn.Module):
    """The third stage of an autoregressive model: generates one more token.

    The input is the result of ``Read``. The output is the tensors that the token changes.
    """

    def __init__(self, model: AutoregressiveModel, layout: Layout):
        super().__init__()
        self.model, self.layout = model, layout

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        prompt, spoken = self.layout.context(tensors)
        return tuple(pytree.tree_leaves(self.model.next(spoken, prompt)))


class Stages(NamedTuple):
    """The three stages of a rewritten model, and the tensors between them.

    Attributes:
        vision: The first stage.
        read: The second stage.
        step: The stage that runs once per solver step or token.
        reads: Names of the tensors from ``read`` to ``step``.
        said: The names in ``reads`` of the tensors that a new token changes, in the order in which ``step`` returns
            them.
        grows: For each name in ``reads``, the axis whose length grows with the prompt, and the difference between
            this length and that of the first such axis. None without such an axis.
        batch_axes: For each name in ``reads``, the batch axis. None if all observations share the tensor.
        unbatched: The first tensor without a separate batch axis, or "".
    """

    vision: Vision
    read: Read
    step: StepProgram | NextToken
    reads: tuple[str, ...]
    said: tuple[str, ...]
    grows: tuple[tuple[int, int] | None, ...]
    batch_axes: tuple[int | None, ...]
    unbatched: str


@torch.no_grad()
def stages(plan: Plan, shapes: Shapes) -> Stages:
    """Return the stages of a plan.

    Args:
        plan: The plan.
        shapes: The sizes of an observation. Any length of the prompt gives the same result.
    """
    model, empty = plan.model, on_meta(plan.model)

    def context(length: int, batch: int) -> Context:
        return begun(empty, Inputs.example(empty, replace(shapes, tokens=length), batch=batch).read(empty))

    short_context = context(6, 1)
    layout = Layout.of(short_context)
    one, longer, two = (layout.flat(found) for found in (short_context, context(7, 1), context(6, 2)))
    offsets: list[tuple[int, int] | None] = []
    first: int | None = None
    for short, long in zip(one, longer, strict=True):
        axis = next((i for i, size in enumerate(long.shape) if size != short.shape[i]), None)
        if axis is not None and first is None:
            first = short.shape[axis]
        offsets.append(None if axis is None or first is None else (axis, short.shape[axis] - first))
    changed = [
        [(i, a, b) for i, (a, b) in enumerate(zip(alone.shape, pair.shape, strict=True)) if a != b]
        for alone, pair in zip(one, two, strict=True)
    ]
    merged = [
        name
        for name, axes in zip(layout.names, changed, strict=True)
        if axes and [a[1:] for a in axes] != [(1, 2)]
    ]
    return Stages(
        Vision(model),
        Read(model, layout),
        NextToken(model, layout) if isinstance(model, AutoregressiveModel) else StepProgram(model, layout),
        layout.names,
        tuple(name for name in layout.names if name.startswith(SAID))
        if isinstance(model, AutoregressiveModel)
        else (),
        tuple(offsets),
        tuple(axes[0][0] if axes else None for axes in changed),
        merged[0] if merged else "",
    )

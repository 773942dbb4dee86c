"""The planned model as functions of tensors alone, for engines that record a program instead of calling one.

Three stages: ``Vision`` and ``Read`` once per observation, ``Step`` once per solver step. What goes from
``Read`` to ``Step`` is a flat tuple of named tensors. Shapes follow from views, image size, prompt length
and chunk size; nothing branches on a value. The solver's loop, which is the engine's, joins them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sinew.engine.plan.cost import on_meta
from sinew.engine.plan.plan import Plan
from sinew.layers.rope import Rotation
from sinew.models.base import FlowModel, Frame, Prefix


class Vision(nn.Module):
    """pixels float32 [B, V, 3, height, width] -> image tokens [B, V, tokens, C]."""

    def __init__(self, model: FlowModel):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.embed_images(pixels)


class Read(nn.Module):
    """image_tokens [B, V, tokens, C], camera_mask [B, V], tokens and token_mask [B, L], state [B, S] -> the
    tensors that ``Step`` reads."""

    def __init__(self, model: FlowModel):
        super().__init__()
        self.model = model

    def forward(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, ...]:
        prefix = self.model.prefix(image_tokens, camera_mask, tokens, token_mask, state)
        return tuple(_flat(prefix, self.model.frame(prefix)).values())


class Step(nn.Module):
    """x [B, H, A], the step's moment (a row of ``Plan.moments``), and what ``Read`` returned -> velocity
    [B, H, A]. One program for every number of steps: the tables stay outside."""

    def __init__(self, model: FlowModel, reads: tuple[str, ...]):
        super().__init__()
        self.model, self.reads = model, reads

    def forward(self, x: Tensor, moment: Tensor, *tensors: Tensor) -> Tensor:
        frame, prefix = _structured(dict(zip(self.reads, tensors, strict=True)))
        return self.model.step(x, moment, frame, prefix)


class Stages(NamedTuple):
    """``reads``: the names of the tensors from ``read`` to ``step``; ``grows``: for each of them, which axis
    grows with the prompt, and by how much it is longer than the first one's; None if none does."""

    vision: Vision
    read: Read
    step: Step
    reads: tuple[str, ...]
    grows: tuple[tuple[int, int] | None, ...]


@torch.no_grad()
def stages(plan: Plan) -> Stages:
    short, long = (_shapes(on_meta(plan.model), length) for length in (6, 7))
    first = next(iter(short.values()))
    offsets: list[tuple[int, int] | None] = []
    for name, shape in short.items():
        axis = next((i for i, size in enumerate(long[name]) if size != shape[i]), None)
        offsets.append(None if axis is None else (axis, shape[axis] - first[1]))
    reads = tuple(short)
    model = plan.model
    return Stages(Vision(model), Read(model), Step(model, reads), reads, tuple(offsets))


def _shapes(model: FlowModel, length: int) -> dict[str, tuple[int, ...]]:
    """Of what ``Read`` returns for a prompt of ``length``, from a run without memory."""
    side, meta = model.config.vision.image_size, torch.device("meta")
    tokens = torch.empty(1, length, dtype=torch.int64, device=meta)
    image_tokens = model.embed_images(torch.empty(1, 1, 3, side, side, device=meta))
    masks = tokens[:, :1] >= 0, tokens >= 0
    prefix = model.prefix(
        image_tokens, masks[0], tokens, masks[1], torch.empty(1, model.state_size, device=meta)
    )
    return {name: tuple(tensor.shape) for name, tensor in _flat(prefix, model.frame(prefix)).items()}


def _flat(prefix: Prefix, frame: Frame) -> dict[str, Tensor]:
    named = {f"{which}.{i}": t for i, kv in enumerate(prefix.kv) for which, t in zip("kv", kv, strict=True)}
    for i, rotation in enumerate(frame.rotations):
        named |= {f"cos.{i}": rotation.cos, f"sin.{i}": rotation.sin}
    named |= {f"sees.{i}": mask for i, mask in enumerate(frame.masks)}
    return named if prefix.state is None else named | {"state": prefix.state}


def _structured(named: dict[str, Tensor]) -> tuple[Frame, Prefix]:
    def pairs(a: str, b: str) -> list[tuple[Tensor, Tensor]]:
        count = sum(name.startswith(f"{a}.") for name in named)
        return [(named[f"{a}.{i}"], named[f"{b}.{i}"]) for i in range(count)]

    rotations = tuple(Rotation(cos, sin) for cos, sin in pairs("cos", "sin"))
    masks = tuple(mask for name, mask in named.items() if name.startswith("sees."))
    unread = masks[0].new_empty(0)  # valid and length: the frame holds what a step would take from them
    return Frame(rotations, masks), Prefix(tuple(pairs("k", "v")), unread, unread, named.get("state"))

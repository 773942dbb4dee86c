"""Rename torchvision's ResNets in a checkpoint to the names of :mod:`sinew.layers.resnet`, and LeRobot's encoder of
views, which has a ResNet, to the names of :mod:`sinew.layers.keypoints`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, apply, computed, reshape
from sinew.core import ConvertError
from sinew.layers.resnet import folded

# Index of a child of torchvision's ResNet in a Sequential -> name of the child.
CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
PARTS = {"downsample.0": "shortcut", "downsample.1": "shortcut_norm", "bn1": "norm1", "bn2": "norm2"}
VALUES = (
    "weight",
    "bias",
    "running_mean",
    "running_var",
)  # tensors of a batch norm, in the order of :func:`folded`


def backbone(found: Mapping[str, TensorSource], theirs: str, ours: str) -> dict[str, TensorSource]:
    """Return the tensors with the names below ``theirs`` renamed to ``ours``, and each batch norm folded into its
    convolution.

    Norms over groups of channels stay as they are. Batch counts of a batch norm are left out, because they concern
    training only. Tensors outside of the ResNet keep their names. Raises :class:`ConvertError` if a part of a norm is
    missing.
    """
    out = {name: source for name, source in found.items() if not name.startswith(theirs)}
    own = {name: source for name, source in found.items() if name.startswith(theirs)}
    for norm in [name.removesuffix(".running_var") for name in own if name.endswith(".running_var")]:
        own.pop(f"{norm}.num_batches_tracked", None)
        conv = before(norm)
        parts = f"{conv}.weight", *(f"{norm}.{part}" for part in VALUES)
        if missing := [part for part in parts if part not in own]:
            raise ConvertError(f"{missing[0]} is missing")
        weight, *four = (own.pop(part) for part in parts)
        name = ours + module(conv.removeprefix(theirs))
        out[f"{name}.weight"] = computed(lambda *v: folded(*v)[0], weight, *four, shape=weight.shape)
        out[f"{name}.bias"] = computed(lambda *v: folded(v[0][:, None, None, None], *v)[1], *four)
    for name, source in own.items():
        place, _, value = name.removeprefix(theirs).rpartition(".")
        new = module(place)
        out[f"{ours}{new}.{value}" if new else name] = source
    return out


def before(norm: str) -> str:
    """Return the convolution before a norm: conv1 of bn1, downsample.0 of downsample.1, 0 of 1."""
    return re.sub(r"bn(\d)$", r"conv\1", norm) if norm[-3:-1] == "bn" else norm[:-1] + "0"


def module(theirs: str) -> str:
    """Return our name of a ResNet's module; "" for any other module.

    For example conv1 -> stem; layer1.0.bn1 -> stages.0.0.norm1; layer2.0.downsample.0 -> stages.1.0.shortcut.
    Children of a Sequential have numbers.
    """
    first, _, rest = theirs.partition(".")
    first = CHILDREN.get(first, first)
    if not rest:
        return {"conv1": "stem", "bn1": "stem_norm"}.get(first, "")
    block, _, part = rest.partition(".")
    stage = re.fullmatch(r"layer([1-4])", first)
    return f"stages.{int(stage[1]) - 1}.{block}.{PARTS.get(part, part)}" if stage and part else ""


def keypoint_encoder(found: Mapping[str, TensorSource], theirs: str, ours: str) -> dict[str, TensorSource]:
    """Return the tensors, with LeRobot's encoder of views below ``theirs`` renamed to a :class:`KeypointEncoder` below
    ``ours``. Both prefixes end with a dot."""
    maps, old = f"{ours}keypoints.maps", re.escape(theirs)
    rules = (
        Rule(
            rf"{old}pool\.nets\.weight",  # a convolution of one pixel
            (f"{maps}.weight",),
            lambda source: reshape(source, source.shape[0], -1),
        ),
        Rule(rf"{old}pool\.nets\.bias", (f"{maps}.bias",)),
        Rule(rf"{old}pool\.pos_grid", (f"{ours}keypoints.places",)),
        Rule(rf"{old}out\.(.+)", (rf"{ours}out.\1",)),
    )
    return apply(backbone(found, f"{theirs}backbone.", f"{ours}tower."), rules)

"""Rename torchvision's ResNets in a checkpoint to the names of :mod:`sinew.layers.resnet`, and LeRobot's image encoder
with a ResNet to the names of :mod:`sinew.layers.keypoints`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, apply, computed, reshape
from sinew.core import ConvertError
from sinew.layers.resnet import folded

# Some checkpoints store a ResNet as a torch Sequential. Key: index of a module in it. Value: torchvision's name of the
# module.
CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
PARTS = {"downsample.0": "shortcut", "downsample.1": "shortcut_norm", "bn1": "norm1", "bn2": "norm2"}
# The tensors of a batch norm, in the order in which the function `folded` takes them as arguments.
VALUES = ("weight", "bias", "running_mean", "running_var")


def backbone(tensors: Mapping[str, TensorSource], theirs: str, ours: str) -> dict[str, TensorSource]:
    """Rename a ResNet's tensors, and merge each batch norm into the weights of the convolution before it.

    Group norms stay as they are. Counters of a batch norm (num_batches_tracked) are dropped, because they concern
    training only. Tensors outside of the ResNet keep their names.

    Args:
        tensors: Name -> tensor of the checkpoint.
        theirs: Prefix of the ResNet's names in the checkpoint.
        ours: Prefix of the new names.

    Raises:
        ConvertError: A part of a norm is missing.
    """
    out = {name: source for name, source in tensors.items() if not name.startswith(theirs)}
    own = {name: source for name, source in tensors.items() if name.startswith(theirs)}
    for norm in [name.removesuffix(".running_var") for name in own if name.endswith(".running_var")]:
        own.pop(f"{norm}.num_batches_tracked", None)
        conv = before(norm)
        parts = f"{conv}.weight", *(f"{norm}.{part}" for part in VALUES)
        if missing := [part for part in parts if part not in own]:
            raise ConvertError(f"tensor {missing[0]} is missing; copy the complete checkpoint")
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
    """Return the name of the convolution that comes before a norm. Examples: bn1 -> conv1, downsample.1 ->
    downsample.0."""
    return re.sub(r"bn(\d)$", r"conv\1", norm) if norm[-3:-1] == "bn" else norm[:-1] + "0"


def module(theirs: str) -> str:
    """Return Sinew's name of a ResNet's module; "" for any other module.

    For example conv1 -> stem; layer1.0.bn1 -> stages.0.0.norm1; layer2.0.downsample.0 -> stages.1.0.shortcut.
    ``theirs`` is torchvision's name. The children of a Sequential have numbers.
    """
    first, _, rest = theirs.partition(".")
    first = CHILDREN.get(first, first)
    if not rest:
        return {"conv1": "stem", "bn1": "stem_norm"}.get(first, "")
    block, _, part = rest.partition(".")
    stage = re.fullmatch(r"layer([1-4])", first)
    return f"stages.{int(stage[1]) - 1}.{block}.{PARTS.get(part, part)}" if stage and part else ""


def keypoint_encoder(tensors: Mapping[str, TensorSource], theirs: str, ours: str) -> dict[str, TensorSource]:
    """Rename the tensors of LeRobot's image encoder to those of a :class:`KeypointEncoder`.

    Args:
        tensors: Name -> tensor of the checkpoint.
        theirs: Prefix of the encoder's names in the checkpoint, with a dot at its end.
        ours: Prefix of the new names, with a dot at its end.
    """
    maps, old = f"{ours}keypoints.maps", re.escape(theirs)
    rules = (
        # pool.nets is a 1x1 convolution, which Sinew computes as a matrix product.
        Rule(
            rf"{old}pool\.nets\.weight",
            (f"{maps}.weight",),
            lambda source: reshape(source, source.shape[0], -1),
        ),
        Rule(rf"{old}pool\.nets\.bias", (f"{maps}.bias",)),
        Rule(rf"{old}pool\.pos_grid", (f"{ours}keypoints.places",)),
        Rule(rf"{old}out\.(.+)", (rf"{ours}out.\1",)),
    )
    return apply(backbone(tensors, f"{theirs}backbone.", f"{ours}tower."), rules)

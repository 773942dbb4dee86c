"""Remove some layers of a bundle's model. The policy becomes smaller and faster, and is not trained again.

The layer before a removed layer is then followed by the layer after it. A policy that was not trained for this
computes other actions, so its success must be measured (`sinew eval --compare`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sinew.bundle import Bundle
from sinew.bundle.writer import FileSlice, TensorSource, write_bundle
from sinew.core import SinewError
from sinew.core.fields import from_builtins
from sinew.core.registry import model_class
from sinew.models import build_on_meta, mismatch

COUNT = "num_layers"
_LAYER = re.compile(r"(.+?)\.layers\.(\d+)\.(.+)")


def stacks_of(bundle: Bundle) -> dict[str, int]:
    """Return a dict: name of a stack of layers from which layers can be removed -> its number of layers.

    A stack is a part of the configuration with ``num_layers``, whose weights are called ``NAME.layers.INDEX``.
    """
    counts: dict[str, set[int]] = {}
    for name in bundle.infos:
        if (match := _LAYER.fullmatch(name)) is not None:
            counts.setdefault(match[1], set()).add(int(match[2]))
    stacks = {}
    for name, part in bundle.manifest.config.items():
        if (
            isinstance(part, Mapping)
            and isinstance(part.get(COUNT), int)
            and len(counts.get(name, ())) == part[COUNT]
        ):
            stacks[name] = int(part[COUNT])
    return stacks


def parse_layers(text: str) -> dict[str, tuple[int, ...]]:
    """Parse a text such as ``vision=1`` or ``language=2+3,expert=2+3``.

    Returns:
        Name of a stack -> indices of the layers to remove from it. The first layer has index 0.

    Raises:
        SinewError: The text has another form.
    """
    skipped: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, indices = part.strip().partition("=")
        numbers = indices.split("+")
        if not name or not all(each.isdecimal() and len(each) < 6 for each in numbers) or name in skipped:
            raise SinewError(
                f"--layers {text}: expected STACK=INDEX+INDEX,..., such as vision=1 or vision=1+2"
            )
        skipped[name] = tuple(sorted({int(each) for each in numbers}))
    return skipped


def candidates(bundle: Bundle) -> list[dict[str, tuple[int, ...]]]:
    """Return the smallest sets of layers that can be removed: one layer of a stack, or the same layer of two stacks
    that read each other's layers.

    If different kinds of layers alternate in a stack, most layers cannot be removed alone. Then pairs of neighbouring
    layers are also listed.
    """
    stacks = stacks_of(bundle)
    found: list[dict[str, tuple[int, ...]]] = []
    groups: list[tuple[str, ...]] = [(name,) for name in stacks]
    groups += [names for names in combinations(stacks, 2) if stacks[names[0]] == stacks[names[1]]]
    free: set[str] = set()  # stacks from which a layer can be removed without a change of another stack
    for names in groups:
        if free & set(names):
            continue
        count = stacks[names[0]]
        for width in (1, 2):
            layers = [tuple(range(first, first + width)) for first in range(0, count - width + 1, width)]
            fitting = [
                dict.fromkeys(names, each) for each in layers if fits(bundle, dict.fromkeys(names, each))
            ]
            if fitting and width < count:
                found += fitting
                free |= set(names)
            if len(fitting) == count:
                break
    return found


def fits(bundle: Bundle, skipped: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if the layers in ``skipped`` can be removed. This is the case if the shapes of all remaining layers
    still fit together.
    """
    try:
        _shortened(bundle, skipped)
    except SinewError:
        return False
    return True


def text_of(skipped: Mapping[str, tuple[int, ...]]) -> str:
    """Return the layers to remove as text, in the format of the flag --layers."""
    return ",".join(f"{name}={'+'.join(map(str, layers))}" for name, layers in skipped.items())


def without_layers(bundle: Bundle, skipped: Mapping[str, tuple[int, ...]], out: Path) -> None:
    """Write a bundle without some layers.

    Args:
        bundle: The bundle.
        skipped: Name of a stack -> indices of the layers to remove from it. The first layer has index 0.
        out: The new bundle.

    Raises:
        SinewError: A stack or layer does not exist, or the remaining layers do not fit together.
    """
    config, tensors = _shortened(bundle, skipped)
    provenance = bundle.manifest.provenance
    note = f"layers left out by sinew skip: {text_of(skipped)}"
    manifest = replace(
        bundle.manifest, config=config, provenance=replace(provenance, notes=(*provenance.notes, note))
    )
    manifest.check()
    write_bundle(out, lambda: manifest, tensors)


def _shortened(
    bundle: Bundle, skipped: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], list[TensorSource]]:
    """Return the configuration and the tensors of the policy without the layers in ``skipped``.

    Raises:
        SinewError: A stack or layer does not exist, or the remaining layers do not fit together.
    """
    if bundle.lowbit or bundle.manifest.quantization is not None:
        raise SinewError(
            f"{bundle.path}: expected float weights; remove layers first, then run `sinew quantize`"
        )
    stacks = stacks_of(bundle)
    for name, layers in skipped.items():
        if name not in stacks:
            listing = ", ".join(f"{each} ({count} layers)" for each, count in stacks.items()) or "none"
            raise SinewError(f"--layers {name}: expected a stack of {bundle.path}: {listing}")
        if not layers or layers[-1] >= stacks[name] or len(layers) == stacks[name]:
            raise SinewError(
                f"--layers {name}: expected fewer than all of the layers 0 to {stacks[name] - 1}, got"
                f" {'+'.join(map(str, layers))}"
            )
    config = {
        name: {**part, COUNT: part[COUNT] - len(skipped[name])} if name in skipped else part
        for name, part in bundle.manifest.config.items()
    }
    new_indices = {
        name: {old: new for new, old in enumerate(k for k in range(count) if k not in skipped.get(name, ()))}
        for name, count in stacks.items()
    }
    tensors = []
    for info in sorted(bundle.infos.values(), key=lambda info: info.offset):
        stored_as: str | None = info.name
        match = _LAYER.fullmatch(info.name)
        if match is not None and match[1] in skipped:
            index = new_indices[match[1]].get(int(match[2]))
            stored_as = None if index is None else f"{match[1]}.layers.{index}.{match[3]}"
        if stored_as is not None:
            data = FileSlice(bundle.path, info.offset, info.nbytes)
            tensors.append(TensorSource(stored_as, info.shape, info.type, info.nbytes, data))
    _check(bundle, config, {each.name: each.shape for each in tensors})
    return config, tensors


def _check(bundle: Bundle, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`SinewError` if the names or shapes of the tensors differ from those of a model with ``config``."""
    architecture = bundle.manifest.architecture
    config_type: Any = model_class(architecture).config_type
    model = build_on_meta(architecture, from_builtins(config, config_type, f"{bundle.path}: sinew.config"))
    if problems := mismatch(model, shapes):
        raise SinewError(
            f"--layers: the remaining layers do not fit together ({problems}). Remove the same layers from stacks that"
            " read each other, and remove layers that alternate in pairs, such as language=2+3,expert=2+3"
        )

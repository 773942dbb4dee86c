"""Variants of an evaluation: what --sweep and --compare ask for, and what will run each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from pathlib import Path

from sinew.core import SinewError
from sinew.eval.policies import EXPERT, chosen
from sinew.eval.settings import Variant
from sinew.eval.settings import sweep as parse_sweep
from sinew.sources import is_server, resolve


def variants(base: Variant, sweeps: Sequence[str], compares: Sequence[str]) -> list[Variant]:
    """Return what is to be played. Raises :class:`SinewError` for a variant that is there twice."""
    found = parse_sweep(base, sweeps)
    for text in compares:
        if "=" in text and not Path(text).exists():
            other = found[0]
            for part in text.split(","):
                key, _, value = part.partition("=")
                other = other.with_text(key.replace("-", "_"), value)
        else:
            other = replaced(found[0], target=text)
        if other in found:
            raise SinewError(f"--compare {text}: that variant is already there")
        found.append(other)
    return [
        variant
        if variant.target == EXPERT or is_server(variant.target)
        else replaced(variant, target=str(resolve(variant.target)))
        for variant in found
    ]


def settled(variant: Variant) -> Variant:
    """Return the variant with the engine and device that will run it, so that logs and reports name them."""
    if "://" in variant.target:
        device = None if variant.device == "auto" else variant.device
        flags = (variant.dtype, variant.engine, device, variant.ignore_recipe, variant.rename)
        if any(flags) or variant.allow_missing_cameras:
            raise SinewError("engine, dtype, device and cameras belong to the server; start it with them")
        return replaced(variant, device="cpu")
    if variant.target == EXPERT:
        return replaced(variant, device="cpu")
    if variant.stream and variant.engine is None:
        variant = replaced(variant, engine="plan")  # the fastest that can run its two halves at once
    choice = chosen(variant)
    return replaced(variant, engine=choice.engine, device=choice.options.device)

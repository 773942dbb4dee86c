"""How a recorded graph is launched: the variants that are timed whole, and what was found for a policy.

A kernel alone does not show what dependent launch is worth, because it hides the time between two of them. So
``sinew tune`` records the program once per variant, compares the chunks, and keeps the fastest with its reason beside
the other choices (``choices.py``), under the model and what the engine does to it. An engine that is made afterwards
takes it for those options that are None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sinew.engine.cuda.device import COMMAND
from sinew.engine.cuda.kernels import choices
from sinew.engine.cuda.options import CudaOptions
from sinew.models.base import Model

# Name and options. The first is what runs where nothing was measured, and what the others' chunks are compared with.
VARIANTS: tuple[tuple[str, Mapping[str, bool]], ...] = (
    ("plain", {}),
    ("dependent launch", {"pdl": True}),
    ("dependent launch, prefetch", {"pdl": True, "prefetch": True}),
)
OPEN = ("pdl", "prefetch")  # options that may be None
GAIN = 0.01  # part of the plain graph's time that a variant has to save
UNTUNED = f"not tuned for this policy on this device: {COMMAND}"


def resolve(options: CudaOptions, device: torch.device, model: Model) -> tuple[CudaOptions, str]:
    """(options without None, why). model: of the plan that the engine is made from."""
    undecided = [name for name in OPEN if getattr(options, name) is None]
    way, reason = VARIANTS[0][0], "as asked for"
    if undecided and device.type != "cuda":
        reason = "no GPU"
    elif undecided and not (options.kernels and options.graph):
        reason = "no graph of kernels"
    elif undecided:
        way, reason = choices.choose_named(key(options, model), device, way)
        reason = UNTUNED if reason == choices.UNMEASURED else reason
    chosen = dict(VARIANTS).get(way, {})
    decided: dict[str, Any] = {name: chosen.get(name, False) for name in undecided}
    if not decided.get("pdl", options.pdl):
        decided |= {name: False for name in undecided if name == "prefetch"}
    return replace(options, **decided), reason


def key(options: CudaOptions, model: Model) -> str:
    """Return the key of the choice: the model's sizes and dtypes, and the options that change the launches."""
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    facts = type(model).__name__, model.config, dtypes, sorted(options.fp8), options.scaled_norms
    return choices.key_of("launch", *facts)


def choose(
    options: CudaOptions,
    device: torch.device,
    model: Model,
    make: Callable[[CudaOptions], Any],
    chunks: Callable[[Any], Sequence[np.ndarray]],
    measure: Callable[[Any], float],
    variants: Sequence[tuple[str, Mapping[str, bool]]] = VARIANTS,
) -> dict[str, Any]:
    """Time each variant of ``options``, keep the fastest, return its entry.

    make: an engine; one at a time is alive. chunks: its answers to inputs that are always the same. measure: its
    milliseconds per chunk. A variant is out, and the entry says why, if it raises or if any number of its answers
    differs from the plain one's. Raises RuntimeError where not even the plain one runs.
    """
    plain: list[np.ndarray] = []

    def timed(changes: Mapping[str, bool]) -> float:
        decided: dict[str, Any] = {**dict.fromkeys(OPEN, False), **changes}
        engine = make(replace(options, **decided))
        answers = [np.array(chunk) for chunk in chunks(engine)]
        if not changes:
            plain.extend(answers)
        if not plain:
            raise ArithmeticError("the plain graph gave nothing to compare with")
        for ours, theirs in zip(answers, plain, strict=True):
            if not np.array_equal(ours, theirs):
                raise ArithmeticError(f"differs from the plain graph by {np.abs(ours - theirs).max():.2g}")
        return measure(engine)

    ways = {name: lambda changes=changes: timed(changes) for name, changes in variants}
    return choices.pick_named(key(options, model), device, ways, lambda way: way(), margin=GAIN)

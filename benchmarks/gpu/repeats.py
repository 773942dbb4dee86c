"""Run each kernel launch of a full-size chunk many times, and test that the result has the same bits each time.

The checks of the kernels use small shapes, and the relative L2 error of a chunk hides an error in one layer. One
kernel computed different sums at every launch and passed both tests. This section found it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.rungs import launched
from benchmarks.gpu.session import Row, Session
from sinew.engine.cuda.kernels.launch import Launch

TIMES = 100


def repeats(model: str, session: Session) -> None:
    """Emit a row for each kind of launch.

    Raises:
        RuntimeError: The results of a launch differ.
    """
    case, made, sample = launched(model, session)
    failures = []
    with torch.inference_mode(), taken_down() as found:
        made.run(sample)
    for launch, count in found.values():
        if session.left <= 0:
            raise TimeoutError("the time limit ended before all launches were repeated")
        row = {
            "kernel": name_of(launch),
            "grid": str(launch.grid),
            "launches": count,
            "tile": str(launch.tile),
        }
        with torch.inference_mode():
            row |= repeated(launch, 3 if session.tiny else TIMES)
        session.emit(row)
        if row["differ"]:
            failures.append(f"{row['kernel']} {row['grid']}: {row['differ']} of {row['times']}")
    if failures:
        raise RuntimeError(f"the results of these launches differ between two runs: {'; '.join(failures)}")


@contextmanager
def taken_down() -> Iterator[dict[tuple[Any, ...], list[Any]]]:
    """Within the context, keep the first launch of each kind, and count the launches of each kind.

    A kept launch also keeps its tensors in memory. Later launches may change their values.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    real = Launch.__call__

    def noted(launch: Launch) -> None:
        kept = found.setdefault((name_of(launch), launch.grid, sizes_of(launch)), [launch, 0])
        kept[1] += 1
        real(launch)

    Launch.__call__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Launch.__call__ = real  # type: ignore[method-assign]


def repeated(launch: Launch, times: int) -> Row:
    """Run a launch ``times`` times on the same input. Returns how often the result differed, and the largest
    difference."""
    held = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in held]
    launch()
    first = [tensor.clone() for tensor in held]
    written = [i for i, (old, new) in enumerate(zip(before, first, strict=True)) if not same(old, new)]
    differ, largest = 0, 0.0
    for _ in range(times):
        for i in written:
            held[i].copy_(before[i])
        launch()
        other = [i for i in range(len(held)) if not same(held[i], first[i])]
        differ += bool(other)
        for i in other:
            largest = max(largest, float((held[i].float() - first[i].float()).abs().max()))
    return {"times": times, "differ": differ, "largest": largest}


def sizes_of(launch: Launch) -> str:
    """Return the arguments of a launch as text, with the shape and type of each tensor. Launches of one kind have equal
    texts."""
    described = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in launch.arguments.items()
    }
    return repr(described)


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same bits. This comparison also works for NaN in unused parts of a
    workspace."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def name_of(launch: Launch) -> str:
    return str(getattr(launch.kernel, "fn", launch.kernel).__name__)

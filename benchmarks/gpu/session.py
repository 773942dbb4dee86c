"""The session of a section of ``make gpu``: device, time and rows, and how it says that it cannot run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Case

Row = dict[str, Any]


@dataclass
class Session:
    """``seconds``: of this section. ``emit``: takes a row. ``tiny``: small widths, for a machine without a GPU.
    ``traces``: folder and first part of the names of traces; None: none are written."""

    device: torch.device
    seconds: float
    emit: Callable[[Row], None]
    tiny: bool = False
    traces: Path | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


class NotHere(Exception):  # noqa: N818 - a reason to leave a section out, not an error
    """This machine cannot run the section; the text says why."""


def still_there(session: Session, after: str) -> None:
    """Raise RuntimeError naming what came before if the device answers nothing any more: an illegal access stays
    with its context, and every later result would be an error of the same cause."""
    if not session.is_gpu:
        return
    try:
        torch.cuda.synchronize(session.device)
    except Exception as error:
        raise RuntimeError(f"the device was lost in {after}: {error}"[:600]) from error


def shrunk(case: Case, tiny: bool) -> Case:
    """Return the case for tiny models: their chunk, and a prompt that their vocabulary can fill."""
    return replace(case, chunk=min(case.chunk, 6), prompt=min(case.prompt, 8)) if tiny else case

"""The session of a section of ``make gpu``: its device, its time limit, its rows, and the error if it cannot run."""

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
    """The resources of one section.

    Attributes:
        device: Torch name of the device.
        seconds: Time limit of this section.
        emit: Writes one row.
        tiny: Use small models, for a machine without a GPU.
        traces: Folder and start of the file names of traces. None: the section writes no traces.
    """

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


class NotHere(Exception):  # noqa: N818 - the section is skipped, which is no error
    """This machine cannot run the section. The message states the reason."""


def still_there(session: Session, after: str) -> None:
    """Test that the device still works.

    After an illegal memory access, every later call of the process fails with the same error.

    Args:
        session: The session.
        after: Name of the last step.

    Raises:
        RuntimeError: The device does not work any more. The message names the last step.
    """
    if not session.is_gpu:
        return
    try:
        torch.cuda.synchronize(session.device)
    except Exception as error:
        raise RuntimeError(f"the device stopped working in {after}: {error}"[:600]) from error


def shrunk(case: Case, tiny: bool) -> Case:
    """Return a case for the tiny models, with their chunk length and a prompt that fits their vocabulary."""
    return replace(case, chunk=min(case.chunk, 6), prompt=min(case.prompt, 8)) if tiny else case

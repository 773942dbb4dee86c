"""Another policy in a server that goes on: loaded and warm beside the old one, then exchanged; the old one is drained.

Every request is answered by the policy that stood when it came. Both are in memory until the old one has answered its
last, which a budget takes into account.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinew.core import BusyError, PolicySpec, RequestError
from sinew.serve.safety import Safety
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy that is ready: its scheduler has been started. Other fields as of :class:`Service`."""

    scheduler: Scheduler
    metadata: dict[str, Any]
    safety: Safety | None

    @property
    def spec(self) -> PolicySpec:
        """Return what the policy reads and writes."""
        spec: PolicySpec = self.scheduler.policy.spec  # type: ignore[attr-defined]
        return spec


class Swapper:
    """open: finds, loads and warms what a source names; raises SinewError. find: a source -> the file of its weights.

    source: what stands now. budget: bytes of all weights at once, the files' own; None: no limit.
    """

    def __init__(
        self,
        service: Service,
        open: Callable[[str], Standing],  # noqa: A002 - what it does
        find: Callable[[str], Path],
        source: str,
        budget: int | None = None,
    ):
        self._service, self._open, self._find = service, open, find
        self._budget, self._size = budget, _nbytes(find(source))
        self._changing = threading.Lock()

    def swap(self, source: str) -> dict[str, Any]:
        """Exchange the policy for ``source`` and return when the old one has answered its last request.

        Raises BusyError during another exchange, RequestError for a policy of another form than the one that stands or
        beyond the budget, and what opening it raises; the old policy then goes on.
        """
        if not self._changing.acquire(blocking=False):
            raise BusyError("another exchange of the policy is under way")
        try:
            begun = time.perf_counter()
            size = _nbytes(self._find(source))
            if self._budget is not None and self._size + size > self._budget:
                raise RequestError(
                    f"source: expected weights of at most {(self._budget - self._size) / 2**20:.0f} MiB beside those"
                    f" that stand (--memory-gib), got {size / 2**20:.0f} MiB"
                )
            found = self._open(source)
            loaded = time.perf_counter()
            try:
                check_form(self._service.spec, found.spec)
            except RequestError:
                found.scheduler.drain()
                raise
            old = self._service.exchange(found.scheduler, found.spec, found.metadata, found.safety)
            old.drain()
            self._service.retired(old)
            self._size = size
        finally:
            self._changing.release()
        took = {
            "policy": found.spec.name,
            "load_s": round(loaded - begun, 3),
            "drain_s": round(time.perf_counter() - loaded, 3),
        }
        logger.info("the policy was exchanged for %s: %s", source, took)
        return took


def check_form(old: PolicySpec, new: PolicySpec) -> None:
    """Raise RequestError unless robots of the old policy can go on with the new one: they know its cameras and widths,
    and hold rows of its chunks."""
    for name, a, b in (
        ("cameras", [each.name for each in old.cameras], [each.name for each in new.cameras]),
        ("state", old.state.dim, new.state.dim),
        ("action", old.action.dim, new.action.dim),
        ("chunk_size", old.chunk_size, new.chunk_size),
        ("noise", old.noise_shape, new.noise_shape),
    ):
        if a != b:
            raise RequestError(f"source: {name}: expected {a}, as the policy that stands, got {b}")


def _nbytes(path: Path) -> int:
    """Return the bytes of a file, or of a folder's files."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())

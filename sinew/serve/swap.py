"""Policies of a server that goes on: loaded and warm beside those that stand, exchanged, unloaded.

Every request is answered by the policy that stood under its name when it came. An old policy and its successor are both
in memory until the old one has answered its last, which the budget takes into account.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sinew.core import BusyError, PolicySpec, RequestError
from sinew.serve.policies import DEFAULT, Standing, check_name
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of memory that a policy takes: its weights, and what it computes with."""

    weights: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations

    def __str__(self) -> str:
        return (
            f"{_mib(self.total)} (weights {_mib(self.weights)}, activations {_mib(self.activations)})"
            if self.activations
            else f"{_mib(self.weights)} of weights"
        )


class Swapper:
    """open: finds, loads and warms what a source names; raises SinewError. need: what a source takes; loads nothing.

    source: what stands first. budget: bytes of all policies at once, why: where that number comes from; None: no limit.
    One change at a time.
    """

    def __init__(
        self,
        service: Service,
        open: Callable[[str], Standing],  # noqa: A002 - what it does
        need: Callable[[str], Need],
        source: str,
        budget: int | None = None,
        why: str = "--memory-gib",
    ):
        self._service, self._open, self._need = service, open, need
        self._first, self._budget, self._why = source, budget, why
        self._needs: dict[str, Need] = {}  # by name; the first one's is computed when it is wanted
        self._changing = threading.Lock()

    def load(self, name: str, source: str) -> dict[str, Any]:
        """Give a name's requests to ``source``, and return when what stood there before has answered its last.

        Raises BusyError during another change, RequestError for a name that cannot be one, for a policy beyond the
        budget or of another form than the one whose place it takes, and what opening it raises; what stands goes on.
        """
        check_name(name)
        with _only(self._changing):
            begun = time.perf_counter()
            need = self._need(source)
            self._check_budget(need)
            found = self._open(source)
            loaded = time.perf_counter()
            if name in self._service.policies.names:
                try:
                    check_form(self._service.policies.get(name).spec, found.spec)
                except RequestError:
                    found.scheduler.drain()
                    raise
            self._drain(self._service.policies.put(name, found))
            self._needs[name] = need
        took = {
            "name": name,
            "policy": found.spec.name,
            "memory_mib": round(need.total / 2**20, 1),
            "load_s": round(loaded - begun, 3),
            "drain_s": round(time.perf_counter() - loaded, 3),
        }
        logger.info("the policy %s is %s: %s", name, source, took)
        return took

    def unload(self, name: str) -> dict[str, Any]:
        """Take a policy out, and return when it has answered its last request; later ones are refused.

        Raises BusyError during another change, UnknownPolicyError, and RequestError for the first policy.
        """
        with _only(self._changing):
            begun = time.perf_counter()
            self._drain(self._service.policies.take(name))
            self._needs.pop(name, None)
        took = {"name": name, "drain_s": round(time.perf_counter() - begun, 3)}
        logger.info("the policy %s is unloaded: %s", name, took)
        return took

    def _drain(self, old: Scheduler | None) -> None:
        if old is None:
            return
        old.drain()
        self._service.policies.retired(old)
        del old
        frozen = (
            gc.get_freeze_count()
        )  # what was there when the server began (process.py): it may go now, too
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()

    def _check_budget(self, need: Need) -> None:
        if self._budget is None:
            return
        self._needs.setdefault(DEFAULT, self._need(self._first))
        free = self._budget - sum(each.total for each in self._needs.values())
        if need.total > free:
            beside = ", ".join(f"{name} {_mib(each.total)}" for name, each in self._needs.items())
            raise RequestError(
                f"source: expected at most {_mib(max(0, free))} beside what stands ({beside}) within"
                f" {_mib(self._budget)} ({self._why}), got {need}"
            )


@contextlib.contextmanager
def _only(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock that nobody waits for. Raises BusyError where it is taken."""
    if not lock.acquire(blocking=False):
        raise BusyError("another change of the policies is under way")
    try:
        yield
    finally:
        lock.release()


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


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"

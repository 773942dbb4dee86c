"""Load, replace (hot-swap) and unload policies of a running server.

Every request is answered by the policy that had its name when the request arrived. An old policy and its successor
are both in memory until the old one has sent its last answer. The memory budget includes both.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sinew_client.form import differing, form

from sinew.core import BusyError, PolicySpec, RequestError
from sinew.serve.policies import DEFAULT, Deployment, check_name
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
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
    """Changes the policies of a server, one change at a time.

    Args:
        service: The service.
        open: Finds, loads and warms up a source. Raises SinewError.
        need: Computes the memory of a source without loading it.
        source: Source of the first policy.
        budget: Bytes of all policies together; None for no limit.
        why: Origin of that number, for messages.
    """

    def __init__(
        self,
        service: Service,
        open: Callable[[str], Deployment],  # noqa: A002 - what it does
        need: Callable[[str], MemoryNeed],
        source: str,
        budget: int | None = None,
        why: str = "--memory-gib",
    ):
        self._service, self._open, self._need = service, open, need
        self._first, self._budget, self._why = source, budget, why
        self._needs: dict[
            str, MemoryNeed
        ] = {}  # name -> memory; that of the first policy is computed on request
        self._forms = Forms()
        self._changing = threading.Lock()

    def load(
        self,
        name: str,
        source: str,
        accept: Sequence[str] = (),
        *,
        need: MemoryNeed | None = None,
        check: Callable[[Deployment], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Replace a name's policy by ``source``, and return when the old one has sent its last answer.

        Streams of the old policy end, and begin again with their next samples.

        Args:
            name: Name of the policy.
            source: The new policy's source.
            accept: Parts of the form (sinew_client.form) that may differ from the old policy's. Robots get a warning.
            need: Memory of the policy, if it is known, because the same policy is in use.
            check: Raises RequestError if the opened policy must not be used.

        Raises:
            BusyError: Another change is in progress.
            RequestError: The name is not valid, or the policy exceeds the budget or has another form. The old policy
                stays. Errors of opening it are raised too.
        """
        check_name(name)
        with _only(self._changing):
            begun = time.perf_counter()
            if need is None:
                need = self._need(source)
            else:
                self._needs.setdefault(name, need)
            self._check_budget(need)
            found = self._open(source)
            loaded = time.perf_counter()
            changed: tuple[str, ...] = ()
            try:
                check(found)
                if name in self._service.policies.names:
                    standing = self._service.policies.get(name).spec
                    changed = self._forms.check(name, standing, found.spec, accept)
            except RequestError:
                found.scheduler.drain()
                raise
            found = replace(found, changed=changed)
            self._forms.put(name, found.spec)
            self._drain(self._service.policies.put(name, found))
            self._needs[name] = need
        took: dict[str, Any] = {
            "name": name,
            "policy": found.spec.name,
            **({"identity": found.identity} if found.identity else {}),
            "memory_mib": round(need.total / 2**20, 1),
            "load_s": round(loaded - begun, 3),
            "drain_s": round(time.perf_counter() - loaded, 3),
            **({"changed": changed} if changed else {}),
        }
        if changed:
            logger.warning(
                "the policy %s has another form, which `accept` allows: %s", name, "; ".join(changed)
            )
        logger.info("the policy %s is %s: %s", name, source, took)
        return took

    @property
    def budget(self) -> int | None:
        """Bytes that the first policy and its successor may take in addition to the others; None for no limit."""
        others = sum(each.total for name, each in self._needs.items() if name != DEFAULT)
        return None if self._budget is None else self._budget - others

    def unload(self, name: str) -> dict[str, Any]:
        """Take a policy out, and return when it has answered its last request; later ones are refused.

        Raises BusyError during another change, UnknownPolicyError, and RequestError for the first policy.
        """
        with _only(self._changing):
            begun = time.perf_counter()
            self._drain(self._service.policies.take(name))
            self._needs.pop(name, None)
            self._forms.forget(name)
        took = {"name": name, "drain_s": round(time.perf_counter() - begun, 3)}
        logger.info("the policy %s is unloaded: %s", name, took)
        return took

    def _drain(self, old: Scheduler | None) -> None:
        if old is None:
            return
        old.drain()
        self._service.policies.retired(old)
        del old
        # What was there when the server began (process.py): it may go now, too
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()

    def _check_budget(self, need: MemoryNeed) -> None:
        if self._budget is None:
            return
        if DEFAULT not in self._needs:  # to compute it takes seconds
            self._needs[DEFAULT] = self._need(self._first)
        free = self._budget - sum(each.total for each in self._needs.values())
        if need.total > free:
            beside = ", ".join(f"{name} {_mib(each.total)}" for name, each in self._needs.items())
            raise RequestError(
                f"source: expected at most {_mib(max(0, free))} beside what stands ({beside}) within"
                f" {_mib(self._budget)} ({self._why}), got {need}"
            )


@contextlib.contextmanager
def _only(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock without waiting. Raises BusyError if it is taken."""
    if not lock.acquire(blocking=False):
        raise BusyError("another change of the policies is in progress; try again later")
    try:
        yield
    finally:
        lock.release()


FORM = (
    "cameras", "state.dim", "state.names", "state.units", "action.dim", "action.names", "action.units", "chunk_size",
    "noise", "control_hz", "embodiment", "motion", "keys",
)  # fmt: skip
"""Lists what a form has (sinew_client.form). ``accept`` takes these, and names and units of both vectors at once."""
_BOTH = {"names": ("state.names", "action.names"), "units": ("state.units", "action.units")}


class Forms:
    """The forms of the policies in use, by name.

    If a policy does not state a part, the part of an earlier policy still applies, because its robots are the same.
    """

    def __init__(self) -> None:
        self._stated: dict[str, dict[str, Any]] = {}

    def check(
        self, name: str, old: PolicySpec, new: PolicySpec, accept: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the differences of ``new``, a sentence each, all of them named in ``accept``.

        Raises RequestError with all other differences, because robots of the old policy would not know them.
        """
        if unknown := [each for each in accept if each not in (*FORM, *_BOTH)]:
            raise RequestError(
                f"accept: expected some of {', '.join((*FORM, *_BOTH))}, got {unknown[0][:80]!r}"
            )
        accepted = {full for each in accept for full in _BOTH.get(each, (each,))}
        before = self._stated.setdefault(name, form(old))
        differences = differing(before, form(new), " (the present policy's)")
        if refused := [
            text
            for key, text in differences.items()
            if key.partition(".")[0] not in accepted and key not in accepted
        ]:
            remedy = '"accept" names what the robots are prepared for'  # first, as a long sentence is cut
            raise RequestError(f"source ({remedy}): {'; '.join(refused)}")
        return tuple(differences.values())

    def put(self, name: str, spec: PolicySpec) -> None:
        """Record the form of the policy that is now in use."""
        self._stated[name] = {**self._stated.get(name, {}), **form(spec)}

    def forget(self, name: str) -> None:
        """Forget the form of a name, because its policy was unloaded."""
        self._stated.pop(name, None)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"

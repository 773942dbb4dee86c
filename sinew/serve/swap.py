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
    """The memory in bytes that a policy needs: for its weights and for its activations (intermediate results)."""

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
        open: Finds, loads and warms up a policy from its source. Raises SinewError.
        need: Computes the memory of a source without loading it.
        source: Source of the first policy.
        budget: Bytes of all policies together; None sets no limit.
        why: Origin of the budget, for messages.
    """

    def __init__(
        self,
        service: Service,
        open: Callable[[str], Deployment],  # noqa: A002 - the name states the action
        need: Callable[[str], MemoryNeed],
        source: str,
        budget: int | None = None,
        why: str = "--memory-gib",
    ):
        self._service, self._open, self._need = service, open, need
        self._first, self._budget, self._why = source, budget, why
        # Key: name of a policy. Value: memory of the policy. The memory of the first policy is computed when the budget
        # is first checked.
        self._needs: dict[str, MemoryNeed] = {}
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
        """Load a policy under a name. If the new policy replaces a policy, return when the old policy has sent its
        last answer.

        A stream of the old policy ends, and begins again with its next sample.

        Args:
            name: Name of the policy.
            source: The new policy's source.
            accept: Parts of the form (sinew_client.form) that may differ from the old policy's. Robots get a warning.
            need: Memory of the policy, if it is known because the same policy is in use.
            check: Raises RequestError if the opened policy must not be used.

        Raises:
            BusyError: Another change is in progress.
            RequestError: The name is not valid, or the policy exceeds the budget or has another form. The old
                policy stays. Errors of opening the new policy are raised too.
        """
        check_name(name)
        with _only(self._changing):
            begun = time.perf_counter()
            if need is None:
                need = self._need(source)
            else:
                self._needs.setdefault(name, need)
            self._check_budget(need)
            deployment = self._open(source)
            loaded = time.perf_counter()
            changed: tuple[str, ...] = ()
            try:
                check(deployment)
                if name in self._service.policies.names:
                    standing = self._service.policies.get(name).spec
                    changed = self._forms.check(name, standing, deployment.spec, accept)
            except RequestError:
                deployment.scheduler.drain()
                raise
            deployment = replace(deployment, changed=changed)
            self._forms.put(name, deployment.spec)
            self._drain(self._service.policies.put(name, deployment))
            self._needs[name] = need
        took: dict[str, Any] = {
            "name": name,
            "policy": deployment.spec.name,
            **({"identity": deployment.identity} if deployment.identity else {}),
            "memory_mib": round(need.total / 2**20, 1),
            "load_s": round(loaded - begun, 3),
            "drain_s": round(time.perf_counter() - loaded, 3),
            **({"changed": changed} if changed else {}),
        }
        if changed:
            logger.warning(
                "the policy %s has another form, which `accept` allows: %s", name, "; ".join(changed)
            )
        logger.info("the policy %s was loaded from %s: %s", name, source, took)
        return took

    @property
    def budget(self) -> int | None:
        """Memory in bytes for the first policy and its successor, without the memory of the other policies; None
        without a limit.
        """
        others = sum(each.total for name, each in self._needs.items() if name != DEFAULT)
        return None if self._budget is None else self._budget - others

    def unload(self, name: str) -> dict[str, Any]:
        """Remove a policy, and return when it has answered its last request. New requests are rejected.

        Raises:
            BusyError: Another change is in progress.
            UnknownPolicyError: There is no such policy.
            RequestError: The first policy cannot be removed.
        """
        with _only(self._changing):
            begun = time.perf_counter()
            self._drain(self._service.policies.take(name))
            self._needs.pop(name, None)
            self._forms.forget(name)
        took = {"name": name, "drain_s": round(time.perf_counter() - begun, 3)}
        logger.info("the policy %s was unloaded: %s", name, took)
        return took

    def _drain(self, old: Scheduler | None) -> None:
        if old is None:
            return
        old.drain()
        self._service.policies.retired(old)
        del old
        # The objects from the start of the server are excluded from garbage collection (process.py). Include them
        # once, so that the objects of the old policy are freed.
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()

    def _check_budget(self, need: MemoryNeed) -> None:
        if self._budget is None:
            return
        # Compute the memory of the first policy only now, because the computation takes seconds.
        if DEFAULT not in self._needs:
            self._needs[DEFAULT] = self._need(self._first)
        free = self._budget - sum(each.total for each in self._needs.values())
        if need.total > free:
            beside = ", ".join(f"{name} {_mib(each.total)}" for name, each in self._needs.items())
            raise RequestError(
                f"source: the policy needs {need}, but only {_mib(max(0, free))} of {_mib(self._budget)} ({self._why})"
                f" are free with the loaded policies ({beside}); unload a policy, or choose a smaller one"
            )


@contextlib.contextmanager
def _only(lock: threading.Lock) -> Iterator[None]:
    """Inside the ``with`` block, hold a lock. The function does not wait for the lock.

    Raises:
        BusyError: Another thread has the lock.
    """
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
"""The parts of a form (sinew_client.form). ``accept`` takes these, and "names" and "units" for both vectors."""
_BOTH = {"names": ("state.names", "action.names"), "units": ("state.units", "action.units")}


class Forms:
    """The form (cameras, sizes, units ...) of each policy in use, by the policy's name.

    If a policy does not state a part of its form, the part of an earlier policy still applies, because its robots are
    the same.
    """

    def __init__(self) -> None:
        self._stated: dict[str, dict[str, Any]] = {}

    def check(
        self, name: str, old: PolicySpec, new: PolicySpec, accept: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Compare the form (cameras, sizes, units ...) of a new policy with the form of the present policy.

        Args:
            name: Name of the policy.
            old: Specification of the present policy.
            new: Specification of the new policy.
            accept: Parts that may differ.

        Returns:
            The differences, one sentence each.

        Raises:
            RequestError: Parts differ that ``accept`` does not name. The robots are not prepared for them.
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
            # The remedy is at the beginning, because long messages are cut at the end.
            remedy = 'list in "accept" the differences that your robots support'
            raise RequestError(f"source ({remedy}): {'; '.join(refused)}")
        return tuple(differences.values())

    def put(self, name: str, spec: PolicySpec) -> None:
        """Store the form (cameras, sizes, units ...) of the policy that is now in use."""
        self._stated[name] = {**self._stated.get(name, {}), **form(spec)}

    def forget(self, name: str) -> None:
        """Remove the stored form of a policy, because the policy was unloaded."""
        self._stated.pop(name, None)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"

"""From prepared requests to outcomes: one inference, or one for several requests, and what becomes of failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sinew.core import ActionChunk, CancelledError, SinewError, Timing
from sinew.serve.batching import Costs, Everyone
from sinew.serve.request import Outcome, Request
from sinew.serve.served import ServedPolicy

logger = logging.getLogger(__name__)

FAILURES = 3  # requests in a row that fail for reasons nobody foresaw: then the policy itself is tried


class Computer:
    """Runs the policy, on one thread.

    check: raises for a request that nobody waits for any more. present: what a client is told of an error. costs:
    learns what inferences take.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        check: Callable[[Request], None],
        present: Callable[[BaseException], SinewError],
        costs: Costs | None = None,
    ):
        self.policy = policy
        self.broken: str | None = None  # why the policy cannot infer even what it is warmed up with
        self._check, self._present, self._costs = check, present, costs
        self._failures = 0  # unforeseen ones in a row

    def compute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return the outcome of each request, with ``timing.queue_ms`` in chunks. Those of a batch are of one kind."""
        begun = time.perf_counter()
        outcomes = self._batch(requests) if len(requests) > 1 else [self._alone(requests[0])]
        if self._costs is not None and all(isinstance(found, ActionChunk) for found in outcomes):
            self._costs.learn(requests[0].kind, len(requests), time.perf_counter() - begun)
        return [
            _queued(found, 1e3 * (begun - request.accepted - request.decode_s))
            if isinstance(found, ActionChunk)
            else found
            for request, found in zip(requests, outcomes, strict=True)
        ]

    def _batch(self, requests: Sequence[Request]) -> list[Outcome]:
        """Compute several requests at once. After a failure that nobody foresaw each is computed by itself, so that it
        is answered to the one that caused it."""
        found: list[Outcome]
        try:
            found = self.policy.run_batch(
                [request.prepared for request in requests], cancel=Everyone(requests)
            )
        except SinewError as error:
            return [self._present(error) for _ in requests]
        except BaseException:
            logger.warning("a batch of %d failed and is computed one by one", len(requests), exc_info=True)
            return [self._alone(request) for request in requests]
        self._failures, self.broken = 0, None
        left = CancelledError("the request was cancelled")
        return [
            self._present(left) if request.cancel.is_set() else each
            for request, each in zip(requests, found, strict=True)
        ]

    def _alone(self, request: Request) -> Outcome:
        try:
            self._check(request)
            return self._watched(request)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            return self._present(error)

    def _watched(self, request: Request) -> ActionChunk:
        """Counts the failures that nobody foresaw. A few in a row may be one client's doing, so the policy is then
        tried on its own observation: what it says of that is the server's health."""
        try:
            chunk = self.policy.run(request.prepared, cancel=request.cancel)
        except SinewError:
            raise
        except BaseException:
            self._failures += 1
            if self._failures >= FAILURES:
                self._failures = 0
                try:
                    self.policy.warm_up()
                    self.broken = None
                except BaseException as error:  # noqa: BLE001 - told by health
                    self.broken = (
                        f"the policy fails ({type(error).__name__}); the server's log has the details"
                    )
            raise
        self._failures, self.broken = 0, None
        return chunk


def _queued(chunk: ActionChunk, queue_ms: float) -> ActionChunk:
    """Return a chunk with the time that its request waited. ``dataclasses.replace`` looks at each field, which takes
    longer than all the rest that is here between an inference and its reply."""
    timing = Timing(**(vars(chunk.timing) | {"queue_ms": queue_ms}))
    return ActionChunk(**(vars(chunk) | {"timing": timing}))

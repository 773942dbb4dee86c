"""Play many simulated episodes in one process, and run their inferences as one batch.

Each episode is played by ``run_episode``. A small head costs almost as much for one observation as for thirty, so a
hundred episodes take a quarter of the time. Simulated time does not depend on the number of episodes. The chunks equal
those of single inferences up to the rounding of a batched product (eval/tests/test_side_by_side.py compares them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from sinew.core import SinewError
from sinew.policy import Policy
from sinew.processing import BatchKey, Prepared, batch_key

Result = TypeVar("Result")


class SideBySide:
    """A policy for the evaluation that waits until every episode needs a chunk, and then computes all chunks.

    Args:
        policy: A policy on an engine that supports batches.
    """

    def __init__(self, policy: Policy, solver_steps: int | None = None):
        if policy.unbatched:
            raise ValueError(policy.unbatched)
        self.policy, self.solver_steps = policy, solver_steps
        self.chunk_size, self.committed_rows = policy.spec.chunk_size, policy.spec.committed_rows
        self.served = policy.spec.to_dict()
        self.motion = self.served["motion"]
        self._waiting: dict[int, Prepared] = {}  # place of an episode -> its prepared observation
        self._answers: dict[int, np.ndarray | Exception] = {}
        self._playing = 0
        self._changed = threading.Condition()
        self._place = threading.local()

    # ------------------------------------------------------------------------- interface of a policy in sinew_eval

    def start(self, env: Any) -> None:
        """Do nothing: policies have no memory between chunks."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        images = {
            name: frame() if callable(frame) else frame for name, frame in observation["images"].items()
        }
        request = {**observation, "images": images, "seed": seed, "solver_steps": self.solver_steps}
        prepared, place = self.policy.prepare(request), self._place.number
        with self._changed:
            self._waiting[place] = prepared
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in self._answers)
            answer = self._answers.pop(place)
        if isinstance(answer, Exception):
            raise answer
        return answer, 0.0

    # ------------------------------------------------------------------------- batches

    def play(self, episode: Callable[[int], Result], seeds: Iterable[int], width: int = 25) -> list[Result]:
        """Play all seeds, ``width`` episodes at a time. Returns ``episode(seed)`` of every seed.

        Raises:
            Exception: The exception of the first episode that failed.
        """
        wanted = list(seeds)
        results: dict[int, Result] = {}
        failures: list[BaseException] = []

        def worker(place: int) -> None:
            self._place.number = place
            try:
                # Each place plays a fixed share of the seeds, so that the batches do not depend on timing.
                for seed in wanted[place::width]:
                    results[seed] = episode(seed)
            except Exception as error:  # noqa: BLE001 - the exception is raised again after all threads have ended
                failures.append(error)
            finally:
                with self._changed:
                    self._playing -= 1
                    self._changed.notify_all()

        self._playing = width = min(width, len(wanted))
        threads = [threading.Thread(target=worker, args=(place,), daemon=True) for place in range(width)]
        for thread in threads:
            thread.start()
        while self._playing:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) == self._playing)
                requests, self._waiting = sorted(self._waiting.items()), {}
            if not requests:
                break
            try:
                answers: list[Any] = list(self.batch([prepared for _, prepared in requests]))
            except Exception as error:  # noqa: BLE001 - each episode of the batch raises the exception
                answers = [error] * len(requests)
            with self._changed:
                self._answers.update(
                    {place: found for (place, _), found in zip(requests, answers, strict=True)}
                )
                self._changed.notify_all()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [results[seed] for seed in wanted]

    def batch(self, requests: list[Prepared]) -> list[np.ndarray]:
        """Return the chunk of each observation, float32 [H, D] in robot units, as ``Policy.run`` computes it."""
        groups: dict[BatchKey, list[int]] = {}
        for place, prepared in enumerate(requests):
            groups.setdefault(batch_key(prepared), []).append(place)
        found: dict[int, np.ndarray] = {}
        for places in groups.values():
            for place, chunk in zip(
                places, self.policy.run_batch([requests[place] for place in places]), strict=True
            ):
                if isinstance(chunk, SinewError):
                    raise chunk
                found[place] = chunk.actions
        return [found[place] for place in range(len(requests))]

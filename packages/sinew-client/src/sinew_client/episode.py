"""An episode of a policy, an action at a time, for a loop that is somebody else's and waits for each inference.

A robot that must not wait is driven by :class:`sinew_client.control.Loop`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.history import History
from sinew_client.policy import Policy
from sinew_client.types import ActionChunk, Observation


class Ensembled:
    """Averages the rows that successive chunks have for a control step, as ACT's temporal ensembling does.

    coefficient: m of the weights exp(-m i), where i = 0 is the oldest chunk.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient
        self._chunks: deque[np.ndarray] = deque()  # the rows of each from this step on, the oldest first

    def row(self, chunk: np.ndarray) -> np.ndarray:
        """Return the row of this control step, float32 [D], given the chunk of this step's observation."""
        # Imported here: it brings the whole loop with it, which other policies do not need
        from sinew_client.control.blend import ensemble

        self._chunks.append(np.asarray(chunk, np.float32))
        row = ensemble([rows[0] for rows in self._chunks], self.coefficient)
        self._chunks = deque(rows[1:] for rows in self._chunks if len(rows) > 1)
        return row


class ActionQueue:
    """Hands out the rows of a policy's chunks one by one, and asks for the next chunk when they are used up.

    policy: any (:func:`sinew_client.connect`); it stays open. rows: of a chunk that are handed out before it is asked
    again; None: what the policy was evaluated with (``PolicySpec.n_action_steps``), else all of them. A policy that was
    made for temporal ensembling (``PolicySpec.temporal_ensemble``) is then asked at every step, and the rows of its
    chunks are averaged. session: under which it asks, for several episodes side by side. ``chunk``: the one whose rows
    are handed out now.

    Raises :class:`ClientError` for rows that no chunk has.
    """

    def __init__(self, policy: Policy, *, rows: int | None = None, session: str = ""):
        spec = policy.spec
        whole = isinstance(rows, (int, np.integer)) and not isinstance(rows, bool)
        if rows is not None and not (whole and 1 <= rows <= spec.chunk_size):
            raise ClientError(f"rows: expected 1 to {spec.chunk_size}, got {rows!r}")
        self.policy, self.session = policy, session
        self._blend = spec.temporal_ensemble if rows is None else None
        self.rows = 1 if self._blend is not None else rows or spec.n_action_steps or spec.chunk_size
        self.chunk: ActionChunk | None = None
        self._spec = spec
        self._begin()

    def __len__(self) -> int:
        """Return how many actions can be handed out before the policy is asked."""
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<ActionQueue of {self._spec.name!r}, step {self._step}, {len(self)} of {self.rows} actions left>"

    def reset(self) -> None:
        """Begin a new episode: drop what is left, and tell the policy. Raises what its ``reset`` does."""
        self.policy.reset(self.session)
        self._begin()

    def select_action(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> np.ndarray:
        """Return the action of this control step, float32 [D] in world units. Call it once a step.

        The policy is asked, and waited for, where no row is left or the instruction is another one than that which the
        rows answer. A policy that reads several moments is given those before by itself. Raises what ``infer`` does;
        then nothing is handed out, and the step counts.
        """
        given = vars(observation) if isinstance(observation, Observation) else observation
        self._history.see(self._step, given.get("images") or {}, given.get("state"))
        step, self._step = self._step, self._step + 1
        prompt = given.get("prompt")
        if not self._queue or prompt != self._prompt:
            self._queue.clear()
            self.chunk = self.policy.infer(self._asked(observation, step), timeout=timeout)
            if prompt != self._prompt:
                self._forget()
            if self._ensembled is not None:
                self._queue.append(self._ensembled.row(self.chunk.actions))
            else:
                self._queue.extend(self.chunk.actions[: self.rows])
            self._prompt = prompt
        return self._queue.popleft()

    def _forget(self) -> None:
        """Drop the chunks that answer another instruction, or another episode."""
        self._ensembled = None if self._blend is None else Ensembled(self._blend)

    def _begin(self) -> None:
        self._forget()
        self._queue: deque[np.ndarray] = deque()
        self._history = History.of(self._spec.to_dict())
        self._step, self._prompt = 0, None

    def _asked(
        self, observation: Observation | Mapping[str, Any], step: int
    ) -> Observation | Mapping[str, Any]:
        more: dict = {}
        if self.session:
            more["session"] = self.session
        if self._history.moments > 1:
            more["earlier"] = self._history.before(step)
        if not more:
            return observation
        return (
            replace(observation, **more) if isinstance(observation, Observation) else {**observation, **more}
        )

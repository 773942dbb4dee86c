"""Play an episode one action at a time, for a control loop of your own that can wait for each inference.

If the robot must not wait for an inference, use :class:`sinew_client.control.Run`.
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
    """Averages the actions that successive chunks have for one control step (ACT's temporal ensembling).

    Args:
        coefficient: m of the weights exp(-m i), where i = 0 is the oldest chunk.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient
        self._chunks: deque[np.ndarray] = deque()  # the remaining actions of each chunk, oldest chunk first

    def row(self, chunk: np.ndarray) -> np.ndarray:
        """Add the chunk of this control step, and average all actions for this step.

        Args:
            chunk: The actions, float32 [H, D], computed from the observation of this step.

        Returns:
            The averaged action, float32 [D].
        """
        # Import the function here, because its package is the whole control loop, which most policies do not need.
        from sinew_client.control.blend import ensemble

        self._chunks.append(np.asarray(chunk, np.float32))
        row = ensemble([rows[0] for rows in self._chunks], self.coefficient)
        self._chunks = deque(rows[1:] for rows in self._chunks if len(rows) > 1)
        return row


class ActionQueue:
    """An episode that returns one action per control step, and requests the next chunk when its actions have run out.

    If a policy was trained for temporal ensembling (``PolicySpec.temporal_ensemble``), it gets a request in every step,
    and the actions of its chunks are averaged. Pass ``rows`` to switch this off.

    Args:
        policy: Any open policy (:func:`sinew_client.connect`). The episode does not close it.
        rows: Number of actions of a chunk that are returned before the next request. None takes the number with which
            the policy was evaluated (``PolicySpec.n_action_steps``), else the whole chunk.
        session: Session of the requests. Use different sessions for episodes at the same time.

    Attributes:
        chunk: The chunk whose actions are returned at present; None before the first request.
        rows: Number of actions that are returned per chunk.

    Raises:
        ClientError: ``rows`` is larger than the policy's chunk.

    Example:
        >>> queue = ActionQueue(policy)
        >>> action = queue.select_action(observation)  # float32 [D], once per control step
    """

    def __init__(self, policy: Policy, *, rows: int | None = None, session: str = ""):
        spec = policy.spec
        whole = isinstance(rows, (int, np.integer)) and not isinstance(rows, bool)
        if rows is not None and not (whole and 1 <= rows <= spec.chunk_size):
            raise ClientError(f"rows: expected 1 to {spec.chunk_size} (the actions of a chunk), got {rows!r}")
        self.policy, self.session = policy, session
        self._blend = spec.temporal_ensemble if rows is None else None
        self.rows = 1 if self._blend is not None else rows or spec.n_action_steps or spec.chunk_size
        self.chunk: ActionChunk | None = None
        self._spec = spec
        self._begin()

    def __len__(self) -> int:
        """Return the number of actions before the next request."""
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<ActionQueue of {self._spec.name!r}, step {self._step}, {len(self)} of {self.rows} actions left>"

    def reset(self) -> None:
        """Begin a new episode: drop the remaining actions, and reset the session of the policy.

        Raises:
            SinewError: The policy cannot be reset, for example because its server does not answer.
        """
        self.policy.reset(self.session)
        self._begin()

    def select_action(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> np.ndarray:
        """Return the action of this control step. Call it once per step.

        The policy gets a request if no action is left, or if the instruction has changed. A policy with an observation
        history gets the earlier steps automatically.

        Args:
            observation: As in :meth:`Policy.infer`.
            timeout: Seconds to wait for the policy; None for its own limit.

        Returns:
            float32 [D] in robot units.

        Raises:
            SinewError: The inference failed. The failed step still counts as a control step of the episode.
        """
        fields = vars(observation) if isinstance(observation, Observation) else observation
        self._history.see(self._step, fields.get("images") or {}, fields.get("state"))
        step, self._step = self._step, self._step + 1
        prompt = fields.get("prompt")
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
        """Drop the chunks of the last instruction or episode."""
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

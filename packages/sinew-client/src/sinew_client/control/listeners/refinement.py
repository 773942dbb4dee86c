"""A listener that runs an edge adapter: in each control step, the adapter refines the newest chunk."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import AdapterError
from sinew_client.control.controller import Controller
from sinew_client.control.interfaces import NoObservation
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.player import ChunkRequest


class Refinement(LoopListener):
    """Passes the actions of an edge adapter to the loop's controller.

    ``Settings.refine`` must be the adapter's ``max_age``. The robot holds if an observation has other cameras or frame
    sizes than the adapter.

    Args:
        adapter: The adapter.
    """

    refines = True

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._asked: tuple[np.ndarray, np.ndarray] | None = None
        self._chunk: tuple[np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None

    def request(self, step: int, fields: dict[str, Any]) -> None:
        """Store the features and the state of the observation that is sent now."""
        self._asked = self._seen(self.loop.observer.observation)

    def answered(self, answer: Any, request: ChunkRequest) -> None:
        """Store a chunk, float [H, A], together with the observation of its request."""
        assert self._asked is not None, "a chunk without a request"
        self._chunk = (np.asarray(answer, np.float32), self._asked)

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        """Compute the actions for ``step`` and the next steps, from the newest chunk and the present observation."""
        controller: Controller = self.loop.controller
        if observation is None or self._chunk is None or not controller.refines(step):
            return
        chunk, then = self._chunk
        now = self._seen(observation)
        try:
            rows = self.adapter.refine(chunk, then, now, controller.player.age(step))
        except AdapterError as error:
            raise NoObservation(str(error)) from error
        controller.refined(step, rows, now[1])

    def _seen(self, observation: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.adapter.see(observation["images"]), np.asarray(observation["state"], np.float32)
        except AdapterError as error:
            raise NoObservation(str(error)) from error

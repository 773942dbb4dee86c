"""Runs an edge adapter in a loop: it refines each chunk in every control step with the chunk's observation."""

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
    """Gives an adapter's actions to the loop's controller. ``Settings.refine`` must be the adapter's ``max_age``.

    Observations have ``images`` {camera: uint8 [h, w, 3]} and ``state`` [S]. The robot holds if an observation has
    other cameras or shapes than the adapter.
    """

    refines = True

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._asked: tuple[np.ndarray, np.ndarray] | None = None
        self._chunk: tuple[np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None

    def request(self, step: int, fields: dict[str, Any]) -> None:
        """Remember the observation of the request that is sent now."""
        self._asked = self._seen(self.loop.observer.observation)

    def answered(self, answer: Any, request: ChunkRequest) -> None:
        """Store an answer, [H, A], with the observation of the last request."""
        assert self._asked is not None, "a chunk without a request"
        self._chunk = (np.asarray(answer, np.float32), self._asked)

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        """Compute the actions from ``step`` on from the newest chunk and the present observation."""
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

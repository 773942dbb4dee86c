"""An edge adapter beside a controller: which observation a chunk answers, and its rows in every control step."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from sinew_client.control.adapter import Adapter
from sinew_client.control.controller import Controller


class Refinement:
    """Tells a controller an adapter's rows. Call :meth:`asked` and :meth:`arrived` with what goes out and comes back,
    and :meth:`refine` in each control step in which the controller ``refines``.

    Observations have ``images`` {camera: uint8 [h, w, 3]} and ``state`` [S]. Raises
    :class:`~sinew_client.control.adapter_file.AdapterError` for those that the adapter was not made for.
    """

    def __init__(self, adapter: Adapter, controller: Controller):
        self.adapter, self.controller = adapter, controller
        self._asked: tuple[np.ndarray, np.ndarray] | None = None
        self._chunk: tuple[np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None

    def asked(self, observation: Mapping[str, Any]) -> None:
        """Remember what the request that goes out now has seen."""
        self._asked = self._seen(observation)

    def arrived(self, actions: np.ndarray) -> None:
        """Note the answer, [H, A], to the request that was remembered last."""
        assert self._asked is not None, "a chunk without a request"
        self._chunk = (np.asarray(actions, np.float32), self._asked)

    def refine(self, step: int, observation: Mapping[str, Any]) -> None:
        """Tell the controller the rows from ``step`` on, made of the newest chunk and an observation of now."""
        if self._chunk is None or not self.controller.refines(step):
            return
        chunk, then = self._chunk
        now = self._seen(observation)
        rows = self.adapter.refine(chunk, then, now, self.controller.player.age(step))
        self.controller.refined(step, rows, now[1])

    def _seen(self, observation: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        return self.adapter.see(observation["images"]), np.asarray(observation["state"], np.float32)

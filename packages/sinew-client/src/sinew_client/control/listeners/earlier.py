"""A listener that adds earlier observation steps to each request, for a policy with an observation history."""

from __future__ import annotations

from typing import Any, Mapping

from sinew_client.control.listeners.listener import LoopListener
from sinew_client.history import History


class Earlier(LoopListener):
    """Stores earlier observation steps and adds them to each request.

    Args:
        history: The buffer for the observation steps that the policy reads (:meth:`History.of`).
    """

    def __init__(self, history: History):
        self.history = history
        self.observes = history.moments > 1

    def observed(self, step: int, observation: Mapping[str, Any]) -> None:
        observer = self.loop.observer
        self.history.see(step, observer.images, observer.state)

    def request(self, step: int, fields: dict[str, Any]) -> None:
        if self.history.moments > 1:
            fields["earlier"] = self.history.before(step)

    def restarted(self) -> None:
        self.history.clear()

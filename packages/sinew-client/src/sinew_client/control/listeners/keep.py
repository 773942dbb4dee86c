"""A listener that records the observation and the command of each control step, for example for a data set."""

from __future__ import annotations

from typing import Any, Callable, Mapping

from sinew_client.control.authority import RETURNING
from sinew_client.control.controller import Command
from sinew_client.control.listeners.listener import LoopListener


class Keep(LoopListener):
    """Calls a function for each control step with a command. Holds and the return to the rest pose are skipped.

    Args:
        keeper: Function that gets the observation of the step, the instruction and the command.
    """

    observes = True

    def __init__(self, keeper: Callable[[Mapping[str, Any], str, Command], None]):
        self._keeper = keeper

    def command(self, command: Command) -> None:
        observer = self.loop.observer
        if command.row is not None and command.by != RETURNING and observer.step == command.step:
            self._keeper(observer.observation, self.loop.prompt, command)

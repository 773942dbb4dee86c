"""Calls a function with every command of a loop."""

from __future__ import annotations

from typing import Callable

from sinew_client.control.controller import Command
from sinew_client.control.listeners.listener import LoopListener


class CommandListener(LoopListener):
    """Calls a function after every control step with its command."""

    def __init__(self, watcher: Callable[[Command], None]):
        self._watcher = watcher

    def command(self, command: Command) -> None:
        self._watcher(command)

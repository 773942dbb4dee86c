"""A listener that logs why a robot holds, and when it moves again."""

from __future__ import annotations

import logging

from sinew_client.control.controller import LATE, UNKNOWN, Command
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.pace import SimulatedPace

logger = logging.getLogger(__name__)


class HoldLog(LoopListener):
    """Logs the beginning and the end of each hold with its reason. It logs nothing if the time is simulated."""

    def command(self, command: Command) -> None:
        loop = self.loop
        if isinstance(loop.pace, SimulatedPace):
            return
        if command.reason and command.reason != loop.reason:
            # Chunk merging `freeze` holds before every chunk, so only the first of these holds is a warning.
            usual = command.reason == LATE and loop.controller.held[LATE] > 1
            level = logging.INFO if usual else logging.WARNING
            details = [each.detail for each in loop.listeners if each.detail]
            why = loop.observer.fault if command.reason == UNKNOWN else "; ".join(details)
            text = f"{command.reason} ({why})" if why else command.reason
            logger.log(level, "step %d: holds: %s", command.step, text)
        elif loop.reason and not command.reason:
            logger.info("step %d: resumed (was holding: %s)", command.step, loop.reason)

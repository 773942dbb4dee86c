"""What drives a robot as others see it: goals and the life cycle enable it, and hold it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sinew_client.control.loop import Loop

from sinew_ros.contract import Contract

# A paused loop must hold the robot within this many seconds plus three control periods.
HOLDS_S = 1.0


class DrivenRobot(Protocol):
    """A robot under a policy (:class:`sinew_ros.bridge.Bridge`).

    Attributes:
        contract: Its topics and settings.
        loop: The loop that commands it.
        prompt: The instruction of goals that bring none; "" for none.
        ended: True once the loop is over, and the robot holds.
    """

    contract: Contract
    loop: Loop
    prompt: str
    ended: bool

    def enable(self, on: bool) -> None:
        """Begin, or hold until told to begin again."""


def hold(driven: DrivenRobot, failed: Callable[[], bool] = lambda: False) -> None:
    """Pause a robot, and return once its robot holds. failed: whether its loop has ended with an error. Raises
    RuntimeError where it has, or does not hold in time."""
    driven.enable(False)
    loop, begun = driven.loop, driven.loop.steps
    end = time.monotonic() + HOLDS_S + 3 * driven.contract.settings.period
    # Wait for two control steps: the step in progress, and one step that holds.
    while loop.steps < begun + 2 and not driven.ended:
        if failed() or time.monotonic() > end:
            raise RuntimeError("the loop did not hold in time")
        time.sleep(0.002)

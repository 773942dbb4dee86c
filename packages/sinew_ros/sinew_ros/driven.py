"""The interface through which goals and the life cycle of a node start to drive a robot, or make it hold its
position.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sinew_client.control.loop import Loop

from sinew_ros.contract import Contract

# A paused loop must hold the robot within this many seconds plus three control periods.
HOLDS_S = 1.0


class DrivenRobot(Protocol):
    """A robot that a policy drives (:class:`sinew_ros.bridge.Bridge`).

    Attributes:
        contract: Topics and settings of the robot.
        loop: The control loop that commands the robot.
        prompt: The instruction for goals without an instruction; "" if there is none.
        ended: True after the loop has ended and the robot holds.
    """

    contract: Contract
    loop: Loop
    prompt: str
    ended: bool

    def enable(self, on: bool) -> None:
        """Start to drive the robot, or hold it until the next call with True."""


def hold(driven: DrivenRobot, failed: Callable[[], bool] = lambda: False) -> None:
    """Pause a robot, and return when the robot holds.

    Args:
        driven: The robot.
        failed: Returns True if the robot's loop has ended with an error.

    Raises:
        RuntimeError: The loop has failed, or does not hold the robot in time.
    """
    driven.enable(False)
    loop, begun = driven.loop, driven.loop.steps
    end = time.monotonic() + HOLDS_S + 3 * driven.contract.settings.period
    # Wait for two control steps: the step in progress, and one step that holds.
    while loop.steps < begun + 2 and not driven.ended:
        if failed() or time.monotonic() > end:
            raise RuntimeError("the control loop did not hold the robot in time")
        time.sleep(0.002)

"""Take-over: a person at a leader arm, or a scripted expert, drives the robot and hands it back to the policy.

At a take-over, the robot holds until the leader arm is at the robot's position. Then the robot follows the leader's
commands, with the same limits as for the policy. If the leader sends no command for 0.2 s, or jumps, the robot holds
until the leader is aligned again. When the person hands the robot back, it holds until the policy has a fresh chunk.
So the robot does not jump at a change of the driver: each driver starts at the last command.
"""

from __future__ import annotations

import logging
from typing import Any, Mapping

import numpy as np

from sinew_client.control.authority import ALIGNING, HUMAN, POLICY, RETURNING, SILENT, Leader, LeaderError
from sinew_client.control.controller import BaseController
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.listeners.shadow import ShadowAgreement, ShadowListener
from sinew_client.control.loop import Loop
from sinew_client.control.motion import Motion
from sinew_client.control.safety import Limits, RowsError, checked_rows

logger = logging.getLogger(__name__)

# By default, leader and robot may differ by this fraction of each joint's range at a take-over.
ALIGN_SHARE = 0.05
SILENCE_S = 0.2  # after this many seconds without a command, the leader must be aligned with the robot again


class Takeover(LoopListener):
    """Reads a leader once per control step, and decides whether the policy or the leader drives. Use it for one loop.

    Threads:
        :meth:`take_over` and :meth:`hand_back` may be called from any thread.

    Args:
        leader: The leader.
        motion: The motion, which states what the policy's actions are relative to.
        dim: Number of values in a command (D).
        limits: Limits of the robot, for the default of ``align`` and for names.
        align: Largest difference of each joint between the leader and the robot at a take-over, and between two
            successive commands of the leader, in robot units. None takes 0.05 of each range in ``limits``. With a
            larger difference, or after 0.2 s without a command, the robot holds until the leader is aligned again.
        shadow: True if the leader drives for the whole run, and the policy's actions are only compared with the
            leader's (:class:`~sinew_client.control.listeners.shadow.ShadowAgreement`).

    Attributes:
        apart: The reason why the leader is not aligned yet; "" if it is.

    Raises:
        LeaderError: The motion does not state whether the leader's numbers are positions, or a number has neither
            ``align`` nor a range in ``limits``.
    """

    def __init__(
        self,
        leader: Leader,
        motion: Motion,
        dim: int,
        limits: Limits | None,
        align: float | None = None,
        shadow: bool = False,
    ):
        if not np.any(motion.posed(dim)):
            raise LeaderError(
                "--takeover: expected a motion (absolute, relative or offsets), which determines whether the leader"
                " must be aligned with the robot, got none; set --motion"
            )
        self.leader, self.shadow = leader, shadow
        self._dim, self._placed = dim, motion.placed(dim)
        self._names = tuple(map(str, range(dim))) if limits is None or not limits.names else limits.names
        self._near = np.full(dim, np.inf)
        if align is not None:
            self._near[self._placed] = align
        elif self._placed.any():
            span = np.full(dim, np.inf) if limits is None else limits.high - limits.low
            if lost := [self._names[at] for at in np.flatnonzero(self._placed & ~np.isfinite(span))]:
                raise LeaderError(
                    f"align: expected a number, the largest difference between leader and robot. The default is"
                    f" {ALIGN_SHARE:g} of each joint's range, but {', '.join(lost)} has no range in the limits"
                )
            self._near[self._placed] = ALIGN_SHARE * span[self._placed]
        self.apart = ""  # the reason why the leader is not aligned yet
        self._said: set[str] = set()  # failures of the leader that were logged already
        self._pressed = bool(getattr(leader, "wanted", False))

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        if self.shadow:
            loop.controller.take_over(0, shadow=True)
            ShadowAgreement().attach(loop)

    @property
    def detail(self) -> str:  # type: ignore[override]
        return self.apart if self.loop.controller.driver == ALIGNING else ""

    def take_over(self) -> None:
        """Hold the robot within one period, align the leader with it, and follow the leader until :meth:`hand_back`."""
        self.loop.calls.append(self._take_over)

    def hand_back(self) -> None:
        """Hold the robot within one period, until the policy has a fresh chunk. Then the policy drives again."""
        self.loop.calls.append(self._hand_back)

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        loop, controller = self.loop, self.loop.controller
        if controller.paused:
            return
        if (begins := self.asks()) is not None:
            (self._take_over if begins else self._hand_back)()
        if controller.driver in (POLICY, RETURNING):
            return
        here = None if controller.guard is None else controller.guard.here
        here = loop.last_row if here is None else here
        lost = controller.driver != HUMAN and (here is None or np.any(np.isnan(here)))
        if lost and (observation is not None or loop.observe(step, loop.now) is not None):
            here = loop.observer.position()
        # A shadowed robot is only watched: its observation contains the command of its driver, who is the leader here.
        if isinstance(loop.robot, ShadowListener):
            loop.observe(step, loop.now)
        last = controller.followed
        followed = None if last is None else (max(0, step - last[0] - 1) / loop.settings.hz, last[1])
        self.follow(controller, step, here, followed)
        if controller.driver == HUMAN and controller.followed is None and here is not None:
            controller.followed = step, here

    def asks(self) -> bool | None:
        """Read the leader's button (``wanted``).

        Return True to take over, False to hand back, None without a change.
        """
        pressed = getattr(self.leader, "wanted", None)
        if pressed is None or bool(pressed) == self._pressed:
            return None
        self._pressed = bool(pressed)
        return self._pressed

    def follow(
        self,
        controller: BaseController,
        step: int,
        here: np.ndarray | None,
        followed: tuple[float, np.ndarray] | None = None,
    ) -> None:
        """Read the leader for one control step, and pass its command to the controller if the leader is aligned.

        Args:
            controller: The loop's controller.
            step: The control step.
            here: Position of the robot, float [D], with NaN for unknown numbers; None if it is unknown.
            followed: Seconds since the last command of the leader that was sent, and this command, float [D].
        """
        row, reason = self._read()
        if controller.driver == HUMAN and self._left(row, followed):
            controller.realign(step)
        if controller.driver == ALIGNING:
            self.apart = reason or self._apart(row, here)
            if self.apart:
                self._align(here)
                return
            self._do("free")
            if self.apart:
                return
            controller.aligned(step)
        if controller.driver == HUMAN:
            controller.led(step, row, reason)

    def _take_over(self) -> None:
        controller = self.loop.controller
        if not controller.paused and controller.driver in (POLICY, RETURNING):
            self.loop.source.cancel()
            controller.take_over(self.loop.next_step)

    def _hand_back(self) -> None:
        controller = self.loop.controller
        if not self.shadow and controller.driver not in (POLICY, RETURNING):
            controller.hand_back(self.loop.next_step)

    def _left(self, row: np.ndarray | None, followed: tuple[float, np.ndarray] | None) -> bool:
        """Return True if the leader was silent for too long, or has moved too far since its last executed command.

        Args:
            row: The leader's present command, float32 [D]; None if it sends none.
            followed: Seconds since the last command of the leader that was sent to the robot, and this command.
        """
        # A shadowed leader reports the robot's own commands, so it is always at the robot's position.
        if followed is None or isinstance(self.leader, ShadowListener):
            return False
        seconds, last = followed
        return seconds > SILENCE_S or (row is not None and bool(np.any(np.abs(row - last) > self._near)))

    def close(self) -> None:
        """Close the leader if it has a method ``close``."""
        if callable(close := getattr(self.leader, "close", None)):
            close()

    def _read(self) -> tuple[np.ndarray | None, str]:
        """Return the leader's command, float32 [D], and "". Without a valid command, return None and the reason."""
        try:
            row = self.leader.read()
            if row is None:
                return None, SILENT
            return checked_rows([row], self._dim, 1, what="the leader's row")[0], ""
        except RowsError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - after any error of the leader, the robot holds
            reason = f"the leader failed: {type(error).__name__}: {error!s:.200}"
        if reason not in self._said and len(self._said) < 100:
            logger.warning("%s", reason)
            self._said.add(reason)
        return None, reason

    def _apart(self, row: np.ndarray | None, here: np.ndarray | None) -> str:
        """Describe the joints at which leader and robot differ too much; "" if the leader is aligned.

        Args:
            row: The leader's command, float32 [D].
            here: Position of the robot, float [D]; None if it is unknown.
        """
        assert row is not None
        if not self._placed.any():
            return ""
        if here is None or np.any(np.isnan(here[self._placed])):
            return "the robot's position is not known"
        differ = np.abs(row.astype(np.float64) - here)
        far = np.flatnonzero(differ > self._near)
        return ", ".join(f"{self._names[at]} by {differ[at]:.4g}, at most {self._near[at]:.4g}" for at in far)

    def _align(self, here: np.ndarray | None) -> None:
        if here is not None:
            self._do("align", here)

    def _do(self, what: str, *values: Any) -> None:
        """Call an optional method of the leader. If the method raises an error, the robot holds.

        Args:
            what: Name of the method, such as "align".
            *values: Arguments of the method.
        """
        if not callable(method := getattr(self.leader, what, None)):
            return
        try:
            method(*values)
        except Exception as error:  # noqa: BLE001 - after any error of the leader, the robot holds
            self.apart = f"the leader could not be aligned: {type(error).__name__}: {error!s:.200}"

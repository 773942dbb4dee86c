"""The last observation steps of a robot, for a policy with an observation history."""

from __future__ import annotations

from collections import deque
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.types import Moment, history_problem
from sinew_client.untrusted import shown


class History:
    """Stores the last observations of a robot, for a policy that reads T observation steps.

    The robot stores the history and not the server, so a server may restart in the middle of an episode. A request may
    be sent in any control step, so all (T - 1) * stride + 1 steps are stored. Frames are copied, so the robot may
    overwrite its own buffers.

    Args:
        moments: Number of observation steps (T, :attr:`PolicySpec.history`), including the present observation. With
            1, no observation is stored.
        stride: Number of control steps from one observation step to the next.
        padding: Content of steps before the first observation: "repeat" (the first observation) or "mask" (left out)
            (:attr:`PolicySpec.history_padding`).

    Raises:
        ClientError: A number is out of its range.

    Example:
        >>> history = History(moments=3, stride=5)
        >>> history.see(step, images, state)
        >>> observation["earlier"] = history.before(step)
    """

    def __init__(self, moments: int = 1, stride: int = 1, padding: str = "repeat"):
        # Check `moments` and `stride`, because they come from a server.
        if problem := history_problem(moments, stride):
            raise ClientError(f"policy.{problem}")
        if padding not in ("repeat", "mask"):
            raise ClientError(f"policy.history_padding: expected repeat or mask, got {padding!r}")
        self.moments, self.stride, self.padding = moments, stride, padding
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=(moments - 1) * stride + 1)

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> History:
        """Create the history for a policy, from its description. If the description does not state a number, the
        history has one observation step.

        Raises:
            ClientError: The description is not valid.
        """
        numbers = [policy.get("history") or 1, policy.get("history_stride") or 1]
        for name, value in zip(("history", "history_stride"), numbers):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ClientError(f"policy.{name}: expected a whole number, got {shown(value)}")
        return cls(*numbers, padding=policy.get("history_padding") or "repeat")

    def see(self, step: int, images: Mapping[str, Any], state: Any) -> None:
        """Store the observation of a control step. A second call for the same step replaces the first one."""
        if self.moments == 1:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        frames = {name: np.array(frame) for name, frame in images.items()}
        self._kept.append((step, Moment(frames, np.array(state))))

    def before(self, step: int) -> tuple[Moment, ...]:
        """Return the earlier observation steps for a request.

        Args:
            step: The control step of the request.

        Returns:
            The T - 1 observation steps before ``step``, ``stride`` control steps apart, oldest first. If a step has no
            observation, the observation before it is used. The result is () if there is no observation at all.
        """
        if self.moments == 1 or not self._kept:
            return ()
        steps = []
        for due in range(step - (self.moments - 1) * self.stride, step, self.stride):
            seen = [moment for at, moment in self._kept if at <= due]
            if seen or self.padding == "repeat":
                steps.append(seen[-1] if seen else self._kept[0][1])
        return tuple(steps)

    def clear(self) -> None:
        """Remove all stored observations, because a new episode has begun or the robot was moved."""
        self._kept.clear()

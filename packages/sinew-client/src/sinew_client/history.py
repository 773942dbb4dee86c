"""The last observation steps of a robot, for a policy with an observation history."""

from __future__ import annotations

from collections import deque
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.types import Moment, history_problem
from sinew_client.untrusted import shown


class History:
    """Stores the observation of each control step, as far back as a policy reads.

    The spacing is that of training, in control steps. Requests come at any step, so all (T - 1) * stride + 1 steps are
    stored. The robot stores the history and the server does not, so a server may restart in the middle of an episode.
    Frames are copied, so a robot may overwrite them.

    Args:
        moments: T of the policy (:attr:`PolicySpec.history`), with the observation itself as the newest step. 1
            stores nothing.
        stride: Control steps from one observation step of the history to the next.
        padding: Replacement of steps before the first observation, "repeat" or "mask"
            (:attr:`PolicySpec.history_padding`).

    Raises:
        ClientError: No policy has such a history.
    """

    def __init__(self, moments: int = 1, stride: int = 1, padding: str = "repeat"):
        # Check the numbers, because they come from a server.
        if problem := history_problem(moments, stride):
            raise ClientError(f"policy.{problem}")
        if padding not in ("repeat", "mask"):
            raise ClientError(f"policy.history_padding: expected repeat or mask, got {padding!r}")
        self.moments, self.stride, self.padding = moments, stride, padding
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=(moments - 1) * stride + 1)

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> History:
        """Create the history that a policy's description states; by default one observation step.

        Raises:
            ClientError: The description is not valid.
        """
        numbers = [policy.get("history") or 1, policy.get("history_stride") or 1]
        for name, value in zip(("history", "history_stride"), numbers):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ClientError(f"policy.{name}: expected a whole number, got {shown(value)}")
        return cls(*numbers, padding=policy.get("history_padding") or "repeat")

    def see(self, step: int, images: Mapping[str, Any], state: Any) -> None:
        """Store the observation of a control step. For the same step, the last call counts."""
        if self.moments == 1:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        frames = {name: np.array(frame) for name, frame in images.items()}
        self._kept.append((step, Moment(frames, np.array(state))))

    def before(self, step: int) -> tuple[Moment, ...]:
        """Return the T - 1 observation steps before a control step, ``stride`` steps apart, oldest first.

        A step without an observation is replaced by the step before it. Steps before the first observation are filled
        with the first observation if the padding is "repeat", and left out if it is "mask". Without any observation,
        the result is ().
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
        """Forget all observation steps, because the scene has changed, as in a new episode."""
        self._kept.clear()

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

    The spacing is that of training, in control steps, and not that of requests, which come at any step. So all (T -
    1) * stride + 1 steps are stored. The robot stores them and the server none, so a server may restart in the middle
    of an episode. Frames are copied, so a robot may overwrite them.

    Args:
        moments: T of the policy (:attr:`PolicySpec.history`), with the observation itself as the newest step. 1
            stores nothing.
        stride: Control steps from one of them to the next.
        padding: Replacement of steps before the first one, "repeat" or "mask" (:attr:`PolicySpec.history_padding`).

    Raises:
        ClientError: No policy has such a history.
    """

    def __init__(self, moments: int = 1, stride: int = 1, padding: str = "repeat"):
        if problem := history_problem(moments, stride):  # the numbers come from a server
            raise ClientError(f"policy.{problem}")
        if padding not in ("repeat", "mask"):
            raise ClientError(f"policy.history_padding: expected repeat or mask, got {padding!r}")
        self.moments, self.stride, self.padding = moments, stride, padding
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=(moments - 1) * stride + 1)

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> History:
        """Return the history of a policy's description. Its default is one observation step. Raises
        :class:`ClientError`.
        """
        said = [policy.get("history") or 1, policy.get("history_stride") or 1]
        for name, value in zip(("history", "history_stride"), said):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ClientError(f"policy.{name}: expected a whole number, got {shown(value)}")
        return cls(*said, padding=policy.get("history_padding") or "repeat")

    def see(self, step: int, images: Mapping[str, Any], state: Any) -> None:
        """Store the observation of a control step. For the same step, the last call counts."""
        if self.moments == 1:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        frames = {name: np.array(frame) for name, frame in images.items()}
        self._kept.append((step, Moment(frames, np.array(state))))

    def before(self, step: int) -> tuple[Moment, ...]:
        """Return the T - 1 observation steps before a control step, ``stride`` steps apart, oldest first; () without
        any.

        A step without an observation is replaced by the one before it. Steps before the first one are filled with the
        first if the padding is "repeat", and left out if it is "mask".
        """
        if self.moments == 1 or not self._kept:
            return ()
        found = []
        for wanted in range(step - (self.moments - 1) * self.stride, step, self.stride):
            seen = [moment for at, moment in self._kept if at <= wanted]
            if seen or self.padding == "repeat":
                found.append(seen[-1] if seen else self._kept[0][1])
        return tuple(found)

    def clear(self) -> None:
        """Forget all moments: the world is another one, such as a new episode's."""
        self._kept.clear()

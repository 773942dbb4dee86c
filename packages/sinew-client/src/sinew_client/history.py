"""What a robot saw at its last control steps, for a policy that reads several moments at once."""

from __future__ import annotations

from collections import deque
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.types import Moment, history_problem
from sinew_client.untrusted import shown


class History:
    """Keeps what a robot saw at each control step, as far back as a policy reads.

    moments: T of the policy (:attr:`PolicySpec.history`), of which an observation itself is the newest; 1: keeps
    nothing. stride: control steps from one of them to the next. padding: what stands for moments before the first one,
    "repeat" or "mask" (:attr:`PolicySpec.history_padding`). Moments are copies, so a robot may write its next frame
    where the last one was.

    The spacing is that of training, in control steps, and not that of requests, which come at any step: so all steps
    are kept, (T - 1) * stride + 1 of them. The robot keeps them and the server none: one that is started again in the
    middle of an episode, or that two robots share, has nothing to lose.

    Raises :class:`ClientError` for a history that no policy has.
    """

    def __init__(self, moments: int = 1, stride: int = 1, padding: str = "repeat"):
        if problem := history_problem(moments, stride):  # a server said it
            raise ClientError(f"policy.{problem}")
        if padding not in ("repeat", "mask"):
            raise ClientError(f"policy.history_padding: expected repeat or mask, got {padding!r}")
        self.moments, self.stride, self.padding = moments, stride, padding
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=(moments - 1) * stride + 1)

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> History:
        """Return the history of a policy by what a server says of it, or ``spec.to_dict()``. What it does not say is
        that of a policy that reads one moment. Raises :class:`ClientError`."""
        said = [policy.get("history") or 1, policy.get("history_stride") or 1]
        for name, value in zip(("history", "history_stride"), said):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ClientError(f"policy.{name}: expected a whole number, got {shown(value)}")
        return cls(*said, padding=policy.get("history_padding") or "repeat")

    def see(self, step: int, images: Mapping[str, Any], state: Any) -> None:
        """Keep the moment of a control step; of one step the last that is given counts."""
        if self.moments == 1:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        frames = {name: np.array(frame) for name, frame in images.items()}
        self._kept.append((step, Moment(frames, np.array(state))))

    def before(self, step: int) -> tuple[Moment, ...]:
        """Return the T - 1 moments before a control step, ``stride`` steps apart, oldest first; none where nothing was
        seen.

        The one before stands for a step at which nothing was seen. For those before the first, as at the start of an
        episode, the first stands where the policy's padding is "repeat"; where it is "mask", they are left out.
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

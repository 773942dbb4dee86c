"""What a robot saw at its last control steps, for a policy that reads several moments at once."""

from __future__ import annotations

from collections import deque
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.types import MAX_HISTORY, Moment


class History:
    """Keeps one moment of each control step, as many as a policy reads.

    moments: T of the policy (:attr:`PolicySpec.history`), of which an observation itself is the newest; 1: keeps
    nothing. Moments are copies, so a robot may write its next frame where the last one was.

    The spacing is that of training, a control step, and not that of requests. So the robot keeps the moments and the
    server none: one that is started again in the middle of an episode, or that two robots share, has nothing to lose.
    """

    def __init__(self, moments: int = 1):
        if not 1 <= moments <= MAX_HISTORY:  # a server said it
            raise ClientError(f"policy.history: expected 1 to {MAX_HISTORY}, got {moments}")
        self.moments = moments
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=moments)

    def see(self, step: int, images: Mapping[str, Any], state: Any) -> None:
        """Keep the moment of a control step; of one step the last that is given counts."""
        if self.moments == 1:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        frames = {name: np.array(frame) for name, frame in images.items()}
        self._kept.append((step, Moment(frames, np.array(state))))

    def before(self, step: int) -> tuple[Moment, ...]:
        """Return the moments of the T - 1 control steps before one, oldest first; none where nothing was seen.

        The one before stands for a step at which nothing was seen, and the first for those before it, as at the start
        of an episode.
        """
        if self.moments == 1 or not self._kept:
            return ()
        found = []
        for wanted in range(step - self.moments + 1, step):
            seen = [moment for at, moment in self._kept if at <= wanted]
            found.append(seen[-1] if seen else self._kept[0][1])
        return tuple(found)

    def clear(self) -> None:
        """Forget all moments: the world is another one, such as a new episode's."""
        self._kept.clear()

"""A stream to a policy that runs in this process. It has the interface of ``sinew_client.streams.StreamLink``, which
connects to a server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from sinew_client.faults import Faults, kind_of
from sinew_client.streams import StreamWindow

from sinew.core import SinewError
from sinew.stream.loops import Loops
from sinew.stream.session import Session, StateSample
from sinew.stream.windows import Window

UNREAD = 256  # largest number of waiting windows; older windows are dropped


class LocalLink:
    """Computes one stream in this process: it runs the slow loop and the fast loop of the session on its own threads.

    Args:
        session: The session.
        loops: The loops that compute for the session; None creates them.

    Attributes:
        error: The last error, as in StreamLink.
        errors: Number of errors, as in StreamLink.
        faults: Counted errors by their kind, as in StreamLink.
    """

    def __init__(self, session: Session, loops: Loops | None = None):
        self.session, self._loops = session, loops or Loops()
        self.label, self.error, self.errors, self.faults = session.label, "", 0, Faults()
        self._windows: deque[StreamWindow] = deque(maxlen=UNREAD)
        self._loops.add(session, self)

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Mapping[str, Any] | None = None,
        frame_time: float | None = None,
        prompt: str = "",
    ) -> bool:
        session = self.session
        try:
            session.push_sample(StateSample(np.array(state, np.float32), time, delay, session.now()))
            if prompt and prompt != session.prompt:
                session.say(prompt)
            if images is not None:
                session.push_frame(images, time if frame_time is None else frame_time)
        except SinewError as error:
            self.failed(error)
            return False
        self._loops.wake()
        return True

    def windows(self) -> list[StreamWindow]:
        """Return the windows (groups of waypoints) that have arrived since the last call, oldest first."""
        windows = []
        while self._windows:
            windows.append(self._windows.popleft())
        return windows

    def restart(self) -> None:
        """Begin a new stream with the next sample, without any earlier context."""
        self._loops.remove(self.session)
        self.session = self.session.anew()
        self._loops.add(self.session, self)

    def close(self) -> None:
        self._loops.remove(self.session)
        self._loops.stop()

    def window(self, window: Window) -> None:
        times = 1e3 * window.prefix_age, 1e3 * window.sensor_age, 1e3 * window.head_s
        where = window.step, window.rows, window.sample_time, window.frame_time
        text = window.text
        self._windows.append(StreamWindow(*where, *times, window.run, text=text.running, said=text.said))

    def failed(self, error: SinewError) -> None:
        if kind := kind_of(error):
            self.faults.add(kind, str(error))
        self.error = str(error)
        # Increase the counter last. The robot's loop, on another thread, reads `error` and `faults` when
        # the counter changes.
        self.errors += 1

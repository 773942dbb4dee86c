"""Full streaming inference. A slow loop computes prefixes (the part of the model that reads frames and text), and a
fast loop runs the action head. Neither loop waits for the other.

Source: section 6 of "Running VLAs at Real-time Speed" (Ma et al. 2025). :class:`Session` is the stream of one
robot, without sockets, clocks or threads. :class:`Loops` runs the two loops for any number of streams. See
docs/stream.md.
"""

from __future__ import annotations

from sinew.stream.local import LocalLink
from sinew.stream.loops import Loops
from sinew.stream.session import Session, StreamSettings
from sinew.stream.windows import Window

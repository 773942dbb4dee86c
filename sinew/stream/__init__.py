"""Full streaming inference: a slow loop computes prefixes, a fast loop runs the action head, and neither waits for
the other.

Source: section 6 of "Running VLAs at Real-time Speed" (Ma et al. 2025). :class:`Session` is the stream of one
robot, without sockets, clocks or threads. :class:`Loops` runs the two loops for any number of streams. See
docs/stream.md.
"""

from __future__ import annotations

from sinew.stream.local import LocalLink
from sinew.stream.loops import Loops
from sinew.stream.session import Session, StreamSettings
from sinew.stream.windows import Window

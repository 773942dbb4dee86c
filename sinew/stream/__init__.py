"""Full streaming inference: a slow loop of prefixes and a fast loop of head runs that never wait for each other.

After section 6 of "Running VLAs at Real-time Speed" (Ma et al. 2025). :class:`Session` is one robot's stream without
sockets, clocks or threads; :class:`Loops` runs the two loops of any number of them. docs/stream.md.
"""

from __future__ import annotations

from sinew.stream.local import LocalLink
from sinew.stream.loops import Loops
from sinew.stream.session import Session, StreamSettings
from sinew.stream.windows import Window

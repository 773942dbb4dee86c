"""How frames travel to a far server: as they are, in JPEG, or in JPEG where the network needs it. No sockets here."""

from __future__ import annotations

import logging
from statistics import median

from sinew_client.protocol import need_pillow

logger = logging.getLogger(__name__)

AUTO = "auto"
QUALITY = 90  # of JPEG, where the network asks for it
SLOW_MS = 50.0  # on the network alone
LOOKS = 5  # answers before a choice
GAIN = 0.8  # of the raw frames' time on the network, below which JPEG stays


class Frames:
    """Chooses the encoding of a robot's frames, for all connections of a run.

    wanted: "1" to "95", JPEG of that quality; "auto": raw, until the median of 5 requests spent more than 50 ms on the
    network (round trip without the server's own time; one without an answer counts its time limit). Then JPEG 90 for
    five; it stays if their median is below 0.8 of that, else frames are raw again for good. "raw": always so, and a
    network that slow is told. JPEG loses detail, so actions change a little: that is why it is asked for.

    Raises ValueError for another text, ClientError where Pillow is missing.
    """

    def __init__(self, wanted: str = "raw"):
        if wanted not in ("raw", AUTO) and not (wanted.isdecimal() and 1 <= int(wanted) <= 95):
            raise ValueError(f"frames: expected raw, auto or a JPEG quality from 1 to 95, got {wanted!r}")
        if wanted != "raw":
            need_pillow()
        self.quality = int(wanted) if wanted.isdecimal() else None  # of the next request; None: raw
        self.why = "asked for" if self.quality is not None else f"fewer than {LOOKS} answers yet"
        self._auto, self._looks, self._raw_ms = wanted == AUTO, self.quality is None, 0.0
        self._seen: list[float] = []

    @property
    def text(self) -> str:
        """Return what is sent now, and why."""
        return f"{'raw' if self.quality is None else f'JPEG {self.quality}'}: {self.why}"

    def took(self, network_ms: float) -> None:
        """Note what a request spent on the network, milliseconds."""
        if not self._looks:
            return
        self._seen = [*self._seen, network_ms][-LOOKS:]
        if len(self._seen) < LOOKS:
            return
        ms = median(self._seen)
        if self.quality is None:
            self.why = f"{ms:.0f} ms on the network, up to {SLOW_MS:.0f} are left alone"
            if ms > SLOW_MS and not self._auto:
                said, self._raw_ms = self._raw_ms > 0.0, ms
                self.why = (
                    f"{ms:.0f} ms on the network; auto tries JPEG there, which changes actions a little"
                )
                if not said:
                    logger.warning("frames: %s", self.text)
            elif ms > SLOW_MS:
                self._raw_ms, self._seen, self.quality = ms, [], QUALITY
                self.why = f"raw frames took {ms:.0f} ms on the network"
                logger.warning("frames: %s", self.text)
            return
        self._looks = False
        self.why = f"{ms:.0f} ms on the network, raw frames took {self._raw_ms:.0f}"
        if ms >= GAIN * self._raw_ms:
            self.quality, self.why = None, f"JPEG was no faster ({self.why})"
        logger.warning("frames: %s", self.text)

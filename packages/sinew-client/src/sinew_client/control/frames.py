"""Choose how camera frames are encoded for a server: raw, JPEG, or JPEG only if the network is slow.

This module opens no sockets.
"""

from __future__ import annotations

import logging
from statistics import median

from sinew_client.protocol import need_pillow

logger = logging.getLogger(__name__)

AUTO = "auto"
QUALITY = 90  # JPEG quality of the encoding "auto", 1 to 95
SLOW_MS = 50.0  # the network is slow if a request needs longer than this in addition to the server's own time
LOOKS = 5  # "auto" measures this many answers before it chooses an encoding
GAIN = 0.8  # "auto" stays with JPEG if it takes less than this fraction of the time of raw frames


class Frames:
    """Chooses the encoding of a robot's frames, for all connections of a run.

    "auto" first sends raw frames. It measures the time that requests need on the network: the round trip without the
    server's own time. If the median of 5 requests is above 50 ms, it sends 5 requests with JPEG of quality 90. It stays
    with JPEG if their median is below 0.8 of the time of raw frames. Otherwise it sends raw frames for the rest of the
    run. A request without an answer counts with its time limit.

    JPEG is not the default, because it loses detail and so changes the actions a little. "raw" only logs a warning if
    the network is slow.

    Args:
        wanted: "raw", "auto", or a JPEG quality from "1" to "95".

    Attributes:
        quality: JPEG quality of the next request; None for raw frames.
        why: The reason for the present encoding.

    Raises:
        ValueError: ``wanted`` is not one of these values.
        ClientError: Pillow is not installed.
    """

    def __init__(self, wanted: str = "raw"):
        if wanted not in ("raw", AUTO) and not (wanted.isdecimal() and 1 <= int(wanted) <= 95):
            raise ValueError(f"frames: expected raw, auto or a JPEG quality from 1 to 95, got {wanted!r}")
        if wanted != "raw":
            need_pillow()
        # This is the JPEG quality of the next request. None sends raw frames.
        self.quality = int(wanted) if wanted.isdecimal() else None
        self.why = "chosen by the user" if self.quality is not None else f"fewer than {LOOKS} answers yet"
        self._auto, self._looks, self._raw_ms = wanted == AUTO, self.quality is None, 0.0
        self._seen: list[float] = []

    @property
    def text(self) -> str:
        """The present encoding and its reason, for the log."""
        return f"{'raw' if self.quality is None else f'JPEG {self.quality}'}: {self.why}"

    def took(self, network_ms: float) -> None:
        """Record how long a request needed on the network, in milliseconds, and change the encoding if necessary."""
        if not self._looks:
            return
        self._seen = [*self._seen, network_ms][-LOOKS:]
        if len(self._seen) < LOOKS:
            return
        ms = median(self._seen)
        if self.quality is None:
            self.why = f"{ms:.0f} ms on the network, JPEG is considered above {SLOW_MS:.0f} ms"
            if ms > SLOW_MS and not self._auto:
                logged_before, self._raw_ms = self._raw_ms > 0.0, ms
                self.why = (
                    f"{ms:.0f} ms on the network; `auto` would try JPEG, which changes actions a little"
                )
                if not logged_before:
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

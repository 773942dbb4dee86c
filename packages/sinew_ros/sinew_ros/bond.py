"""A bond between a managed node and its manager, as Nav2's lifecycle manager creates one with each node that it
activates.

Both sides publish heartbeats on ``/bond``, so each side notices when the other side has stopped. The messages and
times come from bond_core (bond/msg/Status, Constants).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from sinew_ros.bridge import COMMAND
from sinew_ros.messages import time_of

logger = logging.getLogger(__name__)

TOPIC, KIND = "/bond", "bond/msg/Status"
# Seconds between two heartbeats, and seconds of silence that end the bond. The period is short, because a lifecycle
# manager waits only 2 s for the first heartbeat.
PERIOD_S, TIMEOUT_S = 0.25, 4.0


class Bond:
    """The node's half of a bond, a connection on which both sides send heartbeats. A manager that never answers has no
    effect, because most managers do not use bonds.

    Args:
        transport: Transport with the methods ``publisher`` and ``subscribe``.
        name: Name of the node, which is also the id of the bond.
        broken: Called with the reason, on its own thread, when a manager that has answered before is silent for
            longer than its announced timeout, or ends the bond.
    """

    def __init__(self, transport: Any, name: str, broken: Callable[[str], None]):
        self._name, self._broken = name, broken
        self._own, self._sister = "", ""  # instance ids of the node's half and of the manager's half
        self._heard, self._patience, self._left = 0.0, TIMEOUT_S, False
        self._over = threading.Event()
        self._say = transport.publisher(TOPIC, KIND)
        transport.subscribe(TOPIC, KIND, COMMAND, self._take)

    def begin(self) -> None:
        """Start to send heartbeats to the manager, because the node is active now."""
        self._own, self._sister, self._left = str(uuid.uuid4()), "", False
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(self._over,), daemon=True).start()

    def end(self) -> None:
        """Announce that the node is not active any more. The method does not wait for an answer."""
        if self._own and not self._over.is_set():
            self._over.set()
            self._tell(False)

    def _tell(self, active: bool) -> None:
        stamp = time_of(time.monotonic())
        about = {"id": self._name, "instance_id": self._own, "active": active}
        times = {"heartbeat_timeout": TIMEOUT_S, "heartbeat_period": PERIOD_S}
        self._say({"header": {"stamp": stamp, "frame_id": ""}, **about, **times})

    def _take(self, message: Any) -> None:
        if message.id != self._name or message.instance_id == self._own:
            return
        if message.active and not self._sister:
            self._sister = message.instance_id
            logger.info("bond with the lifecycle manager established")
        # Ignore a message that belongs to an earlier bond of the manager.
        if message.instance_id != self._sister:
            return
        self._heard, self._patience = time.monotonic(), message.heartbeat_timeout
        self._left = not message.active

    def _run(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                self._tell(True)
            except Exception:
                logger.exception("a heartbeat of the bond could not be sent")
            silent = time.monotonic() - self._heard
            if self._sister and (self._left or silent > self._patience):
                self._broken("ended the bond" if self._left else f"sent no heartbeat for {silent:.1f} s")
                return
            over.wait(PERIOD_S)

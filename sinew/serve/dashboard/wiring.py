"""Compares the robots of requests with the training data: one line per session on the dashboard.

Only with a viewer. Every fifth answered request of a session is used, after its reply: eight by eight cells of its
frames, and its state. The result for thirty of them is computed when a viewer gets it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from sinew.bundle.schema import Manifest
from sinew.checks.wiring import Finding, WiringWatch, findings
from sinew.core import Observation

EVERY = 5  # requests
LOOKS = 30  # from which a session is judged
SESSIONS = 32  # the newest
SHOWN = 6  # findings of a session
MAX_TEXT = 300  # characters


@dataclass
class _Session:
    asked: int = 0
    running: WiringWatch = field(default_factory=lambda: WiringWatch(exact=False))
    full: WiringWatch | None = None  # waits to be judged
    found: list[Finding] = field(default_factory=list)


class Wiring:
    """What is seen of the robots of one policy. Thread-safe."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str, str], _Session] = OrderedDict()

    @classmethod
    def of(cls, manifest: Manifest) -> Wiring | None:
        """Return None if the bundle has no training record of cameras and joints."""
        return None if manifest.seen is None else cls(manifest)

    def put(self, wire: str, client: str, session: str, observation: Observation) -> None:
        """Look at an observation that was answered, if it is its turn."""
        name = wire, client, session
        with self._lock:
            found = self._sessions.get(name)
            if found is None:
                found = self._sessions[name] = _Session()
                while len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(name)
            found.asked += 1
            if (found.asked - 1) % EVERY:
                return
            found.running.add({"images": observation.images, "state": observation.state})
            if found.running.looks >= LOOKS:
                found.full, found.running = found.running, WiringWatch(exact=False)

    def report(self) -> list[dict[str, Any]]:
        """Return wire, client, session and findings of the sessions that look wrong, ready for JSON."""
        with self._lock:
            sessions = list(self._sessions.items())
        for _, each in sessions:
            if (full := each.full) is not None:
                each.full = None
                each.found = [one for one in findings(full, self._manifest) if one.amiss][:SHOWN]
        return [
            {
                **dict(zip(("wire", "client", "session"), (text[:MAX_TEXT] for text in name), strict=True)),
                "findings": [
                    {
                        "subject": one.subject,
                        "level": one.level,
                        "kind": one.kind,
                        "seen": one.seen[:MAX_TEXT],
                        "advice": one.advice[:MAX_TEXT],
                    }
                    for one in each.found
                ],
            }
            for name, each in sessions
            if each.found
        ]

    def forget(self) -> None:
        """Nobody looks any more."""
        with self._lock:
            self._sessions.clear()

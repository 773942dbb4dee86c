"""Compares the frames and states of requests with the training data. The dashboard shows the result as one line per
session.

The comparison runs only while a viewer is connected, and only after the reply. It uses every fifth answered request of
a session: the means of eight by eight cells of each frame, and the state. After thirty such requests, the findings are
computed when a viewer receives them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from sinew.bundle.schema import Manifest
from sinew.checks.wiring import Finding, WiringWatch, findings
from sinew.core import Observation

EVERY = 5  # out of this many answered requests of a session, one is compared with the training data
LOOKS = 30  # number of compared requests after which the findings of a session are computed
SESSIONS = 32  # largest number of sessions; the newest sessions are stored
SHOWN = 6  # largest number of findings of a session
MAX_TEXT = 300  # longest text on the page, characters


@dataclass
class _Session:
    answers: int = 0
    running: WiringWatch = field(default_factory=lambda: WiringWatch(exact=False))
    # Statistics of the last LOOKS compared observations. The findings are computed from them when a viewer reads the
    # report.
    full: WiringWatch | None = None
    findings: list[Finding] = field(default_factory=list)


class Wiring:
    """Compares the frames and states of a policy's robots with the policy's training data. Thread-safe."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str, str], _Session] = OrderedDict()

    @classmethod
    def of(cls, manifest: Manifest) -> Wiring | None:
        """Create the comparison for a policy. Return None if the policy's bundle has no record of its training data."""
        return None if manifest.seen is None else cls(manifest)

    def put(self, wire: str, client: str, session: str, observation: Observation) -> None:
        """Compare an answered observation with the training data. Only every ``EVERY``-th observation of a session is
        compared.

        Args:
            wire: Name of the protocol.
            client: Address of the client.
            session: Session of the request.
            observation: The observation.
        """
        name = wire, client, session
        with self._lock:
            robot = self._sessions.get(name)
            if robot is None:
                robot = self._sessions[name] = _Session()
                while len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(name)
            robot.answers += 1
            if (robot.answers - 1) % EVERY:
                return
            robot.running.add({"images": observation.images, "state": observation.state})
            if robot.running.looks >= LOOKS:
                robot.full, robot.running = robot.running, WiringWatch(exact=False)

    def report(self) -> list[dict[str, Any]]:
        """Return the sessions whose robot looks wrongly wired, as values for JSON. Each entry has the protocol, the
        client, the session and the findings.
        """
        with self._lock:
            sessions = list(self._sessions.items())
        for _, each in sessions:
            if (full := each.full) is not None:
                each.full = None
                each.findings = [one for one in findings(full, self._manifest) if one.amiss][:SHOWN]
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
                    for one in each.findings
                ],
            }
            for name, each in sessions
            if each.findings
        ]

    def forget(self) -> None:
        """Drop the statistics of all sessions, because the last viewer has disconnected."""
        with self._lock:
            self._sessions.clear()

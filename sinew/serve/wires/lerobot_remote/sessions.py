"""The sessions of LeRobot's remote inference. Everything here is touched on the wire's own thread only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from sinew.serve.job import ServingJob
from sinew.serve.transport.ledger import Account
from sinew.serve.wires.lerobot_remote.contract import Agreed, Asked
from sinew.serve.wires.lerobot_remote.envelope import Envelope, RemoteError

REMEMBERED = 128  # requests of a session, which are not answered twice


class Recent(OrderedDict[str, bytes]):
    """Answers by the name of their request; it forgets the oldest. most: how many it keeps."""

    def __init__(self, most: int = REMEMBERED):
        super().__init__()
        self.most = most

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            self.popitem(last=False)


@dataclass(slots=True)
class UnderWay:
    """A request that is being computed. size: bytes of its message, as the ledger counted them."""

    message: Envelope
    asked: Asked
    size: int
    job: ServingJob | None = None


@dataclass(slots=True)
class Control:
    """A control request that waits: for the end of an inference, or until the robot hears its answers.

    until: by the monotonic clock, when it is answered with an error; None while an inference is under way.
    """

    message: Envelope
    query: Any
    until: float | None = None


class RemoteSession(Account):
    """One robot's session.

    Attributes:
        name: Its id, in keys and envelopes.
        policy: Name of the policy that answers it, "" for the first.
        prefix: Its keys begin so.
        agreed: What it was opened with.
        generation: Of its requests; others are stale.
        sequence: Of its last observation.
        seen: Requests that were answered already.
        acks: Answers of control requests.
        act, language: Zenoh's publishers of answers.
        absent: When the robot's liveliness token went, None while it is there.
        running: The request that is being computed.
        controls: Control requests that wait.
        ready: The robot hears its answers.
    """

    def __init__(
        self, name: str, policy: str, prefix: str, agreed: Agreed, act: Any, language: Any, now: float
    ):
        super().__init__(now)
        self.since = None  # no request is arriving
        self.name, self.policy, self.prefix, self.agreed = name, policy, prefix, agreed
        self.act, self.language = act, language
        self.generation, self.sequence = 0, -1
        self.seen = Recent()
        self.acks = Recent()
        self.absent: float | None = now
        self.running: UnderWay | None = None
        self.controls: list[Control] = []
        self.ready = False

    def accept(self, message: Envelope, sequence: int) -> None:
        """Note an observation's number. Raises RemoteError for one that was there before."""
        if message.request in self.seen:
            raise RemoteError("stale", "request_id: expected a new one, got one that was answered")
        if sequence <= self.sequence:
            raise RemoteError("stale", f"sequence: expected more than {self.sequence}, got {sequence}")
        self.seen[message.request] = b""
        self.sequence = sequence

    def hears(self) -> bool:
        """Return True once the robot has subscribed to its answers."""
        return bool(self.act.matching_status.matching and self.language.matching_status.matching)

    def undeclare(self) -> None:
        for publisher in (self.act, self.language):
            publisher.undeclare()

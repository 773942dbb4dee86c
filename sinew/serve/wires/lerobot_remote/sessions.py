"""The sessions of LeRobot's remote inference. Only the thread of this protocol uses them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from sinew.serve.job import ServingJob
from sinew.serve.transport.ledger import Account
from sinew.serve.wires.lerobot_remote.contract import Agreed, CheckedRequest
from sinew.serve.wires.lerobot_remote.envelope import Envelope, RemoteError

# Largest number of answered requests that a session stores, so that no request is answered twice.
REMEMBERED = 128


class Recent(OrderedDict[str, bytes]):
    """A mapping from the id of a request to its answer, for the last ``most`` requests. The oldest answer is removed
    first.
    """

    def __init__(self, most: int = REMEMBERED):
        super().__init__()
        self.most = most

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            self.popitem(last=False)


@dataclass(slots=True)
class UnderWay:
    """A request of a robot that is being computed.

    Attributes:
        message: The envelope of the request.
        request: The checked fields of the request.
        size: Bytes of the message, which are counted as memory of the session.
        job: The job of the scheduler.
    """

    message: Envelope
    request: CheckedRequest
    size: int
    job: ServingJob | None = None


@dataclass(slots=True)
class Control:
    """A control request that waits for the end of an inference, or until the robot has subscribed to its answers.

    Attributes:
        message: The envelope of the request.
        query: Zenoh's query, which receives the answer.
        until: Time on the monotonic clock at which the request gets an error; None while an inference is in
            progress.
    """

    message: Envelope
    query: Any
    until: float | None = None


class RemoteSession(Account):
    """The session of one robot.

    Attributes:
        name: Id of the session in keys and envelopes.
        policy: Name of the policy that answers the session; "" for the first policy.
        prefix: Beginning of the session's keys.
        agreed: The agreement with which the session was opened.
        generation: Generation of the session's requests. Requests of other generations are stale.
        sequence: Number of the last observation.
        seen: Ids of the requests that were accepted already.
        acks: Id of a control request -> its answer.
        act: Zenoh's publisher of chunks.
        language: Zenoh's publisher of texts.
        absent: Time at which the robot's liveliness token disappeared; None while the token exists.
        running: The request that is being computed.
        controls: Control requests that wait.
        ready: True after the robot has subscribed to its answers.
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
        """Store the number and the id of an observation, so that it is accepted only once.

        Raises:
            RemoteError: The observation was already accepted before.
        """
        if message.request in self.seen:
            raise RemoteError("stale", "request_id: expected a new id, got the id of an answered request")
        if sequence <= self.sequence:
            raise RemoteError(
                "stale",
                f"sequence: expected more than {self.sequence}, got {sequence};"
                " number the observations of a session in order",
            )
        self.seen[message.request] = b""
        self.sequence = sequence

    def hears(self) -> bool:
        """Return True if the robot has subscribed to the keys on which its answers are published."""
        return bool(self.act.matching_status.matching and self.language.matching_status.matching)

    def undeclare(self) -> None:
        for publisher in (self.act, self.language):
            publisher.undeclare()

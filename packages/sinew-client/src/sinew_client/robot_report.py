"""The report of a robot's run that a robot sends to its server for the dashboard: encode, check and decode.

This module uses neither clocks nor sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from google.protobuf.message import DecodeError

from sinew_client import schema
from sinew_client.errors import RequestError
from sinew_client.untrusted import shown

STATES = ("starting", "moves", "holds", "paused", "aligning", "human", "returning", "ended")
LIMITS = ("range", "velocity", "acceleration", "jerk", "jump", "workspace")
MAX_BYTES = 8192  # largest size of a report, bytes
MAX_TEXT = 160  # longest name or reason, characters
MAX_COUNTS = 12  # a report has at most this many counts; the last one is the sum of all others
MAX_POINTS = 64  # largest number of points of an arm
FARTHEST = 1e3  # largest coordinate of a point, metres
LARGEST = 1 << 53  # largest number in a report


@dataclass(frozen=True)
class RobotReport:
    """The state of a robot's run. For optional fields, None means unknown.

    Attributes:
        run: Random number that identifies the run.
        state: One of :data:`STATES`.
        name: Name of the robot.
        reason: Why the robot holds; "" while it moves.
        hz: Planned control rate, Hz.
        rate_hz: Achieved control rate over the last seconds, Hz.
        rows_hz: Rate of the executed actions of the policy over the last seconds, Hz.
        age_p50_ms: Median time from the exposure of a frame to the execution of its action, ms.
        age_p95_ms: 95th percentile of this time, ms.
        steps: Number of control steps so far.
        late: Number of late ticks so far.
        skipped: Number of skipped ticks so far.
        held: Number of control steps with a hold, by reason.
        clipped_commands: Number of commands that a limit changed.
        clipped: Number of commands that each limit changed, by "joint.limit".
        limits: The kinds of limits that apply (:data:`LIMITS`).
        failed_requests: Number of failed requests.
        takeovers: Number of take-overs by a human.
        steps_by_hand: Number of control steps in which a human drove.
        episodes: Number of finished episodes.
        successes: Number of successful episodes.
        arm: Last known positions of the arm's base, joints and tip: x, y, z of each point, metres.
    """

    run: int
    state: str
    name: str = ""
    reason: str = ""
    hz: float = 0.0
    rate_hz: float = 0.0
    rows_hz: float = 0.0
    age_p50_ms: float | None = None
    age_p95_ms: float | None = None
    steps: int = 0
    late: int = 0
    skipped: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    clipped_commands: int = 0
    clipped: Mapping[str, int] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    failed_requests: int = 0
    takeovers: int = 0
    steps_by_hand: int = 0
    episodes: int | None = None
    successes: int | None = None
    arm: tuple[float, ...] = ()

    def to_message(self) -> Any:
        """Convert the report to a protobuf message. Texts and lists that are too long are cut."""
        message = schema.Report(limits=self.limits, arm=self.arm)
        for name, value in vars(self).items():
            if name in ("held", "clipped"):
                for text, count in _most(value).items():
                    getattr(message, name).add(name=text, count=count)
            elif name not in ("limits", "arm") and value is not None:
                setattr(message, name, _printable(value) if isinstance(value, str) else value)
        return message

    @classmethod
    def parse(cls, data: bytes | memoryview) -> RobotReport:
        """Decode and check a report, which may come from an untrusted client.

        Args:
            data: The encoded message.

        Returns:
            The report.

        Raises:
            RequestError: The message is too large, or a field has too many entries or characters, an invalid or
                negative number, or an unknown word. The error names the field.
        """
        message = schema.Report()
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"{len(data)} bytes")
            message.ParseFromString(bytes(data))
        except (DecodeError, ValueError) as error:  # protobuf raises ValueError for texts that are not UTF-8
            raise RequestError(
                f"report: expected a Report of at most {MAX_BYTES} bytes, got {error}"
            ) from None
        values: dict[str, Any] = {}
        for each in message.DESCRIPTOR.fields:
            name, value = each.name, getattr(message, each.name)
            if each.containing_oneof is not None and not message.HasField(name):
                continue  # an absent value means that the robot does not know the value
            values[name] = value
            if isinstance(value, str):
                _text(name, value)
            elif isinstance(value, (int, float)):
                _check(name == "run" or 0 <= value <= LARGEST, name, "a number from 0 to 2^53", value)
            elif name == "arm":
                fits = len(value) <= 3 * MAX_POINTS and len(value) % 3 == 0
                _check(fits, name, f"x, y, z of at most {MAX_POINTS} points", f"{len(value)} numbers")
                _check(all(-FARTHEST <= x <= FARTHEST for x in value), name, "metres within 1000", "others")
                values[name] = tuple(round(x, 4) for x in value)
            else:
                _check(len(value) <= MAX_COUNTS, name, f"at most {MAX_COUNTS} entries", len(value))
                if name == "limits":
                    values[name] = tuple(value)
                    continue
                values[name] = {_text(name, one.name): one.count for one in value}
                _check(len(values[name]) == len(value), name, "each name once", "one twice")
                _check(max([0, *values[name].values()]) <= LARGEST, name, "counts up to 2^53", "more")
        _check(message.state in STATES, "state", f"one of {', '.join(STATES)}", shown(message.state))
        for word in message.limits:
            _check(word in LIMITS, "limits", f"one of {', '.join(LIMITS)}", shown(word))
        won, played = values.get("successes", 0), values.get("episodes", 0)
        _check(won <= played, "successes", f"at most {played} episodes", won)
        return cls(**values)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text[:MAX_TEXT])


def _most(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the 11 largest counts by name. The entry "others" has the sum of all other counts."""
    counted: dict[str, int] = {}
    for text, count in sorted(counts.items(), key=lambda each: -each[1]):
        name = _printable(text) if len(counted) < MAX_COUNTS - 1 else "others"
        counted[name] = counted.get(name, 0) + max(0, count)
    return counted


def _check(fits: bool, name: str, expected: str, got: Any) -> None:
    if not fits:
        raise RequestError(f"report.{name}: expected {expected}, got {got}")


def _text(name: str, value: str) -> str:
    fits = len(value) <= MAX_TEXT and value.isprintable()
    _check(fits, name, f"printable text of at most {MAX_TEXT} characters", shown(value))
    return value

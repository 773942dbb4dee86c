"""What only a robot knows of its run, as a message to the server that it drives with. No clocks, no sockets here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Mapping

from google.protobuf.message import DecodeError

from sinew_client import schema
from sinew_client.errors import RequestError
from sinew_client.given import shown

STATES = ("starting", "moves", "holds", "paused", "aligning", "human", "ended")
LIMITS = ("range", "velocity", "acceleration", "jerk", "jump", "workspace")
MAX_BYTES = 8192  # of a message
MAX_TEXT = 160  # characters of a name or reason
MAX_COUNTS = 12  # reasons, or limits, that are told apart
REST = "others"
LARGEST = 1 << 53  # of a count, and of any other number


@dataclass(frozen=True)
class RobotReport:
    """How a robot's run goes, so far; ``sinew.proto`` has fields and units (``Report``).

    None: ages before there are rows, episodes of a robot that knows none.
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
    longest_gap_ms: float = 0.0
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

    def to_message(self) -> Any:
        """Return the message, its texts and lists cut to what one may have."""
        found = schema.Report()
        for name, value in vars(self).items():
            if name in ("held", "clipped"):
                for text, count in _most(value).items():
                    getattr(found, name).add(name=text, count=count)
            elif name == "limits":
                found.limits.extend(value)
            elif value is not None:
                setattr(found, name, _printable(value) if isinstance(value, str) else value)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> RobotReport:
        """Return the report of a message, which may come from anybody.

        Raises :class:`RequestError`, which names the field: for more bytes, entries or characters than there may be,
        for numbers that are not finite or below 0, and for words that are not known.
        """
        if len(data) > MAX_BYTES:
            raise RequestError(f"report: expected at most {MAX_BYTES} bytes, got {len(data)}")
        message = schema.Report()
        try:
            message.ParseFromString(bytes(data))
        except (DecodeError, ValueError) as error:  # ValueError: text that is not UTF-8
            raise RequestError(f"report: expected a message Report, got {error}") from error
        found: dict[str, Any] = {}
        for name in (each.name for each in fields(cls)):
            value = getattr(message, name)
            if name in ("held", "clipped"):
                found[name] = _counts(name, value)
            elif name == "limits":
                found[name] = tuple(_word("limits", each, LIMITS) for each in _few(name, value))
            elif isinstance(value, str):
                found[name] = _text(name, value)
            elif not _optional(name) or message.HasField(name):
                found[name] = value if name == "run" else _number(name, value)
        _word("state", found["state"], STATES)
        if (found.get("successes") or 0) > (found.get("episodes") or 0):
            raise RequestError(
                f"report.successes: expected at most {found.get('episodes') or 0} episodes, got {found['successes']}"
            )
        return cls(**found)


def _optional(name: str) -> bool:
    return name.startswith("age_") or name in ("episodes", "successes")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text[:MAX_TEXT])


def _most(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the largest counts, and the sum of what is left over under a name of its own."""
    found: dict[str, int] = {}
    for text, count in sorted(counts.items(), key=lambda each: -each[1]):
        name = _printable(text)
        name = name if name in found or len(found) < MAX_COUNTS - 1 else REST
        found[name] = found.get(name, 0) + max(0, count)
    return found


def _few(name: str, values: Any) -> Any:
    if len(values) > MAX_COUNTS:
        raise RequestError(f"report.{name}: expected at most {MAX_COUNTS} entries, got {len(values)}")
    return values


def _counts(name: str, values: Any) -> dict[str, int]:
    found = {_text(name, each.name): int(_number(name, each.count)) for each in _few(name, values)}
    if len(found) < len(values):
        raise RequestError(f"report.{name}: expected each name once, got one twice")
    return found


def _text(name: str, value: str) -> str:
    if len(value) > MAX_TEXT or not value.isprintable():
        raise RequestError(
            f"report.{name}: expected printable text of at most {MAX_TEXT} characters, got {shown(value)}"
        )
    return value


def _word(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise RequestError(f"report.{name}: expected one of {', '.join(known)}, got {shown(value)}")
    return value


def _number(name: str, value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= LARGEST):
        raise RequestError(f"report.{name}: expected a number from 0 to 2^53, got {value}")
    return value

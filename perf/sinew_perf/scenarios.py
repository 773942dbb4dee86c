"""Placement of a policy and transport of its answers: closed formulas.

Source: VLA-Perf, sections 4.7 to 4.10. Networks store and forward: latencies add, and the bytes are sent on
every hop. ``events.py`` plays the same cases out in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sinew.core import PolicySpec, SinewError

from sinew_perf.hardware import Network

Codec = Literal["raw", "jpeg", "float32"]
# Bytes per value of a camera frame. VLA-Perf assumes a JPEG compression of ten to one. The time of the codec is
# not counted.
BYTES_PER_VALUE = {"raw": 1, "jpeg": 0.1, "float32": 4}


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of an observation on its way up and of a chunk on its way down."""

    up: float
    down: float


def payload(spec: PolicySpec, codec: Codec = "raw", rows: int | None = None) -> Payload:
    """Return the bytes of this policy's observation and chunk. rows: the number of actions sent, all if None."""
    if codec not in BYTES_PER_VALUE:
        raise SinewError(f"codec: expected one of {', '.join(BYTES_PER_VALUE)}, got {codec!r}")
    values = sum(camera.height * camera.width * 3 for camera in spec.cameras)
    frames = values * BYTES_PER_VALUE[codec]
    return Payload(frames + 4 * spec.state.dim, 4 * (rows or spec.chunk_size) * spec.action.dim)


def synchronous_s(compute_s: float, size: Payload, route: Sequence[Network]) -> float:
    """Seconds from an observation to its actions at the robot."""
    there = sum(link.base_ms / 1e3 + link.up_s(size.up) for link in route)
    back = sum(link.base_ms / 1e3 + link.down_s(size.down) for link in route)
    return there + compute_s + back


def asynchronous_hz(compute_s: float, size: Payload, route: Sequence[Network]) -> float:
    """Chunks per second when the next observation is sent before the last answer is there: the slowest of compute
    and of every link, which carries one direction at a time. Base latencies delay but do not limit."""
    rates = [1 / (link.up_s(size.up) + link.down_s(size.down)) for link in route]
    return min([1 / compute_s, *rates])


def dual_system_hz(fast_s: float, slow_s: float, cap_hz: float, synchronous_hz: float) -> float:
    """System 1 with System 2 on the same machine, run ``cap_hz`` times a second: what is left of each second."""
    return max((1 - cap_hz * slow_s) / fast_s, synchronous_hz)


def split_s(
    before_s: float, after_s: float, up_bytes: float, cache_bytes: float, route: Sequence[Network]
) -> float:
    """Vision and language on a server, the action expert on the robot: the cache comes down in between."""
    return synchronous_s(before_s, Payload(up_bytes, cache_bytes), route) + after_s


@dataclass(frozen=True, slots=True)
class Staleness:
    """Age of the actions that a robot executes: seconds since the frame from which they were computed.

    Attributes:
        first_s: Age of the first executed action of a chunk.
        mean_s: Mean age of the executed actions.
        last_s: Age of the last executed action of a chunk.
        underrun: True if the chunk ends before the next chunk can arrive.
    """

    first_s: float
    mean_s: float
    last_s: float
    underrun: bool


def staleness(latency_s: float, replan: int, chunk: int, control_hz: float) -> Staleness:
    """A new chunk every ``replan`` control steps, asked for early enough to be there in time."""
    if not 1 <= replan <= chunk:
        raise SinewError(f"replan: expected 1 to the chunk's {chunk}, got {replan}")
    period = 1 / control_hz
    last = latency_s + (replan - 1) * period
    return Staleness(latency_s, (latency_s + last) / 2, last, latency_s > (chunk - replan) * period)

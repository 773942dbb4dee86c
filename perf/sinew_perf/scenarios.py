"""Formulas for the placement of a policy and the transport of its answers.

Source: VLA-Perf, sections 4.7 to 4.10. Networks store and forward: latencies add up, and the bytes are sent on every
link. ``events.py`` simulates the same cases in time.
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
    """Bytes of a request.

    Attributes:
        up: Bytes of an observation.
        down: Bytes of a chunk.
    """

    up: float
    down: float


def payload(spec: PolicySpec, codec: Codec = "raw", rows: int | None = None) -> Payload:
    """Return the bytes of a policy's observation and chunk.

    Args:
        spec: Specification of the policy.
        codec: Encoding of the camera frames.
        rows: Number of actions that are sent. None for the whole chunk.
    """
    if codec not in BYTES_PER_VALUE:
        raise SinewError(f"codec: expected one of {', '.join(BYTES_PER_VALUE)}, got {codec!r}")
    values = sum(camera.height * camera.width * 3 for camera in spec.cameras)
    frames = values * BYTES_PER_VALUE[codec]
    return Payload(frames + 4 * spec.state.dim, 4 * (rows or spec.chunk_size) * spec.action.dim)


def synchronous_s(compute_s: float, size: Payload, route: Sequence[Network]) -> float:
    """Return the seconds from an observation to its actions at the robot, if the robot waits for each answer.

    Args:
        compute_s: Time of an inference, in seconds.
        size: Bytes of an observation and of a chunk.
        route: Links between robot and machine.
    """
    there = sum(link.base_ms / 1e3 + link.up_s(size.up) for link in route)
    back = sum(link.base_ms / 1e3 + link.down_s(size.down) for link in route)
    return there + compute_s + back


def asynchronous_hz(compute_s: float, size: Payload, route: Sequence[Network]) -> float:
    """Return the number of chunks per second if the robot sends the next observation before the last answer has
    arrived.

    The slowest of computing and of each link limits the rate. A link carries one direction at a time. Base latencies
    do not limit the rate.
    """
    rates = [1 / (link.up_s(size.up) + link.down_s(size.down)) for link in route]
    return min([1 / compute_s, *rates])


def dual_system_hz(fast_s: float, slow_s: float, cap_hz: float, synchronous_hz: float) -> float:
    """Return the rate of System 1 while System 2 runs ``cap_hz`` times per second on the same machine: System 1 uses
    the remaining time.

    Args:
        fast_s: Time of a run of System 1, in seconds.
        slow_s: Time of a run of System 2, in seconds.
        cap_hz: Runs of System 2 per second.
        synchronous_hz: The rate if both systems run one after the other. The result is at least this rate.
    """
    return max((1 - cap_hz * slow_s) / fast_s, synchronous_hz)


def split_s(
    before_s: float, after_s: float, up_bytes: float, cache_bytes: float, route: Sequence[Network]
) -> float:
    """Return the latency if vision and language run on a server and the action head on the robot. The cache is sent to
    the robot.

    Args:
        before_s: Time of vision and language on the server, in seconds.
        after_s: Time of the action head on the robot, in seconds.
        up_bytes: Bytes of an observation.
        cache_bytes: Bytes of the cache (the prefix's keys and values).
        route: Links between robot and server.
    """
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
    """Return the age of the executed actions, for a new chunk in every ``replan`` control steps that always arrives
    in time.

    Args:
        latency_s: Seconds from frame to chunk.
        replan: Number of actions executed per chunk.
        chunk: Number of actions in a chunk.
        control_hz: Control steps per second.

    Raises:
        SinewError: ``replan`` is larger than the chunk.
    """
    if not 1 <= replan <= chunk:
        raise SinewError(f"replan: expected 1 to the chunk's {chunk}, got {replan}")
    period = 1 / control_hz
    last = latency_s + (replan - 1) * period
    return Staleness(latency_s, (latency_s + last) / 2, last, latency_s > (chunk - replan) * period)

"""Compare placements of a policy: on the robot, on a server, split, and as two systems, each synchronous and
asynchronous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinew.core import CameraSpec, PolicySpec, VectorSpec
from sinew.policy import open_bundle

from sinew_perf import events, scenarios
from sinew_perf.cuts import crossing
from sinew_perf.hardware import Hardware, Network
from sinew_perf.memory import missing, too_large
from sinew_perf.program import PublishedProgram, is_sizes_alone
from sinew_perf.roofline import timing

STAGES = ("vision", "language", "action")


@dataclass(frozen=True)
class Placements:
    """The placements of a policy (on the robot, on a server, or divided) that were compared.

    Attributes:
        rows: Rows of a table, with milliseconds and rates.
        bars: Bars of a figure. Each bar is (name, milliseconds of each part by name).
        size: Bytes of a request and of its answer.
        cache: Bytes that the head reads from earlier stages, mostly the prefix's keys and values.
        every: Control steps between two requests.
    """

    rows: list[dict[str, Any]]
    bars: list[tuple[str, dict[str, float]]]
    size: scenarios.Payload
    cache: int
    every: int


def placements(
    source: str,
    program: PublishedProgram,
    far: Hardware,
    near: Hardware,
    route: Sequence[Network],
    *,
    codec: scenarios.Codec,
    control_hz: float,
    replan: int | None,
    cap_hz: float,
    camera_ms: float = 0.0,
    actuation_ms: float = 0.0,
) -> Placements:
    """Predict the latency of a policy on the robot, on a server, and divided between both.

    If the memory of a machine is too small, the row contains the reason.

    Args:
        source: The policy.
        program: Its program.
        far: The server.
        near: The robot's machine.
        route: Links between both.
        codec: Encoding of the camera frames.
        control_hz: Control steps per second.
        replan: Number of actions executed per request. None for half a chunk.
        cap_hz: Maximum rate of System 2, for the placements with two systems.
        camera_ms: Milliseconds from light to a frame in memory.
        actuation_ms: Milliseconds from a command to its effect.
    """
    parts = program.components()
    size, chunk, between = payload(source, program, codec), program.chunk, crossing(program)
    cache = between["vision", "head"] + between["prefix", "head"]
    there, here = ([timing(part, machine).seconds for part in parts] for machine in (far, near))
    every = replan or max(1, chunk // 2)
    rows: list[dict[str, Any]] = []
    bars: list[tuple[str, dict[str, float]]] = []

    def bar(where: str, latency_s: float, *stages: float) -> None:
        """Add a bar to the figure. The part of the latency that is not spent on computing counts as network time.

        Args:
            where: Name of the bar.
            latency_s: Total latency, in seconds.
            *stages: Computing time of each stage, in seconds.
        """
        taken = {name: 1e3 * stage for name, stage in zip(STAGES, stages, strict=True)}
        bars.append((where, {"network": max(0.0, 1e3 * (latency_s - sum(stages))), **taken}))

    def add(where: str, stages: Sequence[float], hops: Sequence[Network]) -> None:
        compute_s = sum(stages)
        latency = scenarios.synchronous_s(compute_s, size, hops)
        bar(where, latency, *stages)
        played = events.asynchronous(
            compute_s, size, hops, control_hz=control_hz, chunk=chunk, replan=every, duration_s=30
        )
        rate = scenarios.asynchronous_hz(compute_s, size, hops)
        # The policy cannot answer more often than this.
        steps = min(chunk, max(every, math.ceil(control_hz / rate - 1e-9)))
        stale = scenarios.staleness(latency, steps, chunk, control_hz)
        rows.append(
            {
                "where": where,
                "latency_ms": 1e3 * latency,
                "sync_hz": 1 / latency,
                "async_hz": rate,
                "age_p95_ms": 1e3 * played.age_p95_s + camera_ms,
                "age_bound_ms": 1e3 * stale.last_s + camera_ms,
                # An event just after one frame is visible only in the frame of the next request.
                "reaction_ms": 1e3 * (steps / control_hz + latency) + camera_ms + actuation_ms,
                "underruns": f"{played.underruns}/{played.steps}",
            }
        )

    def refused(where: str, *placed: tuple[str, int]) -> bool:
        """Check the memory of machines. If it is too small, add a row with the reason to the table, and return True.

        Args:
            where: Name of the row.
            *placed: For each machine, its name and the number of missing bytes.
        """
        short = [f"the {name} {too_large(nbytes)}" for name, nbytes in placed if nbytes]
        if short:
            nbytes = max(nbytes for _, nbytes in placed)
            rows.append({"where": where, "fits": False, "missing_bytes": nbytes, "why": "; ".join(short)})
        return bool(short)

    whole = {"robot": missing(program, near), "server": missing(program, far)}
    if not refused("robot", ("robot", whole["robot"])):
        add("robot", here, [])
    if not refused("server", ("server", whole["server"])):
        add("server", there, route)
    *before, last = (part.name for part in parts)
    if not refused(
        "split", ("robot", missing(program, near, (last,))), ("server", missing(program, far, before))
    ):
        split = scenarios.split_s(there[0] + there[1], here[2], size.up, cache, route)
        bar("split", split, there[0], there[1], here[2])
        rows.append({"where": "split", "latency_ms": 1e3 * split, "sync_hz": 1 / split})
    for where, stage, hops in (("robot", here, []), ("server", there, route)):
        fast, slow = stage[0] + stage[2], stage[1]
        # Without a slow part, the policy has no language model that could run as System 2 (the slow reasoning part).
        if not slow:
            continue
        if refused(f"dual, {where}", (where, whole[where])):
            continue
        once = scenarios.synchronous_s(fast, size, hops)
        bar(f"dual, {where}: System 1", once, stage[0], 0.0, stage[2])
        dual = events.dual_system(fast, slow, cap_hz, network_s=once - fast)
        rows.append(
            {
                "where": f"dual, {where}",
                "latency_ms": 1e3 * once,
                "sync_hz": dual.fast_hz,
                "age_bound_ms": 1e3 * dual.plan_age_max_s + camera_ms,
            }
        )
    return Placements(rows, bars, size, cache, every)


def payload(source: str, program: PublishedProgram, codec: scenarios.Codec) -> scenarios.Payload:
    """Return the bytes of a policy's request and answer. A preset without a bundle is assumed to have 14 joints."""
    if not is_sizes_alone(source):
        return scenarios.payload(open_bundle(source).manifest.spec, codec)
    shapes = program.shapes
    cameras = tuple(CameraSpec(str(n), shapes.height, shapes.width) for n in range(shapes.views))
    joints = VectorSpec(14)
    spec = PolicySpec(source, source, cameras, joints, joints, program.chunk, 32, shapes.steps, shapes.tokens)
    return scenarios.payload(spec, codec)

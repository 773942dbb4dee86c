"""Open what drives a robot by chunks, for ``sinew run``: its flags, a policy, and the loop over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from sinew_client.control import Adapter, Loop, Settings, choose
from sinew_client.control.defaults import HANDOVER, REPLAN, Choice
from sinew_client.control.requester import Call
from sinew_client.history import History

from sinew.cli.options import Count, Flag, Positive, Runs, motion_of
from sinew.cli.run_connection import (
    ASSIST_TIMEOUT,
    ASSIST_WHEN,
    TIMEOUT,
    check_guidance,
    conditioned,
    open_connection,
)
from sinew.cli.run_leader import EnvelopeFlags, LeaderFlags
from sinew.cli.run_robot import Driven, RobotFlags
from sinew.core import SinewError


@Parameter(name="*", group="Chunks")
@dataclass(frozen=True)
class ChunkFlags:
    """How chunks are asked for and executed.

    Attributes:
        substeps: commands per control step, for faster actuators; they are interpolated.
        handover: auto, freeze, naive, aligned, ensemble[:M], ensemble:cosine[:ALPHA[:CHUNKS]], aggregate[:MIX] or
            rtc[:GUIDANCE[:SCHEDULE[:BETA]]]; +halt:LIMIT behind one stops the robot where a late chunk expects it
            elsewhere. auto: aligned where actions are targets (--motion, or the policy itself, says so), else freeze;
            the choice is printed with its reason.
        replan: when to ask: STEPS, full, queue:FRACTION (at most this part of a chunk is left) or
            disagreement:LIMIT,STEPS.
        max_age: seconds after its frame beyond which a row is not executed.
        timeout: seconds to wait for an answer; if absent, 2, and 10 for the server's first answer.
        finish: after a failed request, execute the rows at hand instead of holding at once.
        future: tell the policy the state that the robot will have when the answer arrives.
        edge_adapter: a file; a small network that refines the newest chunk in every control step (docs/fleet.md).
        split: address of a server's context.FORM, which computes vision and prefix of the bundle whose head runs here.
        assist: address of a larger policy that is asked beside the one that is loaded here.
        assist_when: every:SECONDS since its last answer, disagreement:LIMIT, uncertainty:LIMIT; separated by commas.
        assist_timeout: seconds to wait for it.
        frames_as: how frames travel to a server: raw; a JPEG quality from 1 to 95; or auto, JPEG 90 where requests
            spend more than 50 ms on the network and it helps. What was sent, and why, is in the report.
        go: begin at once, also with a keyboard.
        advantage: that the prompt of each request shall state, as positive; '' for none, the policy's usual one if
            absent.
        guidance_scale: of classifier-free guidance towards it, 0 to 100; 1, the advantage alone, if absent.
    """

    substeps: Count = 1
    handover: str = HANDOVER
    replan: str = REPLAN
    max_age: float | None = None
    timeout: Positive = TIMEOUT
    finish: Flag = False
    future: Flag = False
    edge_adapter: Path | None = None
    split: str | None = None
    assist: str | None = None
    assist_when: str = ASSIST_WHEN
    assist_timeout: Positive = ASSIST_TIMEOUT
    frames_as: str = "raw"
    go: Flag = False
    advantage: str | None = None
    guidance_scale: float | None = None


CHUNKS = ChunkFlags()


@dataclass(frozen=True)
class Rig:
    """A policy that is open, and the robot as it drives it. about: what is said of what runs it. server: where a
    ``Reporter`` tells how the run goes. frames: how they travel there, None of a policy here."""

    policy: dict[str, Any]
    about: dict[str, Any]
    connect: Callable[[], Call]
    server: Any
    frames: Any
    robot: Driven
    settings: Settings
    chosen: Choice
    edge: Adapter | None

    def loop(self, machine: Any, connect: Callable[[], Call], **more: Any) -> Loop:
        """Return a loop over the robot, or over what stands before it. more: of :class:`Loop`."""
        history = History.of(self.policy)
        return Loop(
            machine, connect, self.settings, self.robot.dim, self.robot.prompt, adapter=self.edge,
            history=history, **more,
        )  # fmt: skip


def open_rig(
    target: str,
    on: RobotFlags,
    by: ChunkFlags,
    lead: LeaderFlags,
    envelope: EnvelopeFlags,
    runs: Runs,
    key: str,
    robot_of: Callable[[dict[str, Any]], Driven],
) -> Rig:
    """Open a policy for a robot. robot_of: what the policy says of itself -> the robot, open."""
    edge = None if by.edge_adapter is None else Adapter.read(by.edge_adapter)
    policy, about, connect = open_connection(target, runs, by.split, key, by.frames_as, by.timeout)
    server, sending = connect, getattr(connect, "frames", None)
    connect = conditioned(connect, about, by.advantage, by.guidance_scale)
    robot = robot_of(policy)
    own = getattr(robot.machine, "motion", None)
    try:
        chosen = choose(by.handover, motion_of(on.motion), policy, edge is not None, own, by.replan)
    except ValueError as error:
        raise SinewError(f"--{error}") from error
    check_guidance(chosen.handover, policy, about)
    if edge is not None:
        edge.check(policy, robot.rate)
    settings = Settings(
        hz=robot.rate, handover=chosen.handover, replan=chosen.replan, motion=chosen.motion,
        limits=lead.limits(robot, chosen.motion, policy), max_age=by.max_age, deadline=by.timeout,
        stale=on.stale, finish=by.finish, future=by.future, substeps=by.substeps,
        committed_rows=int(policy.get("committed_rows") or 0),
        refine=0 if edge is None else edge.form.max_age,
        # A far policy's chunks may be longer, and nobody knows them while it is not there.
        chunk_size=0 if by.assist is not None else int(policy.get("chunk_size") or 0), watchdog=on.watchdog,
        **envelope.settings(),
    )  # fmt: skip
    settings.check_start(robot.dim, policy["state"].get("dim"))
    return Rig(policy, about, connect, server, sending, robot, settings, chosen, edge)

"""Opens a policy for ``sinew run``, and prepares the run in which it drives a robot with chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from sinew_client.control import Adapter
from sinew_client.control.defaults import HANDOVER, REPLAN
from sinew_client.control.requester import Call
from sinew_client.control.run import Run, RunPlan

from sinew.cli.options import Count, Flag, Positive, Runs, Setting
from sinew.cli.run_connection import (
    ASSIST_TIMEOUT,
    ASSIST_WHEN,
    TIMEOUT,
    check_guidance,
    conditioned,
    open_connection,
)
from sinew.cli.run_leader import EnvelopeFlags, LeaderFlags
from sinew.cli.run_robot import RobotFlags, plan_run


@Parameter(name="*", group="Chunks")
@dataclass(frozen=True)
class ChunkFlags:
    """How Sinew requests and executes chunks of actions.

    Attributes:
        substeps: Commands in each control step, for faster actuators. Sinew interpolates them.
        handover: Chunk merging: auto, freeze (wait), naive (no compensation), aligned (latency-compensated),
            ensemble, aggregate or rtc. The page "Late answers" explains them and their options. auto takes aligned if
            the actions are targets, otherwise freeze, and prints the reason.
        replan: When to request the next chunk: STEPS, full, queue:FRACTION (at most this part of a chunk is left) or
            disagreement:LIMIT,STEPS.
        max_age: Maximum age of an action after its frame, in seconds. Older actions are not executed.
        timeout: Seconds to wait for an answer. Default: 2, and 10 for the server's first answer.
        finish: Execute the remaining actions after a failed request, instead of holding at once.
        future: Send the state that the robot will have when the answer arrives.
        edge_adapter: File with a small network that refines the newest chunk in every control step.
        split: Address of a server that computes vision and prefix, while the head runs here. Start the server with
            --context, and use its address of the form context.FORM.
        assist: Address of a larger policy that is requested in addition to the policy that runs here.
        assist_when: When to request the larger policy: every:SECONDS since its last answer, disagreement:LIMIT,
            uncertainty:LIMIT, separated by commas.
        assist_timeout: Seconds to wait for an answer of the larger policy.
        frames_as: Encoding of frames for a server: raw, a JPEG quality from 1 to 95, or auto. auto takes JPEG 90 if
            requests spend more than 50 ms on the network and JPEG helps. The report states the choice and the
            reason.
        refresh: When a camera's newest frame is needed, for a server with --reuse: CAMERA:every:N, CAMERA:change:LIMIT
            or CAMERA:never, separated by commas. Otherwise the request contains the older frame again, whose features
            the server has stored.
        go: Begin at once, even if there is a keyboard.
        advantage: Advantage label to put into each prompt, for example positive. An empty value states none. Default:
            the policy's usual label.
        guidance_scale: Scale of classifier-free guidance towards the advantage, 0 to 100. Default: 1, the prompt with
            the advantage alone.
    """

    substeps: Setting[Count] = 1
    handover: str = HANDOVER
    replan: str = REPLAN
    max_age: Setting[float | None] = None
    timeout: Positive = TIMEOUT
    finish: Setting[Flag] = False
    future: Setting[Flag] = False
    edge_adapter: Setting[Path | None] = None
    split: Setting[str | None] = None
    assist: Setting[str | None] = None
    assist_when: Setting[str] = ASSIST_WHEN
    assist_timeout: Setting[Positive] = ASSIST_TIMEOUT
    frames_as: Setting[str] = "raw"
    refresh: Setting[str] = ""
    go: Setting[Flag] = False
    advantage: Setting[str | None] = None
    guidance_scale: Setting[float | None] = None


CHUNKS = ChunkFlags()


@dataclass(frozen=True)
class RunContext:
    """An open policy, and the plan with which it drives the robot.

    Attributes:
        plan: The plan.
        about: Description of the policy's server or engine.
        connect: Opens a connection for requests.
        server: The source of the server's present address, for reports.
        frames: Encoding of the frames for a server; None for a policy that computes here.
        edge: The adapter that refines chunks in every control step, if any.
    """

    plan: RunPlan
    about: dict[str, Any]
    connect: Callable[[], Call]
    server: Any
    frames: Any
    edge: Adapter | None

    def run(self, connect: Callable[[], Call], **more: Any) -> Run:
        """Create a run of the plan. ``more`` are further arguments of :class:`Run`."""
        return Run(self.plan, connect, server=self.server, edge=self.edge, **more)


def open_rig(
    target: str,
    on: RobotFlags,
    by: ChunkFlags,
    lead: LeaderFlags,
    envelope: EnvelopeFlags,
    runs: Runs,
    key: str,
    robot_of: Callable[[dict[str, Any]], Any],
) -> RunContext:
    """Open a policy for a robot.

    Args:
        robot_of: Opens the robot, given the policy's description.
    """
    edge = None if by.edge_adapter is None else Adapter.read(by.edge_adapter)
    policy, about, connect = open_connection(target, runs, by.split, key, by.frames_as, by.timeout)
    server, sending = connect, getattr(connect, "frames", None)
    connect = conditioned(connect, about, by.advantage, by.guidance_scale)
    robot = robot_of(policy)
    settings = on.chosen(policy) | envelope.settings() | {
        "handover": by.handover,
        "replan": by.replan,
        "max_age": by.max_age,
        "deadline": by.timeout,
        "finish": by.finish,
        "future": by.future,
        "substeps": by.substeps,
    }  # fmt: skip
    if by.assist is not None:
        settings["chunk_size"] = (
            0  # unknown, because the far policy's chunks may be longer, and it may start later
        )
    plan = plan_run(policy, robot, settings, on.prompt, edge=edge, takeover=lead.wanted)
    check_guidance(plan.choice.handover, policy, about)
    return RunContext(plan, about, connect, server, sending, edge)

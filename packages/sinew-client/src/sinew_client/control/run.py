"""Assemble the control loop of a run from a policy, a robot and the user's settings.

The command line, :func:`sinew.run`, the evaluation, the ROS node and the LeRobot plugin all use :class:`Run`. So the
same policy on the same robot always has the same limits, control rate, chunk merging and action prefix.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence, Union

from sinew_client.control.defaults import AUTO, REPLAN, Choice, choose, stated
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import Robot, Source
from sinew_client.control.journal import Journal
from sinew_client.control.listeners.earlier import Earlier
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.loop import Loop
from sinew_client.control.motion import parse_motion
from sinew_client.control.pace import Pace
from sinew_client.control.report import Cadence
from sinew_client.control.requester import Call
from sinew_client.control.rest import RestPose, rest_of
from sinew_client.control.safety import Limits
from sinew_client.control.servers import Servers
from sinew_client.control.settings import LARGEST_CHUNK, Settings, SettingsError
from sinew_client.history import History
from sinew_client.protocol import MAX_ROWS

if TYPE_CHECKING:
    from sinew_client.control.adapter import Adapter

Sources = Union[Source, Callable[[], Call]]
# These settings are derived from the policy. A user cannot choose the first two of these settings.
FOLLOWS = ("committed_rows", "refine", "chunk_size")


@dataclass(frozen=True)
class RunPlan:
    """All settings of a run, resolved before the robot moves.

    Attributes:
        policy: The policy's description: ``metadata()["policy"]`` of a server, or ``spec.to_dict()``.
        robot: The robot.
        facts: Optional facts about the robot, such as its joint names.
        settings: All settings of the controller.
        choice: The method of chunk merging, and the reason for it.
        prompt: The first instruction; "" if the robot's observations contain the instruction.
        dim: Number of values in a command (D); 0 if the policy does not state it.
        names: Names of the values of "state" and "action"; [] if neither the policy nor the robot names them.
        also: The policy's own limits, if the user chose other limits. The return to the rest pose respects both.
        fixed_prompt: True if the user chose the instruction for all episodes.
        notes: Notes for the user before the robot moves, one sentence each.
    """

    policy: Mapping[str, Any]
    robot: Robot
    facts: RobotFacts
    settings: Settings
    choice: Choice
    prompt: str
    dim: int
    names: Mapping[str, list[str]]
    fixed_prompt: bool = False
    notes: tuple[str, ...] = ()
    also: Limits | None = None

    @classmethod
    def of(
        cls,
        policy: Mapping[str, Any],
        robot: Robot,
        settings: Mapping[str, Any] | None = None,
        *,
        prompt: str | None = "",
        edge: Adapter | None = None,
        takeover: bool = False,
    ) -> RunPlan:
        """Derive all settings of a run from a policy, a robot, and the settings that the user chose.

        Args:
            policy: The policy's description.
            robot: The robot.
            settings: Fields of :class:`Settings` that the user chose. ``limits`` is a mapping or :class:`Limits`. If
                it is absent or None, the policy's own limits apply. {} sets no limits. If ``hz`` is absent, the robot's
                or the policy's rate is used.
            prompt: The instruction for all episodes. "" takes the robot's instruction, or else the policy's. None
                takes the instruction of the observations.
            edge: An adapter that refines chunks in every control step.
            takeover: True if a human may take over. The report then always contains the largest step at a change of the
                driver, even without limits.

        Returns:
            The plan. The robot has not moved, and no connection is open.

        Raises:
            SettingsError: A setting is missing, unknown, or does not fit the policy. The message begins with its
                name.
            LimitsError: The limits do not fit the policy's actions.
        """
        user = dict(settings or {})
        allowed = {field.name for field in fields(Settings)} - set(FOLLOWS[:2])
        for name in user:
            if name not in allowed:
                raise SettingsError(
                    f"{name:.80}: unknown setting, expected one of {', '.join(sorted(allowed))}"
                )

        # The control rate and the instruction.
        facts = facts_of(robot)
        hz = user.get("hz") or facts.hz or policy.get("control_hz")
        if not hz:
            raise SettingsError(
                "hz: neither the policy nor the robot states a control rate; set it with --hz"
            )
        instruction, notes = _prompt(prompt, facts, policy)

        # The size of a command, and the names of its values.
        action, state = policy.get("action") or {}, policy.get("state") or {}
        dim = int(action.get("dim") or 0)
        own = {"state": list(state.get("names") or ()), "action": list(action.get("names") or ())}
        names = {part: stated_names or facts.names(part) for part, stated_names in own.items()}

        # The motion, and the method of chunk merging. A stream sends waypoints unchanged, so its motion only gives the
        # robot's position before the first command.
        continuous = bool(user.get("fusion"))
        motion = user.get("motion")
        way, replan = AUTO if continuous else user.get("handover", AUTO), user.get("replan", REPLAN)
        try:
            choice = choose(way, motion, policy, edge is not None, facts.motion, replan)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        measured = motion or stated(policy) or facts.motion
        played = measured if continuous else choice.motion

        # The limits.
        limits = _limits(user.get("limits"), policy, dim, names["action"])
        also = _limits(None, policy, dim, names["action"]) if user.get("limits") else None
        notes += _joint_notes(facts, names["action"], own["action"], limits, dim)

        # The rest pose.
        motion_at_end = parse_motion(
            None if continuous and (played or {}).get("kind") == "relative" else played
        )
        rest, rest_notes = rest_of(user.get("rest"), facts, motion_at_end, limits, names["action"], dim)

        # All settings: those that follow from the above replace the user's texts.
        rows = int(policy.get("chunk_size") or 0)
        derived: dict[str, Any] = {
            "hz": float(hz),
            "motion": played,
            "limits": _measured(limits, measured, names["action"], dim) if takeover else _plain(limits),
            "rest": rest,
            "chunk_size": user.get("chunk_size", _window(rows, policy, float(hz)) if continuous else rows),
        }
        if continuous:
            user = {name: value for name, value in user.items() if name not in ("handover", "replan")}
        else:
            derived["handover"], derived["replan"] = choice.handover, choice.replan
            derived["committed_rows"] = int(policy.get("committed_rows") or 0)
            derived["refine"] = 0 if edge is None else edge.form.max_age
        resolved = Settings(**{**user, **derived})

        # Find settings that do not fit before the robot moves. Creating a controller checks most of them.
        if edge is not None and dim:
            edge.check(policy, resolved.hz)
        resolved.check_start(dim, state.get("dim"))
        if dim:
            resolved.controller(dim)
        return cls(
            policy=policy,
            robot=robot,
            facts=facts,
            settings=resolved,
            choice=choice,
            prompt=instruction,
            dim=dim,
            names=names,
            fixed_prompt=bool(prompt),
            notes=(*notes, *rest_notes),
            also=also,
        )


def _window(rows: int, policy: Mapping[str, Any], hz: float) -> int:
    """Compute the largest number of waypoints in a window of a stream. This is the number of actions in a whole chunk,
    converted to the robot's rate.

    Args:
        rows: Number of actions in a chunk.
        policy: The policy's description.
        hz: The robot's control rate, Hz.
    """
    own = float(policy.get("control_hz") or hz)
    return max(MAX_ROWS, min(math.ceil(rows * max(1.0, hz / own)) + 1, LARGEST_CHUNK))


def _prompt(prompt: str | None, facts: RobotFacts, policy: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Choose the first instruction, and write a note if it replaces the robot's own instruction.

    Raises:
        SettingsError: Neither the policy nor the robot has an instruction.
    """
    if prompt is None:
        return "", ()
    own = facts.task()
    chosen = prompt or own or str(policy.get("default_prompt") or "")
    if not chosen:
        raise SettingsError(
            "prompt: neither the policy nor the robot has an instruction; set it with --prompt"
        )
    if prompt and own and prompt != own:
        return (
            chosen,
            (f"prompt: {prompt!r} replaces the environment's own instruction {own!r} in every episode",),
        )
    return chosen, ()


def _limits(
    chosen: Mapping[str, Any] | Limits | None, policy: Mapping[str, Any], dim: int, names: Sequence[str]
) -> Limits | None:
    """Return the limits of a run in the order of ``names``: the user's limits, or else the policy's own limits.

    Args:
        chosen: The user's limits; None if the user chose none.
        policy: The policy's description.
        dim: Number of values in a command (D).
        names: Names of the values in a command.
    """
    if isinstance(chosen, Limits):
        limits: Limits | None = chosen
    elif chosen is None:
        limits = Limits.from_metadata(policy) if dim else None
    else:
        limits = Limits.parse(chosen, dim) if chosen else None
    return None if limits is None else limits.ordered(names)


def _plain(limits: Limits | None) -> dict[str, Any] | None:
    return None if limits is None else limits.to_dict()


def _measured(
    limits: Limits | None, motion: Mapping[str, Any] | None, names: Sequence[str], dim: int
) -> dict[str, Any]:
    """Return the limits as plain values, with the command of a standing robot (``still``) added if it is missing.

    A take-over needs limits, even without any bounds: with them, the controller measures the step between the last
    command before a change of the driver and the first command after it.
    """
    plain = dict(_plain(limits) or {"names": list(names)})
    if not any(value is not None for value in plain.get("still") or ()):
        still = parse_motion(motion).still(dim)
        plain["still"] = [None if value != value else float(value) for value in still]
    return plain


def _joint_notes(
    facts: RobotFacts, names: Sequence[str], own: Sequence[str], limits: Limits | None, dim: int
) -> tuple[str, ...]:
    """Write notes for the user of a physical robot: about the order of its joints, and about missing speed limits.

    Args:
        facts: The robot's facts.
        names: Names of the values in a command.
        own: Names of the joints that the policy itself states.
        limits: The limits of the run; None if there are none.
        dim: Number of values in a command (D).
    """
    if not facts.physical or facts.bounds_speed or not dim:
        return ()
    notes = []
    if names and not own:
        notes.append(
            f"joints {', '.join(names)}: in the robot's order, because the policy does not name its joints"
        )
    if free := ", ".join((limits or Limits.parse({"names": list(names)}, dim)).unpaced()):
        notes.append(f"limits: no speed limit for {free}; set velocity in --limits FILE")
    return tuple(notes)


class Run:
    """A run: a policy that drives a robot. Create it with :meth:`open`.

    Attributes:
        plan: All settings, and the reasons for the automatic choices.
        loop: The control loop, for pause, resume and a new instruction.
        rest: The listener that returns the robot to its rest pose.
        server: An object whose ``present`` is the server's address, for a :class:`Reporter`; None without a server.
    """

    def __init__(
        self,
        plan: RunPlan,
        source: Sources,
        *,
        robot: Robot | None = None,
        server: Any = None,
        edge: Adapter | None = None,
        listeners: Sequence[LoopListener] = (),
        pace: Pace | None = None,
        hold_refused: bool = False,
    ):
        """Assemble the loop of a plan.

        Args:
            plan: The result of :meth:`RunPlan.of`.
            source: A source of actions, or a function that opens a connection for requests.
            robot: The robot for the loop; None takes the plan's robot. It may be a wrapper around that robot.
            server: An object whose ``present`` is the server's address, for reports.
            edge: The adapter of the plan.
            listeners: Further parts of the loop, such as a take-over. They are called after the policy's history and
                the adapter.
            pace: See :class:`Loop`.
            hold_refused: See :class:`Loop`.
        """
        self.plan, self.server = plan, server
        own: list[LoopListener] = []
        if (history := History.of(plan.policy)).moments > 1:
            own.append(Earlier(history))
        if edge is not None:
            from sinew_client.control.listeners.refinement import Refinement

            own.append(Refinement(edge))
        self.loop = Loop(
            plan.robot if robot is None else robot,
            source,
            plan.settings,
            plan.dim,
            plan.prompt,
            pace,
            (*own, *listeners, rest := RestPose(plan.settings, plan.dim, plan.facts, plan.also)),
            hold_refused,
        )
        self.rest = rest
        self._stack = ExitStack()
        self._stack.callback(self.loop.close)
        if (episodes := plan.facts.episodes) is not None:
            fixed = plan.fixed_prompt
            episodes.on_episode = lambda reason, prompt="": self.loop.restart(reason, "" if fixed else prompt)

    @classmethod
    def open(
        cls,
        policy: Any,
        robot: Robot,
        settings: Mapping[str, Any] | None = None,
        *,
        prompt: str | None = "",
        api_key: str = "",
        source: Sources | None = None,
        edge: Adapter | None = None,
        takeover: Callable[[RunPlan], Sequence[LoopListener]] | None = None,
        listeners: Sequence[LoopListener] = (),
        pace: Pace | None = None,
        hold_refused: bool = False,
    ) -> Run:
        """Open a run: derive its settings and assemble its loop. The robot does not move before you call :meth:`run`.

        Args:
            policy: The address of a server ("tcp://host:port", or a list of addresses), an open policy, or a policy's
                description together with ``source``.
            robot: The robot, with the methods observe, act and hold.
            settings: Fields of :class:`Settings` that you choose, such as ``{"hz": 30, "limits": {...}}``. All other
                settings follow from the policy and the robot.
            prompt: The instruction; see :meth:`RunPlan.of`.
            api_key: Key of the server.
            source: The source of actions, if ``policy`` is a description.
            edge: An adapter that refines chunks in every control step.
            takeover: A function that creates the listeners for a human driver from the plan
                (:class:`sinew_client.arm.takeover.Takeover`).
            listeners: Further parts of the loop.
            pace: See :class:`Loop`.
            hold_refused: See :class:`Loop`.

        Returns:
            The run. Close it, or use it in a ``with`` block.

        Raises:
            SettingsError: See :meth:`RunPlan.of`.
            LimitsError: See :meth:`RunPlan.of`.
            ClientError: The server cannot be reached, or rejects the request.

        Example:
            >>> with Run.open("tcp://server:5555", Arm(), {"limits": {"velocity": 1.5}}, prompt="stack cups") as run:
            ...     print(run.plan.choice)
            ...     report = run.run()
        """
        description, opener, server = _opened(policy, source, api_key)
        plan = RunPlan.of(
            description, robot, settings, prompt=prompt, edge=edge, takeover=takeover is not None
        )
        return cls(
            plan,
            opener,
            server=server,
            edge=edge,
            listeners=(*(() if takeover is None else takeover(plan)), *listeners),
            pace=pace,
            hold_refused=hold_refused,
        )

    def journal(self, path: Path, **head: Any) -> None:
        """Write the decision log of this run to a new file.

        Args:
            path: The file; it must not exist yet.
            **head: Further entries of the first line in addition to the settings, such as the robot's name.
        """
        journal = Journal(path, self.plan.settings, self.plan.dim, prompt=self.plan.prompt, **head)
        self._stack.callback(journal.close)
        self.loop.controller.listeners.append(journal.put)

    def report_to(self, server: Any, name: str, api_key: str = "", session: str = "") -> None:
        """Send the state of the run to a server once a second.

        Args:
            server: A ``Servers`` or ``StreamLink``, whose attribute ``present`` is the server's address.
            name: Name of the robot on the dashboard.
            api_key: Key of the server.
            session: Session of the robot, if it has a stream.
        """
        from sinew_client.control.reporter import Reporter

        self._stack.enter_context(Reporter(self.loop, server, api_key, session, name, facts=self.plan.facts))

    def run(self, steps: int | None = None) -> Cadence:
        """Drive the robot. The robot holds at the end of the run, even after an error.

        Then the robot returns to its rest pose (``Settings.rest``) and holds there. If its state is unknown, if a
        person commands it, or if the run is paused, it does not return and holds where it is.

        Args:
            steps: Number of control steps since the start of the run; None drives until the robot ends the run, or
                until :meth:`stop`.

        Returns:
            The report of the run so far.

        Raises:
            Refused: The policy rejected the robot's very first observation.
        """
        try:
            self.loop.run(steps)
        finally:
            self.rest.go()
        return self.loop.report()

    def stop(self) -> None:
        """End the run after the present control step. A second call also ends the return to the rest pose. Safe from
        any thread.
        """
        self.loop.stop()

    def close(self) -> None:
        """Close the connection, the decision log and the reports. Safe to call twice."""
        self._stack.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def described(policy: Any) -> Mapping[str, Any]:
    """Return the description of an open policy, including the limits of its actions if the policy states limits."""
    stated: Mapping[str, Any] = (
        policy.metadata()["policy"] if hasattr(policy, "metadata") else policy.spec.to_dict()
    )
    return stated


def _opened(policy: Any, source: Sources | None, api_key: str) -> tuple[Mapping[str, Any], Sources, Any]:
    """Open what the user passed as a policy.

    Args:
        policy: Address, addresses, open policy or description, as in :meth:`Run.open`.
        source: The source of actions, or None.
        api_key: Key of the server.

    Returns:
        The policy's description, its source of actions, and the object with the server's present address or None.

    Raises:
        SettingsError: ``policy`` is a text that is not an address.
        ClientError: The server cannot be reached, or rejects the request.
    """
    if source is not None:
        description = policy if isinstance(policy, Mapping) else described(policy)
        return description, source, source if hasattr(source, "present") else None
    from sinew_client.target import addresses_of

    if addresses := addresses_of(policy):
        from sinew_client.client import Client

        with Client(addresses, api_key=api_key) as client:
            description = client.metadata()["policy"]
        servers = Servers(addresses, api_key, policy=description)
        return description, servers, servers
    if isinstance(policy, str):
        raise SettingsError(
            f"policy: expected tcp://HOST:PORT or an open policy, got {policy!r:.80}; to open a bundle or a name, use"
            " sinew.run"
        )

    def connect() -> Call:
        return lambda observation, seconds: policy.infer(observation, timeout=seconds).actions

    return described(policy), connect, None

"""The control loop of a robot: it requests action chunks, and sends one command to the robot in each control step.

:class:`Run` assembles a :class:`Loop`, which drives a robot at a fixed rate. :class:`Controller` decides which action
belongs to which control step, and when the robot holds. It uses neither clocks nor sockets. A :class:`Source` provides
the actions: requested chunks, or a stream. :class:`SimulatedPace` runs the same loop without a clock, as Sinew's
evaluation does. The package needs only numpy.

A name of this package is imported when it is used for the first time, so a program imports only the modules it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinew_client.control.adapter import Adapter
    from sinew_client.control.adapter_file import AdapterError
    from sinew_client.control.authority import AuthorityChange, Leader, LeaderError
    from sinew_client.control.blend import Fusion, parse_fusion
    from sinew_client.control.controller import Command, Controller
    from sinew_client.control.defaults import AS_IS, Choice, choose
    from sinew_client.control.frames import Frames
    from sinew_client.control.handover import METHODS, Handover, parse_handover
    from sinew_client.control.interfaces import NoCommand, NoObservation, Robot, Source, Stopped
    from sinew_client.control.journal import Journal, is_journal, repeat, watched
    from sinew_client.control.listeners.command_listener import CommandListener
    from sinew_client.control.listeners.earlier import Earlier
    from sinew_client.control.listeners.keep import Keep
    from sinew_client.control.listeners.listener import LoopListener
    from sinew_client.control.listeners.refinement import Refinement
    from sinew_client.control.listeners.shadow import ShadowAgreement, ShadowListener
    from sinew_client.control.loop import Loop
    from sinew_client.control.motion import Absolute, Motion, Offsets, Relative
    from sinew_client.control.motion_fit import MotionFit, MotionWatch, fit_offsets
    from sinew_client.control.pace import Pace, SimulatedPace
    from sinew_client.control.planner import Planner
    from sinew_client.control.player import Player
    from sinew_client.control.replan import parse_rule
    from sinew_client.control.report import Cadence
    from sinew_client.control.reporter import Reporter
    from sinew_client.control.requester import Outcome, Requester
    from sinew_client.control.run import Run, RunPlan
    from sinew_client.control.safety import Guard, Limits, LimitsError
    from sinew_client.control.servers import Servers
    from sinew_client.control.settings import Settings, SettingsError
    from sinew_client.control.smoothing import Filter, parse_filter
    from sinew_client.control.stream import Stream, StreamReport
    from sinew_client.control.trajectory import Node, Trajectory
    from sinew_client.control.windows import StreamController

# Key: a public name. Value: the module of this package that defines it.
_HOMES = {
    "AS_IS": "defaults",
    "Absolute": "motion",
    "Adapter": "adapter",
    "AdapterError": "adapter_file",
    "Cadence": "report",
    "Choice": "defaults",
    "Command": "controller",
    "Controller": "controller",
    "Earlier": "listeners.earlier",
    "Filter": "smoothing",
    "Frames": "frames",
    "Fusion": "blend",
    "Guard": "safety",
    "AuthorityChange": "authority",
    "Handover": "handover",
    "Journal": "journal",
    "Keep": "listeners.keep",
    "Leader": "authority",
    "LeaderError": "authority",
    "Limits": "safety",
    "LimitsError": "safety",
    "LoopListener": "listeners.listener",
    "Loop": "loop",
    "METHODS": "handover",
    "Motion": "motion",
    "MotionFit": "motion_fit",
    "MotionWatch": "motion_fit",
    "NoCommand": "interfaces",
    "NoObservation": "interfaces",
    "Node": "trajectory",
    "Offsets": "motion",
    "ShadowListener": "listeners.shadow",
    "Outcome": "requester",
    "Pace": "pace",
    "Planner": "planner",
    "Player": "player",
    "Refinement": "listeners.refinement",
    "Relative": "motion",
    "Reporter": "reporter",
    "Requester": "requester",
    "Robot": "interfaces",
    "Run": "run",
    "RunPlan": "run",
    "Servers": "servers",
    "Settings": "settings",
    "SettingsError": "settings",
    "ShadowAgreement": "listeners.shadow",
    "SimulatedPace": "pace",
    "Source": "interfaces",
    "Stopped": "interfaces",
    "Stream": "stream",
    "StreamController": "windows",
    "StreamReport": "stream",
    "Trajectory": "trajectory",
    "CommandListener": "listeners.command_listener",
    "choose": "defaults",
    "fit_offsets": "motion_fit",
    "is_journal": "journal",
    "parse_filter": "smoothing",
    "parse_fusion": "blend",
    "parse_handover": "handover",
    "parse_rule": "replan",
    "repeat": "journal",
    "watched": "journal",
}
__all__ = [
    "AS_IS",
    "METHODS",
    "Absolute",
    "Adapter",
    "AdapterError",
    "AuthorityChange",
    "Cadence",
    "Choice",
    "Command",
    "CommandListener",
    "Controller",
    "Earlier",
    "Filter",
    "Frames",
    "Fusion",
    "Guard",
    "Handover",
    "Journal",
    "Keep",
    "Leader",
    "LeaderError",
    "Limits",
    "LimitsError",
    "Loop",
    "LoopListener",
    "Motion",
    "MotionFit",
    "MotionWatch",
    "NoCommand",
    "NoObservation",
    "Node",
    "Offsets",
    "Outcome",
    "Pace",
    "Planner",
    "Player",
    "Refinement",
    "Relative",
    "Reporter",
    "Requester",
    "Robot",
    "Run",
    "RunPlan",
    "Servers",
    "Settings",
    "SettingsError",
    "ShadowAgreement",
    "ShadowListener",
    "SimulatedPace",
    "Source",
    "Stopped",
    "Stream",
    "StreamController",
    "StreamReport",
    "Trajectory",
    "choose",
    "fit_offsets",
    "is_journal",
    "parse_filter",
    "parse_fusion",
    "parse_handover",
    "parse_rule",
    "repeat",
    "watched",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# Type checkers must not see `__getattr__`, because they would then accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

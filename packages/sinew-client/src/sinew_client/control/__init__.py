"""The robot's side of action chunks: what is executed when, and what happens when nothing arrives.

:class:`Loop` runs a robot at a fixed rate. What it decides is :class:`Controller`, which knows neither clocks nor
sockets. Chunks that are asked for and streams are both a :class:`Source`, and a :class:`SimulatedPace` plays the same
loop without a clock, as the evaluator of Sinew does. numpy alone.
"""

from __future__ import annotations

from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import AdapterError
from sinew_client.control.assist import Assist, AssistRule, parse_assist
from sinew_client.control.authority import HandedOver, Leader, LeaderError
from sinew_client.control.blend import Fusion, parse_fusion
from sinew_client.control.controller import Command, Controller
from sinew_client.control.defaults import AS_IS, Choice, choose
from sinew_client.control.frames import Frames
from sinew_client.control.handover import METHODS, Handover, parse_handover
from sinew_client.control.interfaces import NoCommand, NoObservation, Robot, Source, Stopped
from sinew_client.control.journal import Journal, is_journal, repeat, watched
from sinew_client.control.loop import Loop
from sinew_client.control.motion import Absolute, Motion, Offsets, Relative
from sinew_client.control.motion_fit import MotionFit, MotionWatch, fit_offsets
from sinew_client.control.pace import Pace, SimulatedPace
from sinew_client.control.planner import Planner
from sinew_client.control.player import Player
from sinew_client.control.refinement import Refinement
from sinew_client.control.replan import parse_rule
from sinew_client.control.report import Cadence
from sinew_client.control.reporter import Reporter
from sinew_client.control.requester import Outcome, Requester
from sinew_client.control.safety import Guard, Limits, LimitsError
from sinew_client.control.servers import Servers
from sinew_client.control.settings import Settings, SettingsError
from sinew_client.control.smoothing import Filter, parse_filter
from sinew_client.control.stream import Stream, StreamReport
from sinew_client.control.takeover import Onlooker, ShadowAgreement, Takeover
from sinew_client.control.trajectory import Node, Trajectory
from sinew_client.control.windows import StreamController

__all__ = [
    "AS_IS",
    "METHODS",
    "Absolute",
    "Adapter",
    "AdapterError",
    "Assist",
    "AssistRule",
    "Cadence",
    "Choice",
    "Command",
    "Controller",
    "Filter",
    "Frames",
    "Fusion",
    "Guard",
    "HandedOver",
    "Handover",
    "Journal",
    "Leader",
    "LeaderError",
    "Limits",
    "LimitsError",
    "Loop",
    "Motion",
    "MotionFit",
    "MotionWatch",
    "NoCommand",
    "NoObservation",
    "Node",
    "Offsets",
    "Onlooker",
    "Outcome",
    "Pace",
    "Planner",
    "Player",
    "Refinement",
    "Relative",
    "Reporter",
    "Requester",
    "Robot",
    "Servers",
    "Settings",
    "SettingsError",
    "ShadowAgreement",
    "SimulatedPace",
    "Source",
    "Stopped",
    "Stream",
    "StreamController",
    "StreamReport",
    "Takeover",
    "Trajectory",
    "choose",
    "fit_offsets",
    "is_journal",
    "parse_assist",
    "parse_filter",
    "parse_fusion",
    "parse_handover",
    "parse_rule",
    "repeat",
    "watched",
]

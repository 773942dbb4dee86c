"""Every front door drives a robot with the same settings: the command line, Python, evaluation, ROS and LeRobot."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Limits, LimitsError, Settings, SettingsError, Stopped
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.robots import Dry
from sinew_client.control.run import Run, RunPlan

import sinew
from sinew.cli.options import RUNS
from sinew.cli.run_leader import ENVELOPE, LEADER
from sinew.cli.run_rig import CHUNKS, open_rig
from sinew.cli.run_robot import RobotFlags
from tools.structure import ROOT

PEN = str(ROOT / "sinew" / "assets" / "pen.gguf")
# What an entry has its own reason for: a simulation's frames are never too old, a ROS contract and a LeRobot
# configuration state their own deadlines, and two of the robots cannot be held from another thread. None of them
# returns its robot by default: nothing can break, LeRobot does it, and a launch file leaves no time.
OWN = ("stale", "deadline", "watchdog")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with sinew.serve(PEN, ["native:0"], engine="eager") as server:
        yield server.addresses["native"]


@pytest.fixture(scope="module")
def loaded() -> Iterator[sinew.Policy]:
    with sinew.load(PEN, engine="eager") as policy:
        yield policy


def command_line(target: str) -> Settings:
    on = RobotFlags(prompt="write")
    with ExitStack() as stack:
        opener = on.opener()
        return open_rig(
            target, on, CHUNKS, LEADER, ENVELOPE, RUNS, "", lambda policy: on.opened(stack, opener, policy)
        ).plan.settings


def from_python(policy: Any) -> Settings:
    with ExitStack() as stack:
        opened: Any = stack.enter_context(sinew.connect(policy)) if isinstance(policy, str) else policy
        robot = Dry(opened.metadata()["policy"])
    with Run.open(policy, robot, prompt="write") as driving:
        return driving.plan.settings


def evaluation(target: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Play an episode, and return the settings with which it was played."""
    pytest.importorskip("gymnasium")
    from sinew_eval.episodes.player import EpisodePlayer
    from sinew_eval.episodes.settings import Task, Variant

    plans: list[RunPlan] = []
    whole = Run.run

    def noted(self: Run, steps: int | None = None) -> Any:
        plans.append(self.plan)
        return whole(self, steps)

    monkeypatch.setattr(Run, "run", noted)
    player = EpisodePlayer(Task("sinew/Pen-v0"))
    assert player.play(Variant(target, engine="auto" if "://" in target else "eager"), 5000).executed > 0
    player.close()
    return plans[0].settings


class Topics:
    """Topics that nobody else is on."""

    def subscribe(self, topic: str, kind: str, quality: str, callback: Callable[[Any], None]) -> None:
        assert topic

    def publisher(self, topic: str, kind: str) -> Callable[[Any], None]:
        return lambda message: None

    def now(self) -> float:
        return 0.0


def ros(address: str) -> Settings:
    from sinew_ros.bridge import Bridge
    from sinew_ros.contract import parse

    image, joints = "sensor_msgs/msg/Image", "sensor_msgs/msg/JointState"
    contract = parse(
        {
            "server": address,
            "prompt": "write",
            "hz": 60,
            "cameras": {name: {"topic": f"/{name}", "type": image} for name in ("now", "previous")},
            "state": {"topic": "/joint_states", "joints": ["opening"]},
            "action": [{"topic": "/pen", "type": "std_msgs/msg/Float64MultiArray", "joints": ["close"]}],
        }
    )
    assert joints
    bridge = Bridge(contract, Topics())
    bridge.loop.close()
    return bridge.loop.settings


def lerobot(policy: sinew.Policy, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Use the plugin's loop without its package, whose `__init__` needs LeRobot."""
    name = "lerobot_policy_sinew"
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT / "packages" / name / "src" / name)]
    monkeypatch.setitem(sys.modules, name, package)
    ahead = importlib.import_module(f"{name}.ahead")
    for each in ("ahead", "rtc"):
        monkeypatch.delitem(sys.modules, f"{name}.{each}")
    playing = ahead.Ahead(policy, policy.spec, "auto", "", "", 5.0, "", 0)
    playing.close()
    settings: Settings = playing._settings
    return settings


def test_every_entry_has_the_same_settings(
    address: str, loaded: sinew.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once differed: the policy's own limits reached the robot from two entries of six."""
    entries = {
        "sinew run, server": command_line(address),
        "sinew run, bundle": command_line(PEN),
        "Run.open, server": from_python(address),
        "evaluation, bundle": evaluation(PEN, monkeypatch),
        "evaluation, server": evaluation(address, monkeypatch),
        "ROS": ros(address),
        "LeRobot": lerobot(loaded, monkeypatch),
        "Run.open, policy": from_python(loaded),
    }
    usual = entries["sinew run, bundle"]
    assert usual.limits is not None
    assert usual.limits["low"][0] < usual.limits["high"][0]
    assert (usual.hz, usual.handover, usual.chunk_size) == (60.0, "aligned", 24)

    def shared(settings: Settings) -> dict[str, Any]:
        return {name: value for name, value in settings.to_dict().items() if name not in OWN}

    assert {name: shared(each) for name, each in entries.items()} == dict.fromkeys(entries, shared(usual))


POLICY: dict[str, Any] = {
    "cameras": [],
    "state": {"dim": 2},
    "action": {"dim": 2, "names": ["a", "b"], "limits": {"low": [-1, -1], "high": [1, None]}},
    "motion": {"kind": "absolute"},
    "control_hz": 20.0,
    "chunk_size": 8,
    "committed_rows": 3,
    "default_prompt": "go",
}


def test_what_a_person_chooses_comes_before_the_policys_own() -> None:
    robot = Dry(POLICY)
    own = RunPlan.of(POLICY, robot)
    assert own.settings.limits is not None
    assert own.settings.limits["high"] == [1.0, None]
    assert (own.settings.hz, own.settings.committed_rows, own.prompt) == (20.0, 3, "go")
    chosen = RunPlan.of(
        POLICY, robot, {"limits": {"high": 0.5}, "hz": 10, "handover": "freeze"}, prompt="stop"
    )
    assert chosen.settings.limits is not None
    assert (chosen.settings.limits["low"], chosen.settings.limits["high"]) == ([None, None], [0.5, 0.5])
    assert (chosen.settings.hz, chosen.choice.handover, chosen.prompt) == (10.0, "freeze", "stop")
    assert RunPlan.of(POLICY, robot, {"limits": {}}).settings.limits is None
    # Limits by name are put into the policy's order.
    named = Limits.parse({"names": ["b", "a"], "high": [2.0, 1.0]}, 2)
    limits = RunPlan.of(POLICY, robot, {"limits": named}).settings.limits
    assert limits is not None
    assert (limits["names"], limits["high"]) == (["a", "b"], [1.0, 2.0])
    # A take-over measures every step, also of a policy without limits.
    unlimited = {**POLICY, "action": {"dim": 2}}
    assert RunPlan.of(unlimited, robot).settings.limits is None
    measured = RunPlan.of(
        {**unlimited, "motion": {"kind": "offsets", "action": [0, 1], "state": [0, 1]}}, robot, takeover=True
    )
    assert measured.settings.limits is not None
    assert measured.settings.limits["still"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "settings", "error", "message"),
    [
        (
            {"control_hz": None},
            {},
            SettingsError,
            "hz: neither the policy nor the robot states a control rate",
        ),
        (
            {"default_prompt": ""},
            {},
            SettingsError,
            "prompt: neither the policy nor the robot has an instruction",
        ),
        ({}, {"handover": "soon"}, SettingsError, "handover"),
        (
            {},
            {"committed_rows": 3},
            SettingsError,
            "committed_rows: unknown setting, expected one of camera_delay, chunk_size",
        ),
        ({}, {"velocity": 3}, SettingsError, "velocity: unknown setting, expected one of"),
        ({}, {"limits": {"high": [1, 2, 3]}}, LimitsError, "limits.high"),
        (
            {"motion": None},
            {"limits": {"velocity": 1}},
            SettingsError,
            "limits.velocity: the robot's position .* is unknown",
        ),
    ],
)
def test_a_plan_names_what_does_not_fit(policy: Any, settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RunPlan.of({**POLICY, **policy}, Dry(POLICY), settings)


class Arm:
    """A robot with the three methods alone."""

    def observe(self) -> dict[str, Any]:
        return {"images": {}, "state": np.zeros(2, np.float32)}

    def act(self, row: np.ndarray) -> None: ...

    def hold(self) -> None: ...


def test_a_robot_needs_three_methods_and_states_what_it_likes() -> None:
    facts = facts_of(Arm())
    assert (facts.names("state"), facts.task(), facts.counts, facts.needs_state()) == (
        [],
        "",
        (None, None),
        False,
    )
    assert facts == RobotFacts(needs_state=facts.needs_state, task=facts.task, success=facts.success)
    notes = RunPlan.of(POLICY, Arm()).notes
    assert notes == (
        "limits: no speed limit for a, b; set velocity in --limits FILE",
        "rest: at the end of the run the robot returns slowly to its first pose; --rest hold leaves it where it is",
    )

    class Stated(Arm):
        joints, joint_unit, motion, task, concurrent_hold = (
            ["x", "y"],
            "deg",
            {"kind": "absolute"},
            "sort",
            False,
        )
        finished, successes, success = 3, 2, None

        def set_up(self, seed: int) -> None: ...

        def close(self) -> None: ...

    facts = facts_of(robot := Stated())
    assert (facts.names("action"), facts.joint_unit, facts.motion) == (
        ["x", "y"],
        "deg",
        {"kind": "absolute"},
    )
    assert (facts.task(), facts.concurrent_hold, facts.counts) == ("sort", False, (2, 3))
    assert facts.episodes is robot
    assert facts.scenes is robot
    assert facts.close == robot.close
    robot.task = "stack"
    assert facts.task() == "stack"


class Brief(Dry):
    """A robot that ends the run after five commands, however long they take."""

    def act(self, row: np.ndarray) -> None:
        super().act(row)
        if self.commands == 5:
            raise Stopped("done")


def test_sinew_run_drives_a_robot(loaded: sinew.Policy) -> None:
    robot = Brief(loaded.metadata()["policy"])
    report = sinew.run(loaded, robot, prompt="write", hz=20, limits={"low": 0.2, "high": 0.4})
    assert report.executed == 5
    assert 0.2 - 1e-6 <= float(robot.state[0]) <= 0.4 + 1e-6
    assert robot.holds > 0  # at the end, too
    assert loaded.infer({"images": robot.observe()["images"], "state": robot.state, "prompt": "write"})
    with pytest.raises(SettingsError, match="prompt: neither the policy nor the robot has an instruction"):
        sinew.run(loaded, robot, seconds=1.0)

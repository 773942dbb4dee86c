"""Somebody takes over and gives back: no jump, whatever the policy, the leader and the robot do."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.arm.takeover import Takeover
from sinew_client.control import (
    Command,
    CommandListener,
    Journal,
    Keep,
    LeaderError,
    Limits,
    Loop,
    NoObservation,
    Outcome,
    Settings,
    ShadowAgreement,
    ShadowListener,
    SimulatedPace,
    repeat,
)
from sinew_client.control.authority import ALIGNS, SILENT, AuthorityChange
from sinew_client.control.controller import UNKNOWN
from sinew_client.control.facts import facts_of
from sinew_client.control.motion import Absolute, Motion, Offsets, Relative
from sinew_client.control.report import agreement_rows

from tests.control.test_promises import BAD

HZ, DIM = 20.0, 3
LIMITS = {"low": -2, "high": 2, "velocity": [1.0, 0.5, 4.0], "names": ["a", "b", "c"]}
NAMES = ("a", "b", "c")


class Robot:
    """Goes where it is told; ``droop``: its state says another place than its last command."""

    def __init__(self, start: Any, droop: float = 0.0):
        self.position, self.droop = np.float32(start), droop
        self.sent: list[np.ndarray | None] = []

    def observe(self) -> dict[str, Any]:
        return {
            "images": {"front": np.full((2, 2, 3), len(self.sent) % 256, np.uint8)},
            "state": self.position + np.float32(self.droop),
        }

    def act(self, row: np.ndarray) -> None:
        self.position = row
        self.sent.append(row)

    def hold(self) -> None:
        self.sent.append(None)


class Policy:
    """A source that answers with what it likes, after ``delay`` control steps."""

    continuous, failures = False, 0

    def __init__(self, rng: np.random.Generator, delay: int = 0):
        self.rng, self.delay = rng, delay
        self.asked = 0
        self._due: float | None = None

    def ready(self, now: float) -> bool:
        return self._due is None

    def ask(self, observation: Any, now: float) -> None:
        self.asked += 1
        self._due = now + self.delay / HZ

    def poll(self, now: float) -> Outcome | None:
        if self._due is None or now < self._due - 1e-9:
            return None
        self._due = None
        return Outcome(np.float32(self.rng.uniform(-3, 3, (int(self.rng.integers(1, 12)), DIM))))

    def cancel(self) -> None:
        self._due = None

    def close(self, wait: float = 0.0) -> None:
        pass


class Hand:
    """A leader arm. ``follows``: has motors that bring it where it is told."""

    def __init__(self, at: Any, follows: bool = True):
        self.at: Any = np.float32(at)
        if follows:
            self.align = self._align
        self.aligned_to: list[np.ndarray] = []

    def read(self) -> Any:
        return self.at

    def _align(self, position: np.ndarray) -> None:
        self.aligned_to.append(np.array(position))
        self.at = np.where(np.isnan(position), self.at, self.at + np.clip(position - self.at, -0.2, 0.2))


def loop_of(robot: Robot, source: Any, hand: Any, **options: Any) -> Loop:
    align, shadow = options.pop("align", 0.05), options.pop("shadow", False)
    keep = options.pop("keep", None)
    chosen = Settings(
        HZ, **{"handover": "aligned", "motion": {"kind": "absolute"}, "limits": LIMITS, **options}
    )
    limits = None if chosen.limits is None else Limits.parse(chosen.limits, DIM)
    takeover = Takeover(hand, chosen.parse_motion(), DIM, limits, align, shadow)
    listeners = [takeover, *([] if keep is None else [Keep(keep)])]
    return Loop(robot, source, chosen, DIM, "go", SimulatedPace(HZ), listeners)  # type: ignore[arg-type]


def takeover_of(loop: Loop) -> Takeover:
    """Return the take-over of a loop."""
    (takeover,) = (each for each in loop.listeners if isinstance(each, Takeover))
    return takeover


def until(loop: Loop, steps: int) -> None:
    """Run until so many control steps were taken; ``run`` would hold the robot at its end."""
    while loop.steps < steps:
        loop.tick(loop.pace.next())


def ticks(loop: Loop, count: int) -> None:
    until(loop, loop.steps + count)


@pytest.mark.parametrize("rounds", [25, pytest.param(130, marks=pytest.mark.slow)])  # 200 and 1,000 of them
def test_hand_overs_have_no_jump(rounds: int) -> None:
    """Both ways, of a policy and a person who are anywhere: no step is larger than velocity allows, and the report's
    largest is the largest."""
    rng = np.random.default_rng(38)
    most = np.array(LIMITS["velocity"]) / HZ
    to_human = to_policy = 0
    largest = 0.0
    for _ in range(rounds):
        robot = Robot(rng.uniform(-2, 2, DIM), rng.choice([0.0, 0.01]))
        hand = Hand(rng.uniform(-2, 2, DIM), follows=bool(rng.random() < 0.7))
        options = {
            "limits": {**LIMITS, "acceleration": rng.choice([None, 30.0]), "jerk": rng.choice([None, 900.0])}
        }
        loop = loop_of(robot, Policy(rng, int(rng.integers(0, 4))), hand, **options)
        driver: list[str] = []
        CommandListener(lambda command, seen=driver: seen.append(command.by)).attach(loop)
        for _ in range(4):
            ticks(loop, int(rng.integers(3, 20)))
            takeover_of(loop).take_over()
            if not hasattr(hand, "align"):  # the person brings it there
                ticks(loop, 2)
                hand.at = np.float32(robot.position + rng.uniform(-0.04, 0.04, DIM))
            for _ in range(100):
                ticks(loop, 1)
                if loop.controller.driver == "human":
                    break
            assert loop.controller.driver == "human"
            for _ in range(int(rng.integers(1, 15))):
                hand.at = np.float32(rng.uniform(-4, 4, DIM))  # shaken as fast as one likes
                ticks(loop, 1)
            takeover_of(loop).hand_back()
        ticks(loop, 30)
        last: np.ndarray | None = None
        by = ""
        for row, who in zip(robot.sent, driver, strict=True):
            if row is None:
                continue
            if last is not None:
                moved = np.abs(row.astype(np.float64) - last)
                assert (moved <= most).all()
                if by and who != by:
                    largest = max(largest, float(moved.max()))
                    to_human += who == "human"
                    to_policy += who == "policy"
            last, by = row, who
        handed = loop.report().handed
        assert handed["to_human"] == handed["to_policy"] == 4
        assert handed["unknown"] == 0
        assert handed["largest"] <= most.max()
        assert handed["number"] in NAMES
    assert to_human + to_policy >= 7.7 * rounds
    assert 0.0 < largest <= most.max()
    print(f"{to_human} and {to_policy} hand-overs, largest step {largest:.4f} of {most.max():.4f}")


def test_a_robot_is_looked_at_as_often_as_somebody_has_to_know() -> None:
    """To ask, to begin, and while a leader aligns, but not while it leads; of an onlooker always."""

    class Seen(Robot):
        looks = 0

        def observe(self) -> dict[str, Any]:
            self.looks += 1
            return super().observe()

    robot = Seen([0.0] * DIM, droop=0.3)
    hand, source = Hand([0.0] * DIM, follows=False), Policy(np.random.default_rng(0), 3)
    loop = loop_of(robot, source, hand, limits={**LIMITS, "still": [0.0, None, None]})
    takeover_of(loop).take_over()
    until(loop, 1)
    assert (loop.controller.driver, robot.looks) == ("aligning", 1)
    hand.at = np.full(DIM, 0.3, np.float32)  # of two numbers only its state says where it is
    until(loop, 5)
    assert (loop.controller.driver, robot.looks) == ("human", 3)
    takeover_of(loop).hand_back()
    until(loop, 9)
    assert (loop.controller.driver, robot.looks) == ("policy", 3 + source.asked)
    while source._due is None:  # until an answer is under way
        ticks(loop, 1)
    takeover_of(loop).take_over()
    ticks(loop, 4)
    assert (source._due, loop.report().faults["total"]) == (None, 0)
    hand.at = np.float32(loop.controller.guard.here)  # type: ignore[union-attr]  # and not where it droops to
    looks = robot.looks
    ticks(loop, 2)
    assert (loop.controller.driver, robot.looks) == ("human", looks)
    robot = Seen([0.0] * DIM)
    eyes = ShadowListener(robot, Absolute(), DIM)
    until(loop_of(eyes, Policy(np.random.default_rng(0), 3), eyes, shadow=True, limits={}, align=9.0), 20)  # type: ignore[arg-type]
    assert robot.looks >= 20
    robot = Seen([0.0] * DIM)
    until(loop_of(robot, Policy(np.random.default_rng(0)), hand), 1)
    assert (robot.looks, robot.sent[0] is not None) == (1, True)
    robot = Seen([0.0] * DIM)
    loop = loop_of(robot, source, hand, substeps=2, limits={"still": [0.0, None, None]})
    ticks(loop, 6)
    sent = [row for row in robot.sent if row is not None]
    assert np.isfinite(sent).all()
    np.testing.assert_array_equal(sent[0], sent[1])  # between what is not known there is nothing


def test_a_leader_that_is_elsewhere_is_not_followed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the person has brought it near, the robot holds, and it is said by how much it is elsewhere."""
    monkeypatch.setattr(
        "sinew_client.control.listeners.hold_log.SimulatedPace", type(None)
    )  # whose holds are not logged
    robot, hand = Robot([0.0, 0.0, 0.0]), Hand([1.0, 0.0, 0.0], follows=False)
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand, align=0.1)
    until(loop, 5)
    takeover_of(loop).take_over()
    until(loop, 15)
    assert loop.controller.driver == "aligning"
    assert loop.reason == ALIGNS
    here = robot.position
    assert all(row is None for row in robot.sent[5:])
    assert takeover_of(loop).apart.startswith(f"a by {abs(1.0 - float(here[0])):.4g}, at most 0.1")
    assert f"holds: {ALIGNS} (a by {abs(1.0 - float(here[0])):.4g}, at most 0.1" in caplog.text
    hand.at = here + np.float32([0.05, 0.0, 0.0])
    until(loop, 16)
    assert loop.controller.driver == "human"
    np.testing.assert_allclose(robot.sent[-1], hand.at, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, SILENT),
        ([math.nan, 0.0, 0.0], "the leader's row is not finite"),
        ([0.0], "the leader's row: expected 1 to 1 actions of 3 numbers"),
        (["x", "y", "z"], "the leader's row: expected real numbers"),
        (RuntimeError("unplugged"), "the leader failed: RuntimeError: unplugged"),
    ],
)
def test_a_leader_that_fails_holds_the_robot(said: Any, reason: str) -> None:
    robot, hand = Robot([0.0, 0.0, 0.0]), Hand([0.0, 0.0, 0.0])
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand)
    until(loop, 3)
    takeover_of(loop).take_over()
    until(loop, 30)
    assert loop.controller.driver == "human"

    def read() -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    hand.read = read  # type: ignore[method-assign]
    until(loop, 33)
    assert robot.sent[-3:] == [None] * 3
    assert loop.reason.startswith(reason)
    del hand.read
    until(loop, 34)
    assert robot.sent[-1] is not None


def test_what_is_decided_is_repeated_to_the_bit(tmp_path: Path) -> None:
    """A journal with hand-overs, filters, jerk and a shadow says the same once more."""
    for shadow in (False, True):
        rng = np.random.default_rng(1)
        robot, hand = Robot([0.1, 0.2, 0.3]), Hand([0.5, -0.5, 0.0])
        options = {"limits": {**LIMITS, "jerk": 500, "jump": 5}, "filter": "lowpass:3", "speed": 0.5}
        loop = loop_of(robot, Policy(rng, 2), hand, shadow=shadow, **options)
        journal = Journal(tmp_path / f"{shadow}.jsonl", loop.settings, DIM)
        loop.controller.listeners.append(journal.put)
        if shadow:
            loop.controller.take_over(0, shadow=True)  # again, for the journal, which begins here
        for _ in range(3):
            ticks(loop, 12)
            takeover_of(loop).take_over()
            ticks(loop, 20)
            hand.at = np.float32(rng.uniform(-1, 1, DIM))
            ticks(loop, 5)
            takeover_of(loop).hand_back()
        journal.close()
        found = repeat(tmp_path / f"{shadow}.jsonl")
        assert found.differences == []
        assert found.commands == loop.steps
        assert (loop.report().agreement["missing"] < 20) if shadow else not loop.report().agreement


def test_a_shadow_drives_nothing_and_is_compared() -> None:
    """The policy's rows are computed and never sent; what it says is compared with what the person does."""

    class Same(Policy):
        """Says what the person does, but for the last number."""

        def poll(self, now: float) -> Outcome | None:
            if super().poll(now) is None:
                return None
            steps = round(now * HZ) + np.arange(8)
            return Outcome(np.float32([[0.1 * np.sin(k), 0.2, 0.5] for k in steps]))

    robot, hand = Robot([0.0, 0.2, 0.0]), Hand([0.0, 0.2, 0.0])
    source = Same(np.random.default_rng(0))
    loop = loop_of(robot, source, hand, shadow=True, replan="4", limits={"names": list(NAMES)}, align=1.0)
    for step in range(60):
        hand.at = np.float32([0.1 * np.sin(step), 0.2, 0.1 * np.cos(step)])
        until(loop, step + 1)
    sent = np.array([row for row in robot.sent if row is not None])
    assert len(sent) == 60
    assert (sent[:, 2] < 0.2).all()  # nothing of the policy's
    assert source.asked > 10
    report = loop.report().agreement
    assert report["steps"] == 60
    assert report["numbers"]["a"]["max"] < 1e-6
    assert report["numbers"]["a"]["explained"] == pytest.approx(1.0)
    assert report["numbers"]["b"]["explained"] is None  # it never varied
    cosine = 0.1 * np.cos(np.arange(60))
    assert report["numbers"]["c"]["max"] == pytest.approx(float(np.abs(0.5 - cosine).max()), abs=1e-6)
    assert report["numbers"]["c"]["explained"] == pytest.approx(
        1 - np.mean((0.5 - cosine) ** 2) / np.var(cosine), rel=1e-4
    )
    takeover_of(loop).hand_back()  # a shadow does not drive
    until(loop, 62)
    assert loop.controller.driver == "human"


def test_a_shadows_chunks_are_compared_row_by_row_with_the_delay_made_up_for() -> None:
    """Each row is held against the step that it is for, also those of steps that were past when the chunk came."""

    class Late(Policy):
        """Says what the person does in the steps from its frame on, the worse the further ahead."""

        def ask(self, observation: Any, now: float) -> None:
            super().ask(observation, now)
            self.frame = round(now * HZ)

        def poll(self, now: float) -> Outcome | None:
            if super().poll(now) is None:
                return None
            return Outcome(
                np.float32([[0.1 * np.sin(self.frame + k) + 0.01 * k, 0.2, 0.0] for k in range(8)])
            )

    robot, hand = Robot([0.0, 0.2, 0.0]), Hand([0.0, 0.2, 0.0])
    limits = {"names": list(NAMES)}
    loop = loop_of(
        robot, Late(np.random.default_rng(0), 3), hand, shadow=True, replan="4", limits=limits, align=1.0
    )
    for step in range(60):
        hand.at = np.float32([0.1 * np.sin(step), 0.2, 0.0])
        until(loop, step + 1)
    assert loop.controller.delay.steps >= 3
    rows = loop.report().agreement["rows"]
    assert rows["row"] == list(range(8))
    assert min(rows["count"]) > 5
    np.testing.assert_allclose(rows["numbers"]["a"]["p50"], 0.01 * np.arange(8), atol=1e-6)
    np.testing.assert_allclose(rows["numbers"]["a"]["p95"], 0.01 * np.arange(8), atol=1e-6)
    assert max(rows["numbers"]["b"]["p95"]) < 1e-6
    lines = [text for _, text in loop.report().rows()]
    assert "by row of a chunk, 0, 2, 4, 5, 7:" in lines
    assert any(line.endswith("by row 0, 0.02, 0.04, 0.05, 0.07") for line in lines), lines


def test_an_onlooker_commands_nothing() -> None:
    """A robot that somebody else drives: what was done is its action, or where its state is."""

    class Driven(Robot):
        action: Any = None

        def observe(self) -> dict[str, Any]:
            self.position = np.float32(np.sin(np.arange(DIM) + len(self.looks)))
            self.looks.append(self.position)
            return {**super().observe(), **({} if self.action is None else {"action": self.action})}

    for action in (None, [0.5, 0.5, 0.5]):
        robot = Driven([0.0] * DIM)
        robot.looks, robot.action = [], action  # type: ignore[attr-defined]
        eyes = ShadowListener(robot, Absolute(), DIM)
        loop = loop_of(eyes, Policy(np.random.default_rng(0)), eyes, shadow=True, limits={}, align=10.0)  # type: ignore[arg-type]
        until(loop, 20)
        assert robot.sent == []
        assert loop.report().agreement["steps"] >= 19
        if action is not None:
            np.testing.assert_array_equal(takeover_of(loop).leader.read(), action)


def test_frames_are_marked_by_who_drives() -> None:
    """Each control step with a command is kept once, with what was seen in it, and who said the command."""
    kept: list[tuple[int, Command, str]] = []
    robot, hand = Robot([0.0, 0.0, 0.0]), Hand([0.3, 0.0, 0.0])
    loop = loop_of(
        robot,
        Policy(np.random.default_rng(3)),
        hand,
        keep=lambda seen, prompt, command: kept.append((int(seen["images"]["front"][0, 0, 0]), command, prompt)),
    )  # fmt: skip
    until(loop, 10)
    takeover_of(loop).take_over()
    until(loop, 25)
    takeover_of(loop).hand_back()
    until(loop, 40)
    assert [command.step for _, command, _ in kept] == [
        at for at, row in enumerate(robot.sent) if row is not None
    ]
    assert all(image == command.step % 256 for image, command, _ in kept)
    by = [command.by for _, command, _ in kept]
    assert by[0] == by[-1] == "policy"
    assert 5 < by.count("human") <= 15
    first = by.index("human")
    assert set(by[first : first + by.count("human")]) == {"human"}
    assert {prompt for _, _, prompt in kept} == {"go"}


def test_a_button_takes_over_and_pausing_ends_it() -> None:
    robot, hand = Robot([0.0, 0.0, 0.0]), Hand([0.0, 0.0, 0.0])
    hand.wanted = False  # type: ignore[attr-defined]
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand)
    until(loop, 4)
    assert loop.controller.driver == "policy"
    hand.wanted = True  # type: ignore[attr-defined]
    until(loop, 30)
    assert loop.controller.driver == "human"
    loop.pause()
    until(loop, 31)
    assert (loop.controller.driver, loop.reason) == ("policy", "paused")
    loop.resume()
    until(loop, 33)
    assert loop.controller.driver == "policy"  # the button has not changed
    hand.wanted = False  # type: ignore[attr-defined]
    until(loop, 34)
    hand.wanted = True  # type: ignore[attr-defined]
    until(loop, 60)
    assert loop.controller.driver == "human"
    loop.restart("a new episode")
    until(loop, 61)
    assert loop.controller.driver == "policy"


def test_how_near_is_near_has_to_be_known() -> None:
    with pytest.raises(LeaderError, match="--takeover: expected a motion"):
        Takeover(Hand([0.0] * DIM), Motion(), DIM, None, 0.1)
    with pytest.raises(LeaderError, match="align: expected .*, but 0, 1, 2 has no range"):
        Takeover(Hand([0.0] * DIM), Absolute(), DIM, None)
    Takeover(Hand([0.0] * DIM), Offsets((0, 1), (0, 1)), DIM, None)  # offsets are nowhere
    with pytest.raises(
        LeaderError, match="The default is 0.05 of each joint's range, but 0 has no range in the limits$"
    ):
        Takeover(Hand([0.0] * DIM), Relative((0,), (0,)), DIM, None)
    near = Takeover(Hand([0.0] * DIM), Absolute(), DIM, Limits.parse(LIMITS, DIM))
    assert near._near.tolist() == [0.2] * DIM
    assert (near.apart, near.shadow) == ("", False)


def test_agreement_of_nothing() -> None:
    assert ShadowAgreement().to_dict() == {"steps": 0, "missing": 0, "numbers": {}, "rows": {}}
    unsaid = ShadowAgreement()
    unsaid.add(0, np.zeros(1), np.ones(1))
    assert unsaid.to_dict()["rows"] == {}


def test_a_leader_whose_motors_fail_takes_over_when_they_work() -> None:
    robot, hand = Robot([0.0, 0.0, 0.0]), Hand([1.0, 0.0, 0.0])
    works: list[str] = []

    def method(name: str) -> Any:
        def call(*_: Any) -> None:
            if name not in works:
                raise RuntimeError(f"{name} is jammed")

        return call

    hand.align, hand.free = method("align"), method("free")  # type: ignore[attr-defined]
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand)
    until(loop, 3)
    takeover_of(loop).take_over()
    for steps, name in ((5, "align"), (7, "free")):  # it is far away at first, and then it is brought near
        until(loop, steps)
        assert loop.controller.driver == "aligning"
        assert takeover_of(loop).apart == f"the leader could not be aligned: RuntimeError: {name} is jammed"
        hand.at = robot.position
    works.append("free")
    until(loop, 8)
    assert loop.controller.driver == "human"
    assert robot.sent[3:7] == [None] * 4


def test_a_leader_is_near_where_the_robot_is_known_to_be() -> None:
    """Of the numbers that are places; a row of another leader is none."""
    hand, told = Hand([0.25, 9.0, 9.0]), []
    takeover = Takeover(hand, Relative((0,), (0,)), DIM, Limits.parse({"names": list(NAMES)}, DIM), 0.25)
    controller: Any = SimpleNamespace(
        driver="aligning", aligned=told.append, led=lambda *_: told.append("led")
    )
    for here, apart in (
        (None, "the robot's position is not known"),
        (np.array([np.nan, 0.0, 0.0]), "the robot's position is not known"),
        (np.array([0.501, 0.0, 0.0]), "a by 0.251, at most 0.25"),
    ):
        takeover.follow(controller, 1, here)
        assert (takeover.apart, told) == (apart, [])
    np.testing.assert_array_equal(
        hand.aligned_to[0], [np.nan, 0.0, 0.0]
    )  # a leader moves where something is known
    hand.at = np.float32([0.25, 9.0, 9.0])
    takeover.follow(controller, 2, np.array([0.0, np.nan, np.nan]))
    assert (takeover.apart, told) == ("", [2])
    hand.at = [0.0] * 2
    takeover.follow(controller, 3, None)
    assert takeover.apart.startswith("the leader's row: expected 1 to 1 actions of 3 numbers")


def test_leaders_without_places_are_followed_at_once_and_others_where_all_are_known() -> None:
    controller: Any = SimpleNamespace(driver="aligning", aligned=lambda step: None)
    free = Takeover(Hand([9.0] * DIM), Offsets((0, 1), (0, 1)), DIM, None)
    free.follow(controller, 1, None)
    assert free.apart == ""
    placed = Takeover(Hand([0.0] * DIM), Relative((0, 1), (0, 1)), DIM, None, 0.25)
    placed.follow(controller, 1, np.array([0.0, np.nan, np.nan]))
    assert placed.apart == "the robot's position is not known"


def test_what_a_leader_fails_with_is_said_once_each_and_a_hundred_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hand, numbers = Hand([0.0] * DIM), iter(range(204))

    def read() -> Any:
        raise RuntimeError(f"number {next(numbers) // 2}")

    hand.read = read  # type: ignore[method-assign]
    takeover = Takeover(hand, Absolute(), DIM, None, 0.1)
    controller: Any = SimpleNamespace(driver="human", led=lambda *_: None)
    for step in range(204):
        takeover.follow(controller, step, None)
    assert caplog.messages == [f"the leader failed: RuntimeError: number {k}" for k in range(100)]


def test_an_onlooker_knows_what_was_done_where_all_of_it_is_known() -> None:
    robot = Robot([0.5] * DIM)
    seen = ShadowListener(robot, Relative((0,), (0,)), DIM)
    assert not facts_of(seen).concurrent_hold
    assert "action" not in seen.observe()
    assert seen.read() is None
    seen.close()  # a robot that has no end
    ended: list[int] = []
    robot.close = lambda: ended.append(1)  # type: ignore[attr-defined]
    seen.close()
    assert ended == [1]


def test_an_agreement_keeps_so_many_steps_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinew_client.control.listeners.shadow.KEPT", 4)
    for frames, counted in ((range(5), 4), ([4, 0, 0, 0, 0], 3)):
        found, row = ShadowAgreement(), np.zeros(1, np.float32)
        for step, frame in enumerate(frames):
            found.said(frame, row[None], 1.0)
            found.add(step, row, row)
        assert found.to_dict()["steps"] == 4
        assert found.to_dict()["rows"]["count"] == [counted]


def test_rows_of_chunks_are_compared_by_their_median_and_p95() -> None:
    found = ShadowAgreement()
    for step in range(21):
        found.said(step, np.float32([[0], [1]]), 1.0)
        found.add(step, np.zeros(1), np.full(1, step))
    told = found.to_dict()
    assert (told["numbers"]["0"]["p50"], told["numbers"]["0"]["p95"]) == (10, 19)
    assert told["rows"]["count"] == [21, 20]
    assert told["rows"]["numbers"]["0"] == {"p50": [10, 9.5], "p95": [19, pytest.approx(18.05)]}


def test_hand_overs_are_counted_and_told() -> None:
    handed = AuthorityChange()
    handed.commanded(np.ones(2, np.float32), np.zeros(2), ())  # nobody has taken over
    assert (handed.largest, handed.to_dict()) == (0, {})
    before = np.zeros(2)
    for driver, row, at in (
        ("human", [1, 2], None),  # from an unknown position
        ("", [9, 9], before),  # no hand-over
        ("policy", [1, 2], np.full(2, np.nan)),
        ("human", [1, 5], np.array([0.0, np.nan])),
        ("policy", [0.5, -3.5], before),
        ("aligning", [3.5, 0], before),  # as large, and later; nobody has it yet
    ):
        if driver:
            handed.changed(driver)
        handed.commanded(np.float32(row), at, ("a",))
    assert handed.to_dict() == {
        "to_human": 2, "to_policy": 2, "steps": 0, "largest": 3.5, "number": "a", "unknown": 2,
    }  # fmt: skip
    assert handed.text() == (
        "2 to a human, 2 back, 0 steps by hand; largest step at a hand-over 3.5 (a), 2 from an unknown position"
    )
    assert AuthorityChange(to_policy=1).text().endswith("0 (-)")
    assert AuthorityChange(to_policy=1).to_dict()["to_policy"] == 1


class Cart(Robot):
    """Moves by offsets. ``eye`` makes the observation of the state and the time: what it shows may be wrong."""

    def __init__(self, eye: Any = None):
        super().__init__([0.0] * DIM)
        self.eye = eye
        self.now = lambda: 0.0

    def observe(self) -> dict[str, Any]:
        seen = {**super().observe(), "time": self.now()}
        return seen if self.eye is None else self.eye(seen)

    def act(self, row: np.ndarray) -> None:
        self.position = self.position + row
        self.sent.append(row)


OFFSETS = {"kind": "offsets", "action": [0, 1, 2], "state": [0, 1, 2]}
WELL = 0.2  # of the workspace, each way


def blind(seen: dict[str, Any]) -> Any:
    raise NoObservation("front: no frame")


def wrong_eyes(first: dict[str, Any]) -> dict[str, Any]:
    """Return sensors that fail after an observation."""
    return {
        "missing": blind,
        "one old observation": lambda seen: dict(first),
        "not finite": lambda seen: {**seen, "state": seen["state"] * np.nan},
        "old": lambda seen: {**seen, "time": seen["time"] - 1.0},
        "of another clock": lambda seen: {**seen, "time": seen["time"] + 1.7e9},
        "frozen": lambda seen: {**seen, "state": first["state"]},
        "frozen without a time": lambda seen: {
            "images": first["images"], "state": first["state"]
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*sorted(wrong_eyes({})), "fine"])
@pytest.mark.parametrize("by", ["human", "policy"])
def test_nobody_leaves_a_workspace_whose_sensor_fails(kind: str, by: str) -> None:
    """Offsets of a person are held as the policy's are: where the state is not known, and by what was sent since it
    last changed."""
    robot = Cart()
    limits = {"workspace_low": -WELL, "workspace_high": WELL}
    source = Policy(np.random.default_rng(0))
    source.poll = lambda now: None if source._due is None else answered(source)  # type: ignore[method-assign]
    hand = Hand([0.05] * DIM)
    loop = loop_of(robot, source, hand, motion=OFFSETS, limits=limits)
    robot.now = loop.pace.now
    if by == "human":
        takeover_of(loop).take_over()
    until(loop, 3)
    assert loop.controller.driver == by
    if kind != "fine":
        robot.eye = wrong_eyes(robot.observe())[kind]
    heard: list[Command] = []
    CommandListener(heard.append).attach(loop)
    until(loop, 63)
    assert np.abs(robot.position).max() <= WELL + 1e-6
    if kind == "fine" or kind.startswith("frozen"):
        assert any(command.row is not None for command in heard)
    elif by == "human":  # an observation may be acted on until it is stale
        assert {command.reason for command in heard[12:]} == {UNKNOWN}
    robot.eye = None
    moved = loop.controller.handed.steps
    hand.at = np.float32([-0.05] * DIM)
    until(loop, 83)
    assert by == "policy" or loop.controller.handed.steps > moved


def answered(source: Policy) -> Outcome:
    source._due = None
    return Outcome(np.full((6, DIM), 0.05, np.float32))


@pytest.mark.parametrize("after", [5, 30])
@pytest.mark.parametrize("way", ["silent", "fails", "of another width", "not finite", "jumps", "the state"])
@pytest.mark.parametrize("limits", [{"velocity": None}, {"velocity": 1.0}])
def test_a_leader_that_comes_back_elsewhere_is_aligned_again(
    way: str, after: int, limits: dict[str, Any]
) -> None:
    """Whatever it did meanwhile, and whatever kept the robot from following it."""
    robot, hand = Robot([0.0] * DIM), Hand([0.0] * DIM, follows=False)
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand, limits={**LIMITS, **limits})
    loop.pause()  # no policy moves it before
    until(loop, 2)
    loop.resume()
    takeover_of(loop).take_over()
    until(loop, 6)
    assert loop.controller.driver == "human"

    def failing() -> Any:
        if way == "fails":
            raise OSError("unplugged")
        return {"silent": None, "of another width": [0.0], "not finite": [np.nan] * DIM}[way]

    here = robot.position.copy()
    if way == "the state":
        loop.controller.needs_state = True  # as of offsets
        robot.observe = lambda: blind({})  # type: ignore[method-assign]
    elif way != "jumps":
        hand.read = failing  # type: ignore[method-assign]
    if way != "jumps":
        ticks(loop, after)
        vars(hand).pop("read", None)
    vars(robot).pop("observe", None)
    hand.at = here + np.float32(1.5)
    ticks(loop, 10)
    np.testing.assert_array_equal(robot.position, here)
    assert loop.controller.driver == "aligning"
    assert takeover_of(loop).apart == ", ".join(f"{name} by 1.5, at most 0.05" for name in NAMES)
    hand.at = here + np.float32(0.04)
    ticks(loop, 3)
    assert loop.controller.driver == "human"


def test_a_leader_that_misses_a_step_goes_on() -> None:
    robot, hand = Robot([0.0] * DIM), Hand([0.0] * DIM, follows=False)
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand)
    takeover_of(loop).take_over()
    until(loop, 4)
    hand.at = robot.position
    until(loop, 6)
    for _ in range(10):
        hand.at = None
        ticks(loop, 3)
        hand.at = robot.position + np.float32(0.03)
        ticks(loop, 3)
        assert loop.controller.driver == "human"
    assert loop.report().handed["to_human"] == 1


def test_another_instruction_leaves_a_person_driving() -> None:
    """A planner beside the loop says one whenever it likes."""
    robot, hand = Robot([0.0] * DIM), Hand([0.0] * DIM)
    loop = loop_of(robot, Policy(np.random.default_rng(0)), hand)
    takeover_of(loop).take_over()
    until(loop, 20)
    assert loop.controller.driver == "human"
    loop.say("pour")
    ticks(loop, 3)
    assert loop.controller.driver == "human"


def test_a_leader_of_its_own_is_ended_with_the_loop() -> None:
    hand = Hand([0.0] * DIM)
    takeover = Takeover(hand, Absolute(), DIM, None, 0.1)
    takeover.close()  # one that has no end
    ended: list[int] = []
    hand.close = lambda: ended.append(1)  # type: ignore[attr-defined]
    takeover.close()
    assert ended == [1]


def test_a_policy_that_explains_nothing_is_said_to() -> None:
    """Numbers without a name, rows that are played slower, and steps in which nothing was to be said."""
    found = ShadowAgreement(("a",))
    found.said(0, np.float32([[0, 0], [1, 1]]), speed=0.5)  # its rows are of steps 1 and 3
    for step in range(4):
        found.add(step, None if step == 2 else np.float32([1, 0]), np.float32([step, 2]))
    told = found.to_dict()
    assert (told["steps"], told["missing"], told["rows"]["row"], told["rows"]["count"]) == (
        3,
        1,
        [0, 1],
        [1, 1],
    )
    assert [told["rows"]["numbers"][name]["p50"] for name in ("a", "1")] == [[1.0, 2.0], [2.0, 1.0]]
    lines = dict(enumerate(agreement_rows(told)))
    assert lines[0] == ("agreement", "3 steps, 1 without a row of the policy")
    assert lines[1] == ("", "by row of a chunk, 0, 1:")
    assert lines[2][1] == "a: p50 1, p95 1.9, -7 % explained; by row 1, 2"
    assert lines[3][1] == "1: p50 2, p95 2, - explained; by row 2, 1"
    assert agreement_rows(ShadowAgreement().to_dict()) == [
        ("agreement", "0 steps, 0 without a row of the policy")
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    answers=st.lists(st.sampled_from([*sorted(BAD), "good", "silent"]), min_size=1, max_size=12),
    blind=st.lists(st.integers(0, 39), max_size=6),
)
def test_a_shadow_drives_nothing_whatever_a_server_answers(answers: list[str], blind: list[int]) -> None:
    """Each step's command is the person's; what answered is compared, and nothing of it is sent. The server here is
    asked anew in every step, so none of the steps waits for a chunk."""

    class Lying(Policy):
        def poll(self, now: float) -> Outcome | None:
            if super().poll(now) is None:
                return None
            kind = answers[self.asked % len(answers)]
            if kind in ("good", "silent"):
                return Outcome(np.full((8, DIM), 1.9, np.float32)) if kind == "good" else None
            found = BAD[kind]()
            return Outcome(reason=repr(found)) if isinstance(found, BaseException) else Outcome(found)

    class Blind(Robot):
        def observe(self) -> dict[str, Any]:
            if len(self.sent) in blind:
                raise NoObservation("dark")
            return super().observe()

    robot, hand = Blind([0.0, 0.2, 0.0]), Hand([0.0, 0.2, 0.0])
    free = {"names": list(NAMES)}
    loop = loop_of(
        robot, Lying(np.random.default_rng(0)), hand, shadow=True, replan="1", limits=free, align=1.0
    )
    led = []
    for step in range(40):
        hand.at = np.float32([0.1 * np.sin(step), 0.2, 0.1 * np.cos(step)])
        led.append(hand.at)
        until(loop, step + 1)
    assert len(robot.sent) == 40
    for sent, wanted in zip(robot.sent, led, strict=True):
        assert sent is None or (sent == wanted).all()
    assert sum(sent is None for sent in robot.sent) <= len(set(blind)) + 1  # at most while it aligned unseen
    report = loop.report().agreement
    assert report["steps"] + report["missing"] == sum(sent is not None for sent in robot.sent)
    if set(answers) == {"good"} and not blind:
        assert report["missing"] == 0  # a server that is there leaves no step without a row

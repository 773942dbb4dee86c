"""The trajectory buffer against a plain model, its fusion rules, and a reader beside a writer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sinew_client.control import Fusion, Node, Trajectory, parse_fusion
from sinew_client.control.blend import AGGREGATES
from sinew_client.control.reaction import Reactions, histogram
from sinew_client.control.report import percentiles

RULES = [*AGGREGATES, "mix:0.25", "ramp:3"]


class TrajectoryModel(RuleBasedStateMachine):
    """Nodes as a list of (step, value) that is searched, and a number that says up to where they are committed."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Trajectory(history=8)
        self.nodes: list[tuple[int, float]] = []
        self.committed = -1
        self.sent: dict[int, float] = {}
        self.windows = 0

    def value(self, step: int) -> float | None:
        return next((value for at, value in self.nodes if at == step), None)

    @rule(first=st.integers(0, 40), count=st.integers(1, 12), kind=st.sampled_from(RULES))
    def window(self, first: int, count: int, kind: str) -> None:
        """Fuse a window of nodes with what is there."""
        self.windows += 1
        rows = [Node(first + k, np.float32([self.windows]), first, self.windows, k) for k in range(count)]
        self.real.put(self.real.fused(rows, parse_fusion(kind)))
        changeable = max(first, self.committed + 1)
        for step in range(changeable, first + count):
            old = self.value(step)
            weight = parse_fusion(kind).weight(step - changeable)
            new = self.windows if old is None else (1 - weight) * old + weight * self.windows
            self.nodes = [node for node in self.nodes if node[0] != step] + [(step, float(new))]

    @rule(ahead=st.integers(1, 5))
    def take(self, ahead: int) -> None:
        """Commit the next step, or one further on."""
        step = self.committed + ahead
        node, expected = self.real.take(step), self.value(step)
        assert (node is None) == (expected is None)
        if node is not None:
            assert node.row[0] == pytest.approx(expected, rel=1e-5)
            self.real.commanded(step, node.row)
            self.sent[step] = float(node.row[0])
        self.committed = step
        self.nodes = [found for found in self.nodes if found[0] > step]
        with pytest.raises(ValueError, match="already has its command"):
            self.real.take(step)

    @rule(step=st.integers(0, 50))
    def cut(self, step: int) -> None:
        self.real.cut(step)
        self.nodes = [node for node in self.nodes if node[0] < step]

    @rule()
    def clear(self) -> None:
        self.real.clear()
        self.nodes = []

    @invariant()
    def same(self) -> None:
        assert len(self.real) == len(self.nodes)
        assert self.real.next == self.committed + 1
        for step in range(52):
            node = self.real.at(step)
            assert (None if node is None else pytest.approx(node.row[0], rel=1e-5)) == self.value(step)

    @invariant()
    def what_is_to_come_is_counted_up_to_the_first_gap(self) -> None:
        for step in (self.real.next, self.real.next + 3):
            rows = []
            while (value := self.value(step + len(rows))) is not None:
                rows.append(value)
            assert self.real.left(step) == len(rows)
            assert self.real.rows_from(step).ravel().tolist() == pytest.approx(rows, rel=1e-5)

    @invariant()
    def what_was_sent_stays(self) -> None:
        """Committed rows are read as they were commanded, whatever was written since."""
        for step in range(max(0, self.committed - 7), self.committed + 1):
            rows = self.real.rows_from(step)
            if step in self.sent:
                assert rows[0, 0] == self.sent[step]
            else:
                assert not len(rows)


TrajectoryModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTrajectoryModel = TrajectoryModel.TestCase


def test_what_was_sent_is_forgotten_whatever_steps_are_left_out() -> None:
    """A run of days needs no more memory than one of seconds."""
    trajectory, kept = Trajectory(history=3), []
    steps = (0, 1, 2, 3, 5, 9)
    for step in steps:
        trajectory.take(step)
        trajectory.commanded(step, np.float32([step]))
        kept.append([at for at in steps if len(trajectory.rows_from(at))])
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [3, 5], [9]]


def test_what_is_committed_is_gone() -> None:
    trajectory = Trajectory()
    assert (trajectory.next, len(trajectory), trajectory.rows_from(0).shape) == (0, 0, (0, 0))
    assert trajectory.fused([], Fusion()) == []
    trajectory.put([Node(step, np.zeros(1, np.float32), 0, 0, step) for step in (0, 1, 2, 3, 5)])
    assert trajectory.take(0) is not None
    assert (trajectory.next, len(trajectory), trajectory.at(0)) == (1, 4, None)
    assert [trajectory.left(step) for step in range(7)] == [0, 3, 2, 1, 0, 1, 0]


def test_a_reader_beside_a_writer() -> None:
    """Every node that is read is whole and of the newest window that was complete before, and nothing is read twice."""
    trajectory, steps, width = Trajectory(), 3000, 16
    began, done = threading.Event(), threading.Event()

    def write() -> None:
        window = 0
        while not done.is_set():
            first = trajectory.next
            rows = [
                Node(s, np.float32([window, window]), first, window, s - first)
                for s in range(first, first + width)
            ]
            trajectory.put(trajectory.fused(rows, Fusion()))
            window += 1
            began.set()

    writer = threading.Thread(target=write)
    writer.start()
    began.wait()
    try:
        found = [trajectory.take(step) for step in range(steps)]
    finally:
        done.set()
        writer.join()
    read = [node for node in found if node is not None]
    assert read
    assert all(node.row[0] == node.row[1] == node.chunk for node in read)
    assert len(trajectory) <= width  # what was committed while it was written does not stay


def test_a_row_that_is_committed_while_it_is_written_does_not_stay() -> None:
    trajectory = Trajectory()

    class Meanwhile(dict):
        def __setitem__(self, step: int, node: Node) -> None:
            trajectory.take(step)  # the reader, between the writer's look and its writing
            super().__setitem__(step, node)

    trajectory._nodes = Meanwhile()
    trajectory.put([Node(step, np.zeros(1, np.float32), 0, 0, step) for step in range(3)])
    assert not len(trajectory)
    assert trajectory.next == 3


def test_rules_of_fusion() -> None:
    assert Fusion(0.0, 1.0, 2)(np.zeros(1), np.ones(1)) == 0.0  # of the first row that can change
    for near, far in ((0.0, 1.0), (1.0, 0.0)):
        assert [Fusion(near, far, 2).weight(k) for k in (-1, 0, 1, 2, 9)] == [near, near, 0.5, far, far]
    for given, message in (
        ((-0.1, 1.0), "fusion: expected weights from 0 to 1, got -0.1 and 1.0"),
        ((1.1, 1.0), "fusion: expected weights from 0 to 1, got 1.1 and 1.0"),
        ((0.5, -0.1), "fusion: expected weights from 0 to 1, got 0.5 and -0.1"),
        ((0.5, 1.1), "fusion: expected weights from 0 to 1, got 0.5 and 1.1"),
        ((0.5, 0.5, -1), "fusion: expected 0 or more actions, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Fusion(*given)
    for text in ("mix:x", "mix:", "ramp:1.5", "ramp:-1", "ramp:-2"):
        with pytest.raises(ValueError, match=f"^fusion: expected mix:WEIGHT or ramp:ROWS, got '{text}' "):
            parse_fusion(text)
    for text in ("", "mean", "mix:2", "average:1"):
        with pytest.raises(ValueError, match="fusion"):
            parse_fusion(text)
    assert [round(parse_fusion("ramp:3").weight(k), 3) for k in range(-1, 5)] == [0.25, 0.25, 0.5, 0.75, 1, 1]
    assert parse_fusion("mix:0.25").weight(9) == 0.25
    assert parse_fusion("ramp:0") == Fusion()
    mixed = Fusion(0.25, 0.75, 2)(np.float32([0, 4]), np.float32([4, 0]), 1)
    assert (mixed.tolist(), mixed.dtype) == ([2, 2], np.float32)
    assert Fusion(0.25, 0.25)(np.float32([0]), np.float32([4])).tolist() == [1]
    new = np.float32([3.0])  # nothing of the old row, not even NaN
    assert parse_fusion("latest_only")(np.float32([np.nan]), new) is new


def test_reactions_are_told_by_what_rows_were_made_from() -> None:
    reactions = Reactions()
    for tick in range(100):  # samples 1 tick old, frames of 10 ticks, 5 old when they are used
        reactions.add(tick, tick - 1, (tick - 5) // 10 * 10)
    assert reactions.of("sensor", [3.0, 3.5, 98.5]) == [1.0, 1.5]  # nobody knew of the last one
    assert reactions.of("image", [20.0, 20.5]) == [5.0, 14.5]
    assert max(reactions.anywhere("sensor")) <= 2.0
    assert set(reactions.summary()["image_reaction_ms"]) == {"p50", "p95", "p99", "max"}
    known = Reactions()
    assert (known.of("sensor", [1.0]), known.summary()["sensor_age_ms"]) == ([], {})
    for row in ((10.0, -100.0, -200.0), (11.0, 10.5, 10.0), (30.0, 20.5, 20.0)):
        known.add(*row)
    assert known.ages("sensor") == [110.0, 0.5, 9.5]
    assert known.ages("image") == [210.0, 1.0, 10.0]
    assert 19.4 < max(known.anywhere("sensor")) <= 19.5  # of what happened after the first row alone
    assert 1000 < len(known.anywhere("sensor")) < 1100  # and up to the last row, which knew of 10.5 of 20 s
    assert known.summary() == {
        f"{loop}_{what}_ms": percentiles(1000.0 * each for each in found)
        for loop in ("sensor", "image")
        for what, found in (("reaction", known.anywhere(loop)), ("age", known.ages(loop)))
    }
    few = Reactions()
    for moment in (0.0, 10.0):
        assert (
            few.anywhere("image") == few.anywhere("sensor") == []
        )  # between fewer than two rows nothing lies
        few.add(moment, moment, moment)
    found = few.anywhere("sensor")
    assert len(found) == 2000
    assert min(found) < 1 < 9 < max(found) <= 10  # up to the last row


def test_a_histogram_has_round_bins_and_few_of_them() -> None:
    assert histogram([]) == {}
    assert histogram([0.5, 39.0, 39.5]) == {"0": 1, "39": 2}
    assert histogram([0.5, 39.0, 40.0]) == {"0": 1, "39": 1, "40": 1}  # 40 bins of 1 up to the largest
    assert histogram([0.5, 43.0]) == {"0": 1, "42": 1}
    assert histogram([0.43]) == {"0.42": 1}
    assert histogram([0.5, 41.0]) == {"0": 1, "40": 1}  # bins of 2
    assert histogram([100.0, 250.0], bins=5) == {"100": 1, "250": 1}  # and of 50 there
    assert histogram([0.1, 0.3, 0.31], width=0.1) == {"0.1": 1, "0.3": 2}
    assert histogram([0.0]) == {"0": 1}
    assert histogram([0.1, 0.9, 2.5], 1.0) == {"0": 2, "2": 1}

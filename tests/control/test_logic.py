"""Hand-overs, delay, when to ask, limits, relative actions: the rules without clocks or sockets."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sinew_client import ClientError
from sinew_client.control import (
    Absolute,
    Controller,
    Guard,
    Limits,
    LimitsError,
    Offsets,
    Player,
    Relative,
    Settings,
    SettingsError,
    parse_handover,
    parse_rule,
)
from sinew_client.control.authority import ALIGNS, SILENT
from sinew_client.control.blend import AGGREGATES, ensemble, guidance_weights, ramp_strength
from sinew_client.control.controller import HALTED, STARVED, UNTRAINED
from sinew_client.control.delay import DelayEstimate
from sinew_client.control.handover import Handover, PlacedChunk
from sinew_client.control.motion import Motion, interpolate, parse_motion
from sinew_client.control.observer import exposed, float_of, frame_fault, sources_fault
from sinew_client.control.replan import ReplanState, disagreement
from sinew_client.control.safety import OUTSIDE, UNPLACED, RowsError, Verdict, _braking, checked_rows
from sinew_client.control.trajectory import Trajectory
from sinew_client.streams import StreamWindow


def play(
    handover: str, delays: list[int], steps: int, size: int = 8, replan: str = "4", **options: Any
) -> list[float]:
    """Return what is executed; row r of chunk c is 100 c + r, -1 is a hold. Chunk k is ``delays[k]`` steps late."""
    controller = Controller(Player(parse_handover(handover), parse_rule(replan), **options))
    found, due, asked = [], -1, 0
    for step in range(steps):
        for _ in range(2):  # an answer frees the policy for a question; without latency it is there at once
            if controller.player.waiting and step >= due:
                controller.arrived(step, (100.0 * (asked - 1) + np.arange(size, dtype=np.float32))[:, None])
            elif controller.wants_chunk(step):
                controller.ask(step, step, np.zeros(1, np.float32))
                due, asked = step + delays[min(asked, len(delays) - 1)], asked + 1
        if controller.player.waiting and step >= due:
            controller.arrived(step, (100.0 * (asked - 1) + np.arange(size, dtype=np.float32))[:, None])
        command = controller.command(step)
        found.append(-1.0 if command.row is None else float(command.row[0]))
    return found


# ----------------------------------------------------------------------------- hand-overs


def test_aggregates_mix_the_steps_that_both_chunks_have() -> None:
    # Asked at 0 and 4, there at 1 and 6: steps 6 to 8 are rows 5 to 7 of chunk 0 (it started at 1), 2 to 4 of 1.
    for name, mix in AGGREGATES.items():
        got = play(f"aggregate:{name}", [1, 2], 9)
        assert got[:6] == [-1, 0, 1, 2, 3, 4]
        old, new = np.array([5, 6, 7]), np.array([102, 103, 104])
        np.testing.assert_allclose(got[6:], mix(old, new), rtol=1e-6)
    assert AGGREGATES["weighted_average"](np.array(1.0), np.array(2.0)) == pytest.approx(1.7)
    assert AGGREGATES["conservative"](np.array(1.0), np.array(2.0)) == pytest.approx(1.3)


def test_ensemble_weighs_the_oldest_chunk_most() -> None:
    rows = [np.array([1.0]), np.array([2.0]), np.array([4.0])]
    weights = np.exp(-0.5 * np.arange(3))
    assert ensemble(rows, 0.5)[0] == pytest.approx(float((weights * [1, 2, 4]).sum() / weights.sum()))
    same = np.float32([0.1, 1 / 3])
    assert np.array_equal(ensemble([same] * 7, 0.01), same)  # to the bit
    # Asked at every step without latency: step 2 is row 2, 1 and 0 of three chunks.
    got = play("ensemble:0.01", [0], 3, replan="1")
    weights = np.exp(-0.01 * np.arange(3))
    assert got[2] == pytest.approx(float((weights * [2, 101, 200]).sum() / weights.sum()), rel=1e-6)


def test_ensemble_weighs_by_how_alike_rows_are_to_the_newest() -> None:
    """CogACT's adaptive ensemble: the softmax of alpha times the cosine, over the newest chunks."""
    rows = np.random.default_rng(3).standard_normal((3, 4))
    cosines = [row @ rows[2] / (np.sqrt(row @ row) * np.sqrt(rows[2] @ rows[2]) + 1e-7) for row in rows]
    shares = np.exp(2.5 * np.array(cosines)) / np.exp(2.5 * np.array(cosines)).sum()
    np.testing.assert_allclose(ensemble(list(rows), alpha=2.5), shares @ rows, rtol=1e-6)
    same = np.float32([0.1, 1 / 3])
    assert np.array_equal(ensemble([same] * 7, alpha=0.1), same)  # to the bit
    assert ensemble([same, np.zeros(2)], alpha=0.1) == pytest.approx(same / 2)  # a row of zeros is like none
    assert np.array_equal(ensemble([-same, same], alpha=1e9), same)  # a weight of any size is a number
    # Rows of one number all point the same way: plain means, of the last two of three chunks here.
    assert play("ensemble:cosine:0.1:2", [0], 3, replan="1")[2] == pytest.approx((101 + 200) / 2)
    assert play("ensemble:cosine", [0], 3, replan="1")[2] == pytest.approx((2 + 101 + 200) / 3)
    parsed = parse_handover("ensemble:cosine:0.1:7")
    assert (parsed.method, parsed.alpha, parsed.newest) == ("ensemble", 0.1, 7)
    assert parse_handover("ensemble").decay == 0.01  # ACT's m


def test_real_time_chunking_says_what_is_still_to_come() -> None:
    player = Player(parse_handover("rtc:guided:linear:3"), parse_rule("4"))
    assert player.ask(0, 0).fields == {}  # nothing to continue
    player.accept(np.arange(8, dtype=np.float32)[:, None], 2)
    for step in range(2, 6):
        node = player.take(step)
        assert node is not None
        player.commanded(step, node.row * 10)  # the limits changed it: what was commanded counts
    fields = player.ask(6, 5).fields
    assert fields["previous"].ravel().tolist() == [30, 4, 5, 6, 7]  # row 0 belongs to the frame at step 5
    assert (fields["delay"], fields["horizon"]) == (1 + 2, 4)
    assert (fields["rtc"], fields["schedule"], fields["beta"]) == ("guided", "linear", 3.0)
    player.accept(np.arange(100, 108, dtype=np.float32)[:, None], 7)
    node = player.take(7)
    assert node is not None
    assert node.row[0] == 102  # row 2 belongs to step 7: one for the old frame, one for the delay
    player.restart(8)
    assert player.ask(9, 9).fields == {}  # after a stop there is nothing to continue


def test_a_new_controller_has_done_nothing() -> None:
    for controller in (Settings(20.0).of_chunks(1), Settings(20.0, fusion="average").of_stream(1)):
        assert (controller.paused, controller.driver, controller.shadow, controller.said) == (
            False,
            "policy",
            False,
            "",
        )
        assert (controller.clipped_commands, controller.unanswered, controller.chunks) == (0, 0, 0)
        assert (controller.refines(0), controller.handed.steps) == (False, 0)
        assert not controller.needs_state
        for unanswered in (1, 2):
            controller.failed(0, "gone", "timeout")
            assert (controller.unanswered, controller.faults.total) == (unanswered, unanswered)
        first = controller.command(0)
        assert (first.row, first.age, first.chunk, first.index, first.seam) == (None, -1, -1, -1, False)


def test_a_command_that_was_not_taken_was_none() -> None:
    """Of the policy's, and of who drives in its place: neither its age counts nor the step that was led."""
    controller = Settings(
        20.0, "aligned", limits={"velocity": [10.0], "still": [None]}, motion={"kind": "absolute"}
    )
    found = controller.of_chunks(1)
    found.stands(np.zeros(1))
    found.ask(0, 0)
    found.arrived(0, np.zeros((4, 1), np.float32))
    found.unsent(found.command(0), "it is too far")
    assert (found.ages, found.held) == ({0: 0}, {"it is too far": 1})
    assert found.command(1).reason == "it is too far"
    found.take_over(2)
    found.aligned(2)
    assert found.wants_position(2)  # a leader's row is due, and nothing says where the robot is
    found.stands(np.zeros(1))
    assert not found.wants_position(2)
    found.led(2, np.float32([0.1]))
    found.unsent(found.command(2), "it is too far")
    assert (found.handed.steps, found.held["it is too far"]) == (0, 3)
    assert found.trajectory.next == 3  # steps go by, whoever drives


def test_who_drives_in_the_policys_place_is_followed_step_by_step() -> None:
    settings = Settings(
        20.0, "aligned", limits={"velocity": 1000.0, "names": ["a"]}, motion={"kind": "absolute"}
    )
    controller = settings.of_chunks(1)
    controller.stands(np.zeros(1))
    controller.ask(0, 0)
    controller.arrived(0, np.ones((9, 1), np.float32))
    assert (controller.command(0).by, controller.handed.steps) == ("policy", 0)
    controller.ask(1, 1)
    controller.take_over(1)
    assert (controller.trajectory.left(1), controller.player.waiting) == (
        0,
        False,
    )  # what was planned, and asked for
    found = [controller.command(1)]
    controller.aligned(2)
    for step, row, reason in (
        (2, [0.5], ""),
        (3, [0.75], ""),
        (4, None, "the button"),
        (5, None, ""),
        (6, None, "left"),
    ):
        controller.led(step, None if row is None else np.float32(row), reason)
        found.append(controller.command(step))
    found.append(controller.command(7))  # of which the leader says nothing
    assert [(command.row, command.reason, command.by) for command in found] == [
        (None, ALIGNS, "aligning"),
        (0.5, "", "human"),
        (0.75, "", "human"),
        *[(None, reason, "human") for reason in ("the button", SILENT, "left", SILENT)],
    ]
    assert {(c.age, c.chunk, c.index, c.seam) for c in found if c.row is None} == {(-1, -1, -1, False)}
    assert {(c.age, c.chunk, c.index, c.seam) for c in found if c.row is not None} == {(0, -1, -1, False)}
    assert (controller.handed.steps, controller.ages, controller.wants_chunk(8)) == (2, {0: 1}, False)
    controller.hand_back(8)
    assert (controller.driver, controller.wants_chunk(8)) == ("policy", True)
    counts = {"to_human": 1, "to_policy": 1, "steps": 2, "largest": 0.5, "number": "a", "unknown": 0}
    assert controller.handed.to_dict() == counts
    assert controller.command(8).reason == "no chunk yet"
    shadowed = settings.of_chunks(1)
    shadowed.take_over(0, shadow=True)
    shadowed.pause()
    held = shadowed.command(0)
    assert (held.row, held.reason, held.by) == (None, "paused", "aligning")
    for here in (shadowed, controller):  # a leader that has led so far has ended with the pause
        here.pause()
    assert (shadowed.driver, controller.driver) == ("aligning", "policy")


def test_what_a_shadow_wants_is_as_old_as_it_may_be() -> None:
    controller = Settings(20.0, "aligned", max_age=0.1, motion={"kind": "absolute"}).of_chunks(1)
    controller.take_over(0, shadow=True)
    controller.ask(0, 0, np.zeros(1))
    controller.failed(0, "gone")
    controller.ask(0, 0, np.zeros(1))
    controller.arrived(0, np.ones((6, 1), np.float32))
    assert controller.unanswered == 0
    wanted = [controller.command(step, np.zeros(1)).wanted for step in range(5)]
    controller.ask(5, 4, np.zeros(1))
    controller.arrived(5, np.ones((6, 1), np.float32))
    wanted += [controller.command(step, np.zeros(1)).wanted for step in (5, 6, 7)]
    assert [each is not None for each in wanted] == [True, True, True, False, False, True, True, False]


@pytest.mark.parametrize("holds", [False, True])
def test_a_robot_that_was_sent_nothing_in_one_step_starts_from_rest(holds: bool) -> None:
    settings = Settings(20.0, "aligned", limits={"acceleration": 1.0}, motion={"kind": "absolute"})
    controller, push, at = settings.of_chunks(1), 1.0 / 20**2, [0.0]
    controller.stands(np.zeros(1))
    controller.ask(0, 0)
    controller.arrived(0, np.full((9, 1), 5.0))
    for step in (0, 1, 2, 4, 5):
        if step == 4 and holds:
            controller.fault(3, "dark")
            assert controller.command(3).row is None
            controller.ask(4, 4)
            controller.arrived(4, np.full((9, 1), 5.0))
        row = controller.command(step).row
        assert row is not None
        at.append(float(row[0]))
    np.testing.assert_allclose(np.diff(at), push * np.array([1, 2, 3, 1, 2]), atol=1e-6)


def test_what_limits_change_is_counted_by_name() -> None:
    for when, reason in (("clip", ""), ("hold", "beyond 1.workspace")):
        limits = {"high": [1, None], "workspace_high": [None, 2], "when": when}
        controller = Settings(20.0, "aligned", limits=limits, motion={"kind": "absolute"}).of_chunks(2)
        controller.ask(0, 0, np.zeros(2))
        controller.arrived(0, np.float32([[0, 1.5], [0, 2.5], [0.5, 2]]))
        found = [controller.command(step, np.zeros(2)) for step in range(2)]
        assert [(c.reason, c.clipped) for c in found] == [("", ()), (reason, ("1.workspace",))]
        assert (found[1].row is None) == bool(reason)
        assert (controller.clipped, controller.clipped_commands) == ({"1.workspace": 1}, 1)


def test_a_controller_that_goes_on_stands_where_holding_left_it() -> None:
    motion = {"kind": "offsets", "action": [0], "state": [0]}
    for moved, position, here in (
        (False, None, 0.0),
        (True, np.float32([7.0]), 0.0),
        (False, np.float32([7.0]), 0.0),
    ):
        controller = Settings(20.0, "aligned", limits={"velocity": 100.0}, motion=motion).of_chunks(1)
        assert controller.guard is not None
        assert controller.guard.check(np.float32([3.0])).row == 3.0
        controller.resume(position, moved)
        assert controller.guard.here == here  # offsets of 0, wherever it is


def test_a_filter_begins_where_the_robot_is() -> None:
    """Where it was sent, or where its state says if rows are measured from that; at the first row where none does."""

    def controller(kind: str, **limits: float) -> Controller:
        motion = {"kind": kind, "action": [0], "state": [0]}
        return Settings(20.0, "aligned", filter="ema:0.5", motion=motion, limits=limits).of_chunks(1)

    def first(step: int, value: float, state: float = 9.0) -> float:
        found.ask(step, step, np.full(1, state))
        found.arrived(step, np.full((9, 1), value))
        row = found.command(step, np.full(1, state)).row
        assert row is not None
        return float(row[0])

    found = controller("absolute", high=4.0)
    assert first(0, 8.0) == 4.0
    found.fault(1, "dark")
    found.command(1, np.full(1, 9.0))
    assert first(2, 0.0) == 2.0  # from 4, as it was sent
    assert [found.command(step).row for step in (3, 4)] == [1.0, 0.5]
    found.take_over(5)
    found.command(5)
    found.aligned(6)
    found.led(6, np.ones(1, np.float32))
    found.command(6)
    found.hand_back(7)
    assert first(7, 3.0) == 2.0  # from where a person has led it
    found.fault(8, "elsewhere", moved=True)
    assert first(8, 3.5) == 3.5
    for step, position, moved, value, row in (
        (9, None, False, 1.5, 2.5),
        (10, np.full(1, 0.5), False, 2.5, 1.5),
        (11, None, True, 3.0, 3.0),
    ):
        found.pause()
        found.resume(position, moved)
        assert first(step, value) == row
    found = controller("relative")
    assert first(0, 1.0, 2.0) == 3.0
    found.fault(1, "dark")
    found.command(1, np.ones(1))
    assert first(2, 2.0, 1.0) == 2.0  # from 1 to 3


def test_a_stream_that_a_person_drives_beside_keeps_nothing_of_it() -> None:
    controller = Settings(20.0, fusion="latest_only").of_stream(1)
    found = []
    for step in range(6):
        if step == 1:
            controller.take_over(1)
            controller.aligned(1)
        if step == 4:
            controller.hand_back(4)
        if step != 4:
            window = np.full((5, 1), step, np.float32)
            controller.arrived(
                step, StreamWindow(step, window, (step - 0.5) / 20.0 if step else 0.0, step / 20.0)
            )
        controller.ask(step, step, time=step / 20.0)
        controller.led(step, np.full(1, 7.0, np.float32))
        command = controller.command(step)
        found.append(command.reason or float(command.row[0]))
        assert len(controller.trajectory) == (0 if step == 4 else 4)
    assert found == [0.0, 7.0, 7.0, 7.0, "no window yet", 5.0]


def test_a_command_says_which_row_it_is_and_where_a_new_chunk_begins() -> None:
    controller = Controller(Player(parse_handover("aligned"), parse_rule("2")))
    found = []
    for step in range(7):
        if step in (0, 2):
            controller.ask(step, max(0, step - 1))  # the second frame is a step old
            controller.arrived(step, np.full((4, 1), step, np.float32))
        command = controller.command(step)
        found.append((command.chunk, command.index, command.age, command.seam))
    assert found == [
        *[(0, 0, 0, False), (0, 1, 1, False)],  # nothing was before the first chunk
        *[(1, 1, 1, True), (1, 2, 2, False), (1, 3, 3, False)],
        *[(-1, -1, -1, False)] * 2,
    ]
    again = Controller(Player(parse_handover("aligned"), parse_rule("2")))
    for step in (0, 1):
        again.ask(step, step)
        again.arrived(step, np.zeros((4, 1), np.float32))
        if step == 0:
            again.pause()
            again.resume()
    command = again.command(1)  # nothing of the first chunk was executed
    assert (command.chunk, command.seam) == (1, False)
    assert controller.ages == {0: 1, 1: 2, 2: 1, 3: 1}
    assert controller.held == {STARVED: 2}


def begun(handover: str, rule: str, rows: list[float], steps: int, **options: Any) -> Player:
    """Return a player that has played so many steps of a chunk that was there at once."""
    player = Player(parse_handover(handover), parse_rule(rule), **options)
    player.ask(0, 0)
    player.accept(np.float32(rows)[:, None], 0)
    for step in range(steps):
        node = player.take(step)
        assert node is not None
        player.commanded(step, node.row)
    return player


def test_rows_that_were_executed_are_not_continued() -> None:
    player = begun("rtc", "2", [0, 1, 2], 3)
    assert player.trajectory.rows_from(1).ravel().tolist() == [1, 2]  # which a frame of step 1 has behind it
    assert "previous" not in player.ask(3, 1).fields
    assert begun("rtc", "2", [0, 1, 2], 2).ask(2, 1).fields["previous"].ravel().tolist() == [1, 2]


def test_a_first_frame_from_before_the_beginning_has_rows_from_before_it() -> None:
    player = Player(parse_handover("aligned"), parse_rule("full"))
    assert (player.stopping, player.halted, player.wants_chunk(0)) == (False, False, True)
    player.ask(0, -2)
    player.accept(np.zeros((5, 1), np.float32), 0)
    node = player.take(0)
    assert node is not None
    assert node.index == 2
    assert [player.wants_chunk(step) for step in (1, 2, 3)] == [False, False, True]  # when no row is left


def test_a_shorter_chunk_leaves_nothing_of_a_longer_one() -> None:
    player = begun("aligned", "2", [0, 1, 2, 3, 4, 5, 6, 7], 2)
    player.ask(2, 2)
    player.accept(np.float32([[12], [13]]), 2)
    assert player.trajectory.rows_from(2).ravel().tolist() == [12, 13]


def test_a_robot_stops_only_where_a_delay_is_longer_than_what_was_trained() -> None:
    for committed, delay, stops in ((3, 3, False), (3, 4, True), (1, 1, False), (1, 2, True), (0, 4, False)):
        player = begun("rtc", "2", list(range(9)), 2, committed_rows=committed)
        for _ in range(2):
            player.delay.add(delay)
        fields = player.ask(2, 2).fields
        assert (player.stopping, fields["delay"]) == (stops, min(delay, committed) if committed else delay)
        assert len(fields["previous"]) == (committed if stops else 7)
        player.failed()
        player.delay = DelayEstimate()  # of a network that has recovered
        player.ask(2, 2)
        assert not player.stopping


def test_a_chunk_halts_by_the_last_row_that_has_passed() -> None:
    """One row or all of them; what stands still for that takes the next one as it is."""
    edge = begun("aligned+halt:0.5", "full", [0, 1, 2, 3, 4, 5], 1, refine=3)
    edge.ask(1, 0)
    assert edge.refines(1)  # also while a request is under way
    edge.accept(np.float32([[0.5], [1]]), 1)
    assert not edge.halted  # by just as much as it may
    for passed in (1, 2):
        for wrong in (False, True):
            player = begun("aligned+halt:0.5", "full", [0, 1, 2, 3, 4, 5], passed)
            player.ask(passed, 0)
            rows = np.float32([[0], [1]])
            rows[passed - 1] += 9 * wrong
            player.accept(rows, passed)
            assert (player.halted, player.halts) == (wrong, int(wrong))
            player.ask(passed, 0)
            player.accept(rows + np.float32(90), passed)
            assert player.halted == (not wrong)


def test_a_chunk_that_contradicts_its_predecessor_is_asked_about_at_once() -> None:
    for shift, due in ((0.4, False), (0.6, True)):
        player = begun("aligned", "disagreement:0.5,6", [0, 1, 2, 3, 4, 5, 6, 7], 2)
        player.ask(2, 2)
        player.accept(np.arange(2, 10, dtype=np.float32)[:, None] + np.float32(shift), 2)
        player.take(2)
        assert player.wants_chunk(3) == due


def test_a_chunk_that_is_there_at_once_is_never_behind_the_robot() -> None:
    """None of its rows has passed, so that there is nothing that it could have expected."""
    assert play("aligned+halt:1.5", [0], 9) == play("aligned", [0], 9)


def test_a_robot_that_never_moved_contradicts_no_chunk() -> None:
    """Its first row was refused by the limits, so that nothing was executed in the step that the answer has behind."""
    player, rows = Player(parse_handover("aligned+halt:1"), parse_rule("1")), np.float32([[0], [9]])
    player.ask(5, 5)
    player.accept(rows, 5)
    player.ask(5, 4)
    player.take(5)
    player.restart(5)
    player.accept(rows, 6)
    assert not player.halted
    node = player.take(6)
    assert node is not None
    assert (node.chunk, node.index) == (1, 1)


def test_an_adapter_refines_the_newest_chunk_for_as_long_as_it_may() -> None:
    for handover in ("aligned", "ensemble"):
        player = begun(handover, "2", [0, 1, 2, 3, 4], 1, refine=2)
        player.ask(1, 1)
        player.accept(np.float32([[11], [12], [13], [14]]), 1)
        assert [player.refines(step) for step in (0, 1, 3, 4)] == [False, True, True, False]
        assert [player.age(step) for step in (1, 3)] == [0, 2]
        player.refined(np.float32([[50], [51]]), 2)
        player.take(1)
        nodes = [player.take(step) for step in (2, 3)]
        assert [(node.chunk, node.index, node.frame, float(node.row[0])) for node in nodes if node] == [
            (1, 1, 1, 50.0),
            (1, 2, 1, 51.0),
        ]
    assert not begun("aligned", "2", [0, 1, 2], 1).refines(1)  # nobody is there to refine
    beyond = begun("aligned", "queue:0.5", [0, 1, 2, 3], 2, refine=9)
    beyond.refined(
        np.zeros((8, 1), np.float32), 2
    )  # rows that are made anew in each step are none that are left
    assert [beyond.wants_chunk(step) for step in (1, 2, 4)] == [False, True, True]
    for handover, frame, asks in (
        ("aligned", 0, [False, True, True]),
        ("ensemble", 2, [False, False, False]),
    ):
        late = begun(handover, "full", [0, 1, 2, 3], 2, refine=9)
        late.ask(2, frame)
        late.accept(np.zeros((4, 1), np.float32), 2)
        late.refined(np.zeros((8, 1), np.float32), 2)
        assert [late.wants_chunk(step) for step in (3, 4, 5)] == asks  # the newest chunk ends with its rows
    none = Player(parse_handover("aligned"), parse_rule("2"), refine=2)
    assert none.wants_chunk(0)
    assert not none.refines(0)
    stopped = begun("freeze", "2", [0, 1, 2], 2, refine=5)
    stopped.ask(2, 2)
    assert not stopped.refines(2)


def test_a_hold_after_a_chunk_has_its_own_reason_and_listeners_hear_of_everything() -> None:
    controller, heard = Controller(Player(parse_handover("aligned"), parse_rule("2"))), []
    controller.listeners.append(lambda event, values: heard.append((event, values)))
    controller.ask(0, 0)
    controller.fault(0, "blind")
    assert controller.command(0).reason == "blind"
    controller.ask(1, 1)
    controller.arrived(1, np.zeros((1, 1), np.float32))
    assert controller.command(1).row is not None
    assert controller.command(2).reason == STARVED  # and not of the fault that is over
    controller.failed(3, "no network")
    controller.pause()
    controller.resume()
    events = [event for event, _ in heard]
    faulted = ["ask", "fault", "command", "ask", "arrived", "command", "command"]
    assert events == [*faulted, "failed", "pause", "resume"]
    assert heard[1] == ("fault", {"step": 0, "reason": "blind", "moved": False})
    assert heard[7] == ("failed", {"step": 3, "reason": "no network", "kind": ""})


def test_a_chunk_after_the_rows_ran_out_starts_where_the_robot_stands() -> None:
    # Chunk 1 is asked for at 6 with the last two rows to come: they are executed, three steps of standing still are
    # not, so it goes on with its row 2.
    assert play("aligned", [0, 5], 16, replan="6") == [*range(8), -1, -1, -1, 102, 103, 104, 105, 106]
    # Later than a chunk is long: what is left of it was never true, the next one starts at its first row.
    assert play("aligned", [0, 6, 6], 16, size=4) == [0, 1, 2, 3, *[-1] * 6, 100, 101, 102, 103, -1, -1]
    assert play("naive", [0, 5], 13, replan="6")[8:] == [-1, -1, -1, 100, 101]


def test_rows_that_will_be_executed_are_guided() -> None:
    """A delay beyond the rows at hand ends with them, and the horizon leaves the guidance room for them."""
    player = Player(parse_handover("rtc"), parse_rule("2"))
    player.ask(0, 0)
    player.accept(np.zeros((8, 1), np.float32), 0)
    player.delay.add(20)
    player.delay.add(20)
    for step in range(2):
        player.take(step)
        player.commanded(step, np.zeros(1, np.float32))
    fields = player.ask(2, 2).fields
    assert (len(fields["previous"]), fields["delay"], fields["horizon"]) == (6, 6, 2)
    late = begun("rtc", "2", [0, 1, 2, 3], 2)
    late.ask(2, 2)
    late.accept(np.zeros((4, 1), np.float32), 2)
    late.delay.add(20)
    assert late.ask(2, 0).fields["horizon"] == 0  # no row is left for the guidance
    end = min(8 - fields["horizon"], len(fields["previous"]))
    assert guidance_weights(8, fields["delay"], end).tolist() == [1] * 6 + [0] * 2


def test_no_more_rows_are_committed_than_the_policy_was_trained_to_continue() -> None:
    """The robot executes three rows of a delay of five, stands still, and goes on where it stopped."""
    late = [0, 0, 5]  # the first answers are there at once; from the third on the delay is known
    got = play("rtc", late, 24, committed_rows=3)
    assert got[:14] == [*range(4), 100, 101, 102, 103, *range(104, 108), -1, 204]
    assert got[14:24] == [205, 206, -1, -1, 303, 304, 305, -1, -1, 403]
    unbound = play("rtc", late, 24)
    assert (unbound[:14], unbound[14:18]) == (got[:14], [205, 206, 207, -1])
    for other in ("rtc:guided", "aligned"):  # where nothing was trained there is no bound
        assert play(other, late, 24, committed_rows=3) == play(other, late, 24)

    controller = Settings(20.0, handover="rtc:trained", replan="2", committed_rows=3).controller(1)
    controller.ask(0, 0)
    controller.arrived(5, np.zeros((8, 1), np.float32))
    for step in range(5, 7):
        controller.command(step)
    fields = controller.ask(7, 6).fields  # a frame of the step before, whose row counts
    assert (len(fields["previous"]), fields["delay"], fields["rtc"]) == (3, 3, "trained")
    reasons = [controller.command(step).reason for step in range(7, 11)]
    assert reasons == ["", "", UNTRAINED, UNTRAINED]


def test_a_chunk_after_a_stop_starts_where_the_robot_stands() -> None:
    controller = Controller(Player(parse_handover("aligned"), parse_rule("2")))
    controller.ask(0, 0)
    controller.arrived(0, np.arange(8, dtype=np.float32)[:, None])
    for step in range(2):
        controller.command(step)
    controller.ask(2, 2)
    controller.command(2)
    controller.command(3)
    controller.player.restart(4)  # two rows were executed since the frame, then the robot stood still
    for step in range(4, 9):
        assert controller.command(step).row is None
    controller.arrived(9, 100 + np.arange(8, dtype=np.float32)[:, None])
    row = controller.command(9).row
    assert row is not None
    assert row[0] == 102


def test_a_chunk_that_expects_the_robot_elsewhere_stops_it() -> None:
    """The robot takes the chunk that was asked for while it stands still, and is stopped by the one after that."""
    controller = Controller(Player(parse_handover("aligned+halt:1.5"), parse_rule("2")))
    found: list[float | str] = []
    chunks = {
        0: (0, 0),
        2: (5, 101),
        5: (8, 300),
        8: (11, 301),
        11: (99, 0),
    }  # asked at: (answered at, row 0)
    for step in range(15):
        request = controller.player.request
        if request is not None and step == chunks[request.step][0]:
            controller.arrived(step, chunks[request.step][1] + np.arange(8, dtype=np.float32)[:, None])
        if controller.wants_chunk(step):
            controller.ask(step, step)
            if chunks[step][0] == step:
                controller.arrived(step, chunks[step][1] + np.arange(8, dtype=np.float32)[:, None])
        command = controller.command(step)
        found.append(command.reason if command.row is None else float(command.row[0]))
    # Chunk 1 had the robot at 103 after step 4, where it is at 4. The last one is one off, which is allowed.
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, *[HALTED] * 3, 300.0, 301.0, 302.0, 304.0, 305.0, 306.0, 307.0]
    assert (controller.player.halts, controller.held[HALTED]) == (1, 3)
    assert play("aligned+halt:1000", [0, 3], 14) == play("aligned", [0, 3], 14)
    assert (
        Offsets((0,), (0,), scale=0.5).apart(np.float32([1, 3]), np.float32([0, 2])) == 2
    )  # units of an action


def test_an_ensemble_goes_on_behind_its_oldest_chunk() -> None:
    old, new = (
        PlacedChunk(np.full((3, 1), value, np.float32), at, at, value) for value, at in ((0, 0), (1, 2))
    )
    nodes = parse_handover("ensemble").merge(Trajectory(), [old, new], 2)
    assert [node.step for node in nodes] == [2, 3, 4]
    assert [round(float(node.row[0])) for node in nodes[1:]] == [1, 1]
    later, new = (
        PlacedChunk(np.arange(3.0)[:, None] + value, at, 2, value) for value, at in ((0, 3), (5, 2))
    )
    first = parse_handover("ensemble").merge(Trajectory(), [later, new], 2)[0]
    assert first.row == 5.0  # a chunk has nothing to say of steps before its own


def test_what_a_handover_takes_behind_its_name() -> None:
    for text, most in (
        ("freeze:1", "freeze has at most 0"),
        ("naive:1", "naive has at most 0"),
        ("aligned:1", "aligned has at most 0"),
        ("ensemble:0.1:2", "ensemble has at most 1"),
        ("ensemble:cosine:0.1:2:3", "ensemble has at most 3"),
        ("aggregate:average:1", "aggregate has at most 1"),
        ("rtc:guided:exp:1:2", "rtc has at most 3"),
    ):
        with pytest.raises(ValueError, match=f"^handover: {most} settings after the colon, got '{text}'$"):
            parse_handover(text)
    for text, beta, schedule in (
        ("rtc:guided", 5.0, "exp"),
        ("rtc:ramp:ones", 5.0, "ones"),
        ("rtc:guided:exp:0", 0, "exp"),
    ):
        found = parse_handover(text)
        assert (found.beta, found.schedule, found.newest, found.alpha) == (beta, schedule, 0, None)
    assert parse_handover("rtc:guided") == Handover("rtc", guidance="guided")
    plain = parse_handover("ensemble:cosine")
    assert (plain.alpha, plain.newest, parse_handover("ensemble:cosine:0.5:1").newest) == (0.1, 0, 1)
    assert (parse_handover("ensemble:0.5").decay, parse_handover("aggregate").mix) == (
        0.5,
        "weighted_average",
    )
    for text in ("ensemble:cosine:0.1:0", "ensemble:cosine:0.1:-1", "ensemble:cosine:0.1:x"):
        with pytest.raises(ValueError, match="^ensemble:cosine: expected a number of chunks from 1 on, got"):
            parse_handover(text)


def test_numbers_of_a_handover_at_their_bounds() -> None:
    assert parse_handover("rtc:guided:exp:0").beta == 0.0
    assert parse_handover("aligned+halt:0.5").halt == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("late", "handover: expected one of freeze"),
        ("naive:1", "has at most 0"),
        ("aggregate:median", "aggregate: expected one of weighted_average"),
        ("ensemble:x", "ensemble: expected a number"),
        ("ensemble:cosine:x", "ensemble:cosine: expected a number"),
        ("ensemble:cosine:nan", "alpha: expected a finite number"),
        ("ensemble:cosine:0.1:2.5", "ensemble:cosine: expected a number of chunks from 1 on, got '2.5'"),
        ("ensemble:cosine:0.1:2:3", "has at most 3"),
        ("rtc:soft", "rtc: expected one of guided"),
        ("rtc::zeros:5", "rtc: expected one of guided"),  # settings of no method would be dropped
        ("rtc:trained:zeros", "rtc:trained has no settings"),
        ("rtc:guided:cosine", "schedule: expected one of exp"),
        ("rtc:guided:exp:-1", "beta: expected a number >= 0"),
        ("rtc:guided:exp:nan", "beta: expected a number >= 0"),
        ("aligned+stop:1", r"expected \+halt:LIMIT"),
        ("aligned+halt:1+halt:2", "halt: expected a number, got '1.halt:2'"),
        ("aligned+halt:0", "halt: expected a number > 0"),
        ("freeze+halt:1", "halt: only aligned, ensemble, aggregate and rtc can halt, got freeze"),
    ],
)
def test_bad_handovers_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_handover(text)


# ----------------------------------------------------------------------------- weights


def test_weights_of_the_paper() -> None:
    linear = [1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0]
    np.testing.assert_allclose(guidance_weights(10, 2, 6, "linear"), linear, atol=1e-12)
    np.testing.assert_allclose(
        guidance_weights(10, 2, 6, "exp"), [1, 1, 0.571, 0.287, 0.114, 0.026, 0, 0, 0, 0], atol=1.1e-3
    )
    assert guidance_weights(10, 2, 6, "ones").tolist() == [1] * 6 + [0] * 4
    assert guidance_weights(10, 2, 6, "zeros").tolist() == [1] * 2 + [0] * 8


def test_the_ramp_of_groot() -> None:
    """Two frozen rows, three that rise, one that is free."""
    moment = np.array([1, 2, 3]) / 4
    for rate in (6.0, 2.0):
        rising = (1 - np.exp(-rate * moment)) / (1 - np.exp(-rate))
        np.testing.assert_allclose(ramp_strength(6, 2, 5, rate), [0, 0, *rising, 1], atol=1e-12)
    assert np.array_equal(ramp_strength(6, 2, 5), ramp_strength(6, 2, 5, 6.0))
    assert ramp_strength(3, 0, 0).tolist() == [1, 1, 1]
    assert ramp_strength(3, 9, 9).tolist() == [0, 0, 0]
    assert np.array_equal(ramp_strength(4, -5, 2), ramp_strength(4, 0, 2))
    assert np.array_equal(guidance_weights(4, -5, 2), guidance_weights(4, 0, 2))
    # Nothing to continue, and nothing is divided by it. Vectorised exponentials may underflow in lanes of no row.
    with np.errstate(divide="raise", invalid="raise"):
        assert guidance_weights(3, 2, -5).tolist() == [0, 0, 0]
        assert ramp_strength(3, 2, -5).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="schedule: expected one of exp, linear, ones, zeros, got 'cosine'"):
        guidance_weights(6, 2, 5, "cosine")


@given(
    st.integers(1, 60),
    st.integers(-5, 70),
    st.integers(-5, 70),
    st.sampled_from(["exp", "linear", "ones", "zeros"]),
)
def test_weights_fall_from_one_to_zero(length: int, delay: int, end: int, schedule: str) -> None:
    for weights in (guidance_weights(length, delay, end, schedule), 1 - ramp_strength(length, delay, end)):
        assert weights.shape == (length,)
        assert ((weights >= 0) & (weights <= 1)).all()
        assert (np.diff(weights) <= 0).all()
        assert (weights[max(end, 0) :] == 0).all()
        assert (weights[: max(0, min(delay, end))] == 1).all()


# ----------------------------------------------------------------------------- delay and rules


def test_one_slow_call_does_not_poison_the_estimate() -> None:
    delay = DelayEstimate()
    delay.add(300)  # the first call compiles
    assert delay.steps == 300
    delay.add(3)
    assert delay.steps == 3
    for _ in range(9):
        delay.add(3)
    delay.add(90)
    assert delay.steps == 3  # one outlier of ten
    delay.add(90)
    assert delay.steps == 90  # two are a change
    for _ in range(10):
        delay.add(4)
    assert delay.steps == 4  # and go by
    for _ in range(2):  # two would be a change
        delay.reconnected()
        delay.add(200)
    assert delay.steps == 4
    controller = Settings(20.0, "aligned").of_chunks(1)
    for asked, arrived, steps in ((0, 1, 1), (2, 5, 3), (6, 90, 3)):  # a failure before the last
        controller.ask(asked, asked)
        if asked == 6:
            controller.failed(6, "lost")
            controller.ask(6, 6)
        controller.arrived(arrived, np.zeros((9, 1)))
        assert controller.delay.steps == steps
    for steps in (90, 90, *[4] * 8):  # ten count
        delay.add(steps)
    assert delay.steps == 90
    delay.add(4)
    assert delay.steps == 4


def test_each_connection_has_a_first_request_before_any_other_was_measured() -> None:
    delay = DelayEstimate()
    assert delay.steps == 0
    delay.add(300)
    delay.reconnected()
    delay.add(90)
    assert delay.steps == 90
    for late in (delay, DelayEstimate()):
        late.add(-1)  # a clock that was set back
        assert late.steps == 0
    for steps, expected in ((1, 1), (2, 2), (3, 3), (4, 3)):  # from five on the largest is an outlier
        delay.add(steps)
        assert delay.steps == expected


def test_rules() -> None:
    assert [parse_rule("4").due(ReplanState(since, 9, 10)) for since in (3, 4, 5)] == [False, True, True]
    assert [parse_rule("full").due(ReplanState(since, 9, 10)) for since in (9, 10)] == [False, True]
    assert [parse_rule("queue:0.2").due(ReplanState(1, left, 10)) for left in (3, 2)] == [False, True]
    surprised = parse_rule("disagreement:0.5,8")
    assert [surprised.due(ReplanState(1, 9, 10, size)) for size in (None, 0.4, 0.6)] == [False, False, True]
    assert surprised.due(ReplanState(8, 9, 10))
    assert disagreement(np.zeros((3, 2)), np.full((5, 2), 2.0)) == 2.0
    assert disagreement(np.zeros((3, 2)), np.full((5, 2), 2.0), np.array([4.0, 4.0])) == 0.5
    assert disagreement(np.zeros((3, 2)), np.full((5, 2), 2.0), np.array([0.5, 0.5])) == 4.0
    assert disagreement(np.zeros((0, 2)), np.ones((5, 2))) is None
    assert [parse_rule(text).horizon(10) for text in ("4", "full", "queue:0.2", "disagreement:1,3")] == [
        4,
        10,
        8,
        3,
    ]
    for text in (
        "",
        "0",
        "-1",
        "queue:2",
        "queue:-0.5",
        "queue:x",
        "disagreement:1",
        "disagreement:1,0",
        "disagreement:-0.5,2",
        "4:5",
        "often",
    ):
        with pytest.raises(ValueError, match="expected STEPS"):
            parse_rule(text)


def test_rules_at_their_limits() -> None:
    assert parse_rule("queue") == parse_rule("queue:0.2")
    assert [parse_rule(text).horizon(10) for text in ("queue:0", "queue:1", "1", "12")] == [10, 1, 1, 10]
    assert [parse_rule("queue:0").due(ReplanState(1, left, 10)) for left in (1, 0)] == [False, True]
    assert parse_rule("queue:1").due(ReplanState(0, 10, 10))
    assert parse_rule("12").due(ReplanState(10, 0, 10))  # a chunk has no more
    surprised = parse_rule("disagreement:0,1")
    assert [surprised.due(ReplanState(0, 9, 10, size)) for size in (None, 0.0, 1e-9)] == [False, False, True]
    assert parse_rule("disagreement:9,12").due(ReplanState(10, 0, 10))
    assert not parse_rule("disagreement:9,12").due(ReplanState(9, 1, 10))
    apart = disagreement(np.zeros((2, 2)), np.full((5, 2), 2.0), np.array([0.0, 4.0]))  # 0: no size is known
    assert apart == pytest.approx(np.sqrt((2.0**2 + 0.5**2) / 2))


def test_queue_fraction_asks_when_a_fifth_is_left() -> None:
    # The first chunk starts at step 0 without latency; of 10 rows 2 are left at step 8.
    assert play("naive", [0], 12, size=10, replan="queue:0.2")[7:10] == [7, 100, 101]


# ----------------------------------------------------------------------------- limits


def limits(**given: Any) -> Limits:
    return Limits.parse(given, 2)


def test_guard_clips_and_counts() -> None:
    guard = Guard(limits(low=-1, high=[1, 2], velocity=1.0, names=["elbow", "wrist"]), 0.1)
    guard.start(np.zeros(2))
    untouched = np.float32([0.05, 0.09])
    assert guard.check(untouched).row is untouched
    verdict = guard.check(np.float32([5, 0.15]))
    assert verdict.clipped == ("elbow.range", "elbow.velocity")
    np.testing.assert_allclose(verdict.row, [0.15, 0.15], atol=1e-6)
    assert guard.check(np.float32([np.nan, 0])).row is None
    assert "finite" in guard.check(np.float32([np.inf, 0])).reason
    assert "shape [3]" in guard.check(np.zeros(3, np.float32)).reason


@given(
    st.floats(-1, 1),
    st.floats(0.1, 5),
    st.floats(0.5, 50),
    st.sampled_from([0.02, 0.1]),
    st.sampled_from([-9, 9]),
)
def test_a_robot_reaches_the_end_of_its_range_and_stops_there(
    start: float, velocity: float, acceleration: float, period: float, wanted: float
) -> None:
    """As fast as its limits allow, and never beyond them. In units of a step's change p = acceleration * period^2 a
    distance p u^2 / 2 takes u steps to brake, and less than p / 8 is no step at all."""
    guard = Guard(
        Limits.parse({"low": -1, "high": 1, "velocity": velocity, "acceleration": acceleration}, 1), period
    )
    guard.start(np.array([start]))
    fastest, push, far = velocity * period, acceleration * period**2, 1 - start if wanted > 0 else start + 1
    steps = int(far / fastest + fastest / push + 2 * np.sqrt(2 * far / push)) + 5
    at, before = start, 0.0
    for _ in range(steps):
        row = guard.check(np.float32([wanted])).row
        assert row is not None
        step, at = float(row[0]) - at, float(row[0])
        assert -1 <= at <= 1
        assert abs(step) <= fastest + 1e-6
        assert abs(step - before) <= push + 1e-6  # it starts as gently as it stops
        before = step
    assert abs(at - np.sign(wanted)) <= push / 8 + 1e-6


@pytest.mark.parametrize("moved", [True, False])
def test_after_a_pause_nothing_leads_back_to_where_the_robot_was(moved: bool) -> None:
    """A person may have moved it: until it is known where it stands nothing is sent. Nobody moves a robot while its
    instruction changes: there the limits go on."""
    guard = Guard(limits(velocity=1.0), 0.1)
    controller = Controller(Player(parse_handover("freeze"), parse_rule("full")), guard)
    guard.start(np.zeros(2))
    guard.check(np.zeros(2, np.float32))
    controller.pause()
    controller.resume(None, moved=moved)
    row = np.full(2, 2.0, np.float32)
    if moved:
        assert guard.check(row) == Verdict(None, UNPLACED)
        controller.stands(np.float32([1, 2]))
    before = np.float32([1, 2]) if moved else np.zeros(2, np.float32)
    np.testing.assert_allclose(guard.check(row).row, np.minimum(before + 0.1, 2), atol=1e-6)
    np.testing.assert_allclose(guard.check(row + 1).row, np.minimum(before + 0.2, 2.1), atol=1e-6)


@pytest.mark.parametrize("name", ["velocity", "acceleration"])
def test_each_number_whose_steps_are_limited_has_to_be_known(name: str) -> None:
    for place in ([np.nan, 0.0], [0.0, np.nan]):
        guard = Guard(limits(**{name: [1e3, None]}), 0.1)
        guard.start(np.array(place))
        assert guard.known == (place[0] == 0.0)  # of the other only where it may be is asked
        assert (guard.check(np.zeros(2, np.float32)).reason == UNPLACED) != guard.known


def test_limits_begin_where_something_says_the_robot_is() -> None:
    """Its state says where it stands, of positions; commands that hold at a number of their own say it themselves."""
    given = {"velocity": [1, None, 2], "names": ["x", "y", "grip"]}
    said = r"limits.velocity: the robot's position before its first command is unknown for {}"
    columns = {"action": [0, 1], "state": [0, 1]}
    for motion, missing in (
        (None, "x, grip"),
        ({"kind": "relative", **columns}, "grip"),
        ({"kind": "offsets", **columns}, "grip"),
    ):
        with pytest.raises(SettingsError, match=said.format(missing)):
            Settings(10.0, motion=motion, limits=given).check_start(3)
    for motion, limits in (
        ({"kind": "absolute"}, given),
        ({"kind": "offsets", **columns}, {**given, "still": [None, None, 1]}),
        (None, {**given, "still": 0}),
        (None, {"low": -1, "high": 1}),
        (None, None),
    ):
        Settings(10.0, motion=motion, limits=limits).check_start(3)
    with pytest.raises(LimitsError, match="limits.still: expected numbers from low to high"):
        Limits.parse({"low": 1, "still": 0}, 1)


def test_commands_that_hold_at_a_number_of_their_own_begin_there_again() -> None:
    """Velocities and offsets: after a hold the robot stands, whatever was sent before."""
    guard = Guard(Limits.parse({"velocity": 10.0, "still": 0.0}, 1), 0.1)
    assert [guard.check(np.float32([5])).row[0] for _ in range(3)] == [1, 2, 3]
    guard.skipped()
    assert guard.check(np.float32([5])).row[0] == 4
    guard.held()
    assert guard.check(np.float32([5])).row[0] == 1


def test_a_robot_that_something_else_held_starts_from_there() -> None:
    """As the watchdog does, while the loop is late by less than a step that it leaves out."""
    guard = Guard(Limits.parse({"velocity": 10.0, "still": 0.0}, 1), 0.1)
    controller = Controller(Player(parse_handover("aligned"), parse_rule("full")), guard)
    controller.ask(0, 0)
    controller.arrived(0, np.full((8, 1), 5.0, np.float32))
    assert [controller.command(step).row for step in (0, 1)] == [1, 2]
    controller.stood()
    assert controller.command(2).row == 1


def test_after_a_command_that_was_not_taken_limits_begin_where_the_robot_is() -> None:
    guard = Guard(Limits.parse({"velocity": 10.0}, 1), 0.1)
    controller = Controller(Player(parse_handover("aligned"), parse_rule("full")), guard)
    controller.stands(np.zeros(1))
    controller.ask(0, 0)
    controller.arrived(0, np.ones((8, 1)))
    controller.unsent(controller.command(0), "it is too far")
    assert not guard.known


@pytest.mark.parametrize("end", [-1.0, 1.0])
def test_the_edge_of_a_workspace_is_inside(end: float) -> None:
    guard = Guard(Limits.parse({"workspace_low": -1, "workspace_high": 1}, 1), 0.1)
    motion, state = Offsets((0,), (0,)), np.zeros(1, np.float32)
    controller = Controller(Player(parse_handover("aligned"), parse_rule("full"), motion), guard)
    controller.ask(0, 0, state)
    controller.arrived(0, np.full((2, 1), 5 * end, np.float32))
    command = controller.command(0, state)
    assert (command.row, command.clipped) == (end, ("0.workspace",))


def test_a_robot_out_of_its_range_is_led_back_within_its_limits() -> None:
    guard = Guard(Limits.parse({"low": -1, "high": 1, "velocity": 10, "acceleration": 50}, 1), 0.1)
    guard.start(np.array([3.0]))
    sent = [float(guard.check(np.float32([wanted])).row[0]) for wanted in (9, 9, 0, *[1] * 9)]
    assert sent[:3] == [2.5, 1.5, 0.5]
    assert abs(sent[-1] - 1) <= 0.5 / 8
    assert (np.abs(np.diff([3.0, 3.0, *sent], n=2)) <= 0.5 + 1e-6).all()


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, 1)),
        np.zeros((3, 3)),
        np.zeros((0, 2)),
        np.zeros((1025, 2)),
        np.zeros((1, 3, 2)),
        np.zeros(2),
        np.float64(1),
        np.full((3, 2), 1e300),
        np.full((3, 2), 1j),
        np.full((3, 2), "1"),
        np.full((3, 2), True),
        [[0, 0], [0]],
        [[0, 0], [0, 10**400]],
        None,
        "rows",
    ],
    ids=lambda rows: str(getattr(rows, "shape", rows))[:20] + str(getattr(rows, "dtype", ""))[:4],
)
@pytest.mark.parametrize("motion", [None, {"kind": "relative", "action": [1], "state": [1]}])
def test_what_is_no_chunk_of_this_robot_has_failed(rows: Any, motion: Any) -> None:
    """Whatever a server sends: the robot holds with the reason, and a good chunk ends it."""
    controller = Settings(10.0, "aligned", motion=motion).controller(2)
    state = np.zeros(2, np.float32)
    controller.ask(0, 0, state)
    assert not controller.arrived(0, rows)
    assert controller.command(0, state).reason.startswith(("a chunk: expected", "a chunk is not finite"))
    assert controller.faults.counts == {"bad_chunk": 1}
    assert controller.wants_chunk(1)
    controller.ask(1, 1, state)
    assert controller.arrived(1, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(controller.command(1, state).row, [1, 2])


def test_chunks_that_never_overlap_cannot_disagree() -> None:
    with pytest.raises(
        SettingsError, match="replan: disagreement needs chunk merging with overlapping chunks .* got freeze"
    ):
        Settings(10.0, "freeze", "disagreement:0.1,8").controller(2)
    assert Settings(10.0, "aligned", "disagreement:0.1,8").controller(2) is not None


def test_a_policy_that_states_its_chunks_is_held_to_them() -> None:
    controller = Settings(10.0, chunk_size=8).controller(2)
    controller.ask(0, 0)
    assert not controller.arrived(0, np.zeros((9, 2)))
    controller.ask(0, 0)
    assert controller.arrived(0, np.zeros((8, 2)))
    with pytest.raises(SettingsError, match="chunk_size: expected 0 to 8192 actions"):
        Settings(10.0, chunk_size=10**9)


def test_what_the_motion_cannot_follow_holds() -> None:
    """The state has other numbers than the motion was told of, at once or later."""
    controller = Settings(
        10.0, "aligned", motion={"kind": "offsets", "action": [0], "state": [3]}
    ).controller(1)
    controller.ask(0, 0, np.zeros(2, np.float32))
    assert not controller.arrived(0, np.zeros((3, 1)))
    assert "state: expected at least 4 numbers" in controller.command(0, np.zeros(2)).reason
    assert controller.faults.counts == {"bad_chunk": 1}
    controller.ask(1, 1, np.zeros(4, np.float32))
    assert controller.arrived(1, np.zeros((3, 1)))
    assert controller.command(1, np.zeros(4)).row is not None
    for step, state in ((2, np.zeros(2)), (3, np.zeros(4))):  # nothing of this chunk any more
        assert "state: expected at least 4 numbers" in controller.command(step, state).reason
    assert controller.wants_chunk(3)


def test_reasons_of_holds_are_bounded() -> None:
    """They quote what servers say."""
    controller = Settings(10.0).controller(1)
    for step in range(300):
        controller.failed(step, f"error {step}", f"kind {step}" * 100)
        controller.command(step)
    assert (len(controller.held), sum(controller.held.values())) == (101, 300)
    assert (len(controller.faults.counts), controller.faults.total) == (101, 300)


def test_guard_can_hold_instead() -> None:
    guard = Guard(limits(high=1.0, when="hold"), 0.1)
    verdict = guard.check(np.float32([0, 2]))
    assert (verdict.row, verdict.reason) == (None, "beyond 1.range")


def test_a_held_command_holds_the_controller_until_a_fresh_chunk() -> None:
    guard = Guard(Limits.parse({"high": 10.0, "when": "hold"}, 1), 0.1)
    controller = Controller(Player(parse_handover("aligned"), parse_rule("4")), guard)
    controller.ask(0, 0)
    controller.arrived(0, np.float32([[1], [50], [2]]))
    assert controller.command(0).row is not None
    assert controller.command(1).reason == "beyond 0.range"
    assert controller.command(2).row is None  # not the row after it: the plan is dropped
    controller.ask(3, 3)
    controller.arrived(3, np.float32([[3]]))
    assert controller.command(3).row == np.float32([3])
    assert controller.held == {"beyond 0.range": 2}


def test_limits_from_files_and_metadata(tmp_path: Path) -> None:
    toml = tmp_path / "arm.toml"
    toml.write_text('[limits]\nlow = [-1, -2]\nhigh = 3\nvelocity = 0.5\nnames = ["a", "b"]\n')
    read = Limits.read(toml, 2)
    assert (read.low.tolist(), read.high.tolist(), read.velocity.tolist()) == ([-1, -2], [3, 3], [0.5, 0.5])
    assert np.isinf(read.acceleration).all()
    plain = tmp_path / "arm.json"
    plain.write_text(json.dumps(read.to_dict()))
    assert Limits.read(plain, 2).to_dict() == read.to_dict()
    served = {"action": {"dim": 2, "names": ["a", "b"], "limits": {"high": [1, None]}}}
    found = Limits.from_metadata(served)
    assert found is not None
    assert (found.high.tolist(), found.names) == ([1, np.inf], ("a", "b"))
    for action in (
        {"limits": [1], "dim": 1},
        {"limits": {"low": 1}},
        {"limits": {"low": 1}, "dim": "1"},
        ["a"],
    ):
        with pytest.raises(LimitsError, match="^action: expected a number `dim` and a table `limits`, got"):
            Limits.from_metadata({"action": action})
    assert Limits.from_metadata({"action": {"dim": 2}}) is None
    stuck = Limits.parse({"low": 1, "high": 1, "still": 1}, 1)  # a joint with one place
    assert Guard(stuck, 0.1).check(np.float32([5])).row == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lowest": 1}, r"limits.lowest: expected one of .*, got an unknown key; did you mean 'low'"),
        ({"low": [1]}, "limits.low: expected 2 numbers"),
        ({"low": 2, "high": 1}, "limits.low: expected at most high"),
        ({"low": [0, 2], "high": 1}, "limits.low: expected at most high, got 2.0 > 1.0 for value 1"),
        ({"velocity": 0}, "limits.velocity: expected numbers above 0"),
        ({"velocity": [1, 0]}, "limits.velocity: expected numbers above 0, got 0.0"),
        ({"high": 1, "still": [0, 2]}, "limits.still: expected numbers from low to high"),
        ({"high": "far"}, "limits.high: expected numbers"),
        ({"high": [1, "2"]}, "limits.high: expected numbers"),
        ({"high": [1, True]}, "limits.high: expected numbers"),
        ({"high": [1, float("nan")]}, "limits.high: expected numbers, got NaN"),
        ({"names": ["a"]}, "limits.names: expected 2"),
        (
            {"names": "ab"},
            "limits.names: expected a list of texts, one for each value of a command, got 'ab'",
        ),
        ({"names": ["a", 2]}, "limits.names: expected a list of texts, one for each value of a command, got"),
        ({"when": "pray"}, "limits.when: expected clip or hold"),
    ],
)
def test_bad_limits_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LimitsError, match=message):
        Limits.parse(given, 2)


def test_limits_of_named_numbers_follow_their_order() -> None:
    limits = Limits.parse({"names": ["a", "b"], "high": [1, 2]}, 2)
    assert limits.ordered(("b", "a")).high.tolist() == [2, 1]
    for names in (("a", "c"), ("a", "a"), ("a", "b", "b")):
        with pytest.raises(LimitsError, match="limits.names: expected"):
            limits.ordered(names)
    for mine, theirs in (((), ("a", "b")), (("a", "b"), ()), (("a", "b"), ["a", "b"])):
        found = Limits.parse({"names": mine, "high": [1, 2]}, 2)
        assert found.ordered(theirs).names == ("a", "b")
        assert (found.ordered(theirs) is found) == bool(mine)


def test_limits_of_as_many_numbers_as_a_command_may_have() -> None:
    assert (Limits.parse({}, 1).dim, Limits.parse({"low": -1}, 8192).low.tolist()) == (1, [-1.0] * 8192)
    for dim in (0, 8193, -1):
        with pytest.raises(LimitsError, match=f"limits: expected 1 to 8192 values in a command, got {dim}$"):
            Limits.parse({}, dim)
    edge = Limits.parse({"low": [1, 3], "high": [1, 4], "velocity": 1e-9, "still": [1, 4]}, 2)
    assert edge.still.tolist() == [1.0, 4.0]  # both ends are in a range, which may be one number
    with pytest.raises(
        LimitsError, match=re.escape("limits.low: expected at most high, got 3.0 > 2.0 for value 1")
    ):
        Limits.parse({"low": [1, 3], "high": [1, 2]}, 2)
    some = Limits.parse(
        {"velocity": [1, None, None], "jump": [None, None, 2], "workspace_high": [None, 1, None]}, 3
    )
    assert some.paced.tolist() == [True, False, True]
    assert (some.boxed.tolist(), some.unpaced()) == ([False, True, False], ["1"])
    assert Limits.parse(some.to_dict(), 3).to_dict() == some.to_dict()


def test_toml_is_asked_for_where_python_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.toml").write_text("low = 1")
    assert Limits.read(tmp_path / "x.toml", 1).low == 1.0
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LimitsError, match=r"x.toml: TOML needs Python 3.11 or the package tomli"):
        Limits.read(tmp_path / "x.toml", 1)


def test_a_guard_knows_where_the_robot_is() -> None:
    """Where it was said to stand, then what it was sent; a hold keeps that, or the number that it has for one."""
    assert Guard(None, 0.1).here is None
    guard = Guard(Limits.parse({"velocity": 10.0}, 3), 0.1, still=np.array([np.nan, 0.25, np.nan]))
    assert not guard.known
    for unfit in (None, [1.0], [[1.0, 2.0, 3.0]], [1.0, np.inf, 3.0], [1.0, 2.0, np.nan]):
        guard.start(None if unfit is None else np.array(unfit))
        assert guard.check(np.ones(3, np.float32)).reason == (UNPLACED if not guard.known else "")
    guard.start(np.array([1.0, 2.0, 3.0]))
    assert guard.here is not None
    assert guard.here.tolist() == [1.0, 0.25, 3.0]
    assert guard.check(np.float32([1.5, 0.5, 9.0])).clipped == ("2.velocity",)
    assert guard.here.tolist() == [1.5, 0.5, 4.0]
    assert guard.before is not None
    assert guard.before.tolist() == [1.0, 0.25, 3.0]
    guard.skipped()
    assert guard.here.tolist() == [1.5, 0.5, 4.0]
    guard.held()
    assert guard.here.tolist() == [1.5, 0.25, 4.0]
    assert Guard(Limits.parse({"still": 2.0}, 1), 0.1, np.zeros(1)).here == [
        2.0
    ]  # the limits say so themselves


def test_a_workspace_is_asked_about_what_would_be_sent() -> None:
    guard, asked = Guard(Limits.parse({"high": 1.0, "velocity": 5.0}, 1), 0.1), []
    guard.start(np.zeros(1))
    for wanted, sent in ((0.25, 0.25), (0.9, 0.75), (3.0, 1.0)):
        guard.check(np.float32([wanted]), inside=lambda command: asked.append(float(command[0])) or True)  # type: ignore[func-returns-value]
        assert asked[-1] == sent
    verdict = guard.check(np.float32([0.0]), inside=lambda command: command[0] > 0.6)
    assert (verdict.row, verdict.reason, verdict.clipped) == (None, OUTSIDE, ("0.velocity",))
    assert guard.here == [1.0]  # nothing was sent


def test_after_a_hold_a_robot_of_limited_jerk_begins_anew() -> None:
    for stop in (Guard.held, Guard.skipped):
        guard, at = Guard(Limits.parse({"jerk": 40.0}, 1), 0.1), [0.0]
        guard.start(np.zeros(1))
        for step in range(6):
            if step == 3:
                stop(guard)
            row = guard.check(np.float32([90])).row
            assert row is not None
            at.append(float(row[0]))
        np.testing.assert_allclose(np.diff(at), [0.04, 0.12, 0.24] * 2, atol=3e-3)


def test_of_a_command_of_limited_jerk_the_limit_that_binds_is_named() -> None:
    for given_limits, named in (
        ({"jerk": 1e6, "velocity": 1}, ("0.velocity",)),
        ({"jerk": 1e6, "acceleration": 1}, ("0.acceleration",)),
        ({"jerk": 1}, ("0.jerk",)),
        ({"jerk": 1e9}, ()),
        ({"jerk": 1e9, "high": 2}, ("0.range",)),
    ):
        guard = Guard(Limits.parse(given_limits, 1), 0.1)
        guard.start(np.zeros(1))
        assert guard.check(np.float32([9])).clipped == named


def test_a_jump_is_what_is_further_than_that() -> None:
    """From the command before, of what was said, or into the range of a robot that stands out of it."""
    far = "too far from the last command: 0.jump"
    guard = Guard(Limits.parse({"jump": [0.5, None]}, 2), 0.1)
    guard.start(np.zeros(2))
    for number, reason in ((0.5, ""), (1.0, ""), (1.5001, far), (0.4999, far), (0.5, "")):
        verdict = guard.check(np.float32([number, 9.0]))
        assert (verdict.reason, verdict.clipped) == (reason, ("0.jump",) if reason else ())
    outside = Guard(Limits.parse({"high": [1.0, 1.0], "jump": [0.5, None]}, 2), 0.1)
    outside.start(np.array([2.0, 2.0]))
    assert outside.check(np.float32([1.9, 1.9])).reason == far


def test_a_step_is_braked_before_the_end() -> None:
    """From the largest one, steps that shrink by as much as they may add up to the way that is left, or a step less."""
    push = np.array([0.01, 0.01, 0.5, 0.01, 0.01, 0.01, np.inf, np.inf])
    distance = np.array([0.5, 0.02, 9.0, 0.0, -1.0, np.inf, 1.0, 0.0])
    found = _braking(distance, push)
    np.testing.assert_allclose(found, [0.095, 0.015, 2.75, 0, 0, np.inf, np.inf, np.inf], atol=1e-12)
    for step, most, way in zip(found[:3], push, distance, strict=False):
        assert way - most <= np.arange(step, 0, -most).sum() <= way + 1e-12


def test_either_end_of_a_range_is_stopped_at_alike() -> None:
    """No step differs by more than it may, neither up from one place nor down from its mirror image."""
    push, paths = 1.0 * 0.1**2, []
    for sign in (1.0, -1.0):
        guard, path = Guard(Limits.parse({"low": -1, "high": 1, "acceleration": 1.0}, 1), 0.1), [0.3 * sign]
        guard.start(np.array([0.3 * sign]))
        for _ in range(30):
            row = guard.check(np.float32([9 * sign])).row
            assert row is not None
            path.append(float(row[0]))
        steps = sign * np.diff(path)
        assert np.abs(np.diff(steps)).max() <= push + 1e-6
        assert (steps >= 0).all()
        assert steps[0] == pytest.approx(push, abs=1e-6)
        paths.append(sign * np.array(path))
    np.testing.assert_allclose(*paths, atol=1e-6)
    # 0.7 of way: eight steps that grow to 0.08, and as many that shrink; less than an eighth of one is none.
    assert 15 <= np.argmax(paths[0] >= 1.0 - push / 8) <= 18


def test_limits_count_in_periods() -> None:
    """Of 0.1 s: 2 /s are steps of 0.2, 8 /s^2 changes of 0.08, 40 /s^3 changes of that of 0.04."""
    for limits, steps in (
        ({"velocity": 2}, [0.2, 0.2]),
        ({"velocity": 2, "acceleration": 8}, [0.08, 0.16, 0.2, 0.2]),
        (
            {"velocity": 2, "acceleration": 8, "jerk": 40},
            [0.04, 0.12, 0.18, 0.2],
        ),  # or it could not stop speeding up
        ({"velocity": 5, "acceleration": 8, "jerk": 40}, [0.04, 0.12, 0.2, 0.28]),
        ({"velocity": 20, "jerk": 40}, [0.04, 0.12, 0.24, 0.4]),
    ):
        guard, at = Guard(Limits.parse(limits, 1), 0.1), []
        guard.start(np.zeros(1))
        for _ in steps:
            verdict = guard.check(np.float32([90]))
            assert verdict.row is not None
            at.append(verdict.row[0])
        np.testing.assert_allclose(np.diff([0.0, *at]), steps, atol=3e-3 if "jerk" in limits else 1e-6)


def test_rows_are_real_numbers_of_a_shape() -> None:
    assert checked_rows([[1, 2]], 2).dtype == np.float32
    for rows, dim, message in (
        ([[1, 2], [3]], 2, "a chunk: expected numbers, got list"),
        ([["a"]], 1, "a chunk: expected real numbers, got <U1"),
        ([[1j]], 1, "a chunk: expected real numbers, got complex128"),
        ([1, 2], 2, "a chunk: expected 2 to 3 actions of 2 numbers, got shape [2]"),
        ([[1, 2]], 2, "got shape [1, 2]"),
        ([[1, 2]] * 4, 2, "got shape [4, 2]"),
        ([[1, 2]] * 2, 3, "a chunk: expected 2 to 3 actions of 3 numbers, got shape [2, 2]"),
        ([[1, 2]] * 2, 1, "got shape [2, 2]"),
        ([[1], [1e39]], 1, "a chunk is not finite"),
        ([[1], [np.nan]], 1, "a chunk is not finite"),
    ):
        with pytest.raises(RowsError, match=re.escape(message)):
            checked_rows(rows, dim, 3, 2)
    assert [checked_rows([[1]] * count, 1, 3, 2).shape for count in (2, 3)] == [(2, 1), (3, 1)]


def test_rows_of_any_width_have_one() -> None:
    assert checked_rows(np.ones((3, 5)), 0).shape == (3, 5)
    with pytest.raises(RowsError, match="expected 1 to 1024 actions of numbers, got shape"):
        checked_rows(np.ones((3, 0)), 0)


def test_a_frame_may_be_a_tenth_of_a_second_ahead_of_the_clock() -> None:
    ahead = "the newest frame's time is not of this clock (time.monotonic): 0.11 s ahead of it"
    old = "the newest frame is older than 0.5 s"
    for age, reason in ((-0.11, ahead), (-0.1, ""), (0.0, ""), (0.5, ""), (0.501, old)):
        assert frame_fault(age, 0.5) == reason
    for age in (math.nan, math.inf, -math.inf):
        assert frame_fault(age, math.inf).endswith(f"{age} s old")
    assert [float_of(x) for x in (1, "2.5", True)] == [1.0, 2.5, 1.0]
    assert all(math.isnan(float_of(x)) for x in (None, "x", [], 10**400))


def test_the_oldest_camera_says_how_old_a_frame_is() -> None:
    images = {"a": 0, "b": 0}
    for times, more, found in (
        ({"a": 3, "b": 2.0, "state": 1}, {}, {"time": 2.0}),
        ({"b": 5}, {}, {"time": 5.0}),
        ({"a": 3}, {"age": 0.0}, {}),  # it says so itself
        ({"state": 1}, {}, {}),
        ({}, {}, {}),
    ):
        assert exposed(times, {"images": images, **more}) == found
    assert exposed({"a": 1}, {}) == {}


def test_sources_that_may_be_acted_on_together() -> None:
    """At most as old as each may be, or as a frame may be, and apart; both ends are inside."""
    chunks = Settings(20.0, stale=1.0, stale_of={"a": 2.0}, skew=0.5)
    windows = Settings(20.0, stale=1.0, fusion="latest_only", skew=0.5)
    old = "the newest frame is older than"
    for times, settings, reason in (
        ({"a": 9.5, "b": 9.0}, chunks, ""),
        ({"a": 9.5, "b": 8.99}, chunks, f"b: {old} 1 s"),
        ({"a": 7.99, "b": 9.0}, chunks, f"a: {old} 2 s"),
        ({"a": 8.0, "b": 9.0}, chunks, "frames of a and b are more than 0.5 s apart"),
        ({"a": 9.6, "b": 9.0}, chunks, "frames of b and a are more than 0.5 s apart"),
        ({"a": 9.5, "b": 9.5, "state": 8.9}, chunks, f"state: {old} 1 s"),
        ({"a": 9.5, "b": 9.5, "state": 9.0}, chunks, ""),  # which is no frame that could be apart
        ({"a": 1.0, "b": 1.5}, windows, ""),  # of a stream a node counts
        ({"a": 1.0, "b": 1.6}, windows, "frames of a and b are more than 0.5 s apart"),
        ({"a": 9.5}, chunks, "b: expected its exposure time in the observation's `times`, got nothing"),
        ({"b": 9.5}, chunks, "a: expected its exposure time in the observation's `times`, got nothing"),
        ({"b": 9.5}, Settings(20.0, stale=1.0), ""),
    ):
        assert sources_fault(times, {"a": 0, "b": 0}, 10.0, settings) == reason


@given(st.binary(max_size=60), st.sampled_from(["toml", "json"]))
def test_limit_files_of_any_bytes_give_a_named_error(tmp_path_factory: Any, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.mktemp("limits") / f"x.{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(LimitsError):  # any other exception is a traceback for a user
        assert Limits.read(path, 1).dim == 1


# ----------------------------------------------------------------------------- motion

ROWS = st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=12).map(
    lambda r: np.float32([[x, -x, 1] for x in r])
)
STATES = st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4).map(np.float32)


@given(ROWS, STATES, st.sampled_from([Relative((0, 1), (2, 3)), Offsets((0, 1), (2, 3), scale=0.5)]))
def test_targets_and_rows_are_inverse(rows: np.ndarray, state: np.ndarray, motion: Any) -> None:
    np.testing.assert_allclose(motion.rows(motion.targets(rows, state), state), rows, atol=1e-5)
    assert np.array_equal(motion.targets(rows, state)[:, 2], rows[:, 2])


@given(ROWS, STATES, STATES)
def test_rebased_rows_reach_the_same_targets(rows: np.ndarray, then: np.ndarray, now: np.ndarray) -> None:
    for motion in (Relative((0, 1), (2, 3)), Offsets((0, 1), (2, 3), scale=0.5)):
        targets = motion.targets(rows, then)
        np.testing.assert_allclose(motion.targets(motion.rows(targets, now), now), targets, atol=1e-4)


def test_offsets_followed_exactly_are_the_rows_themselves() -> None:
    motion = Offsets((0,), (0,), scale=0.02)
    rows, state = np.float32([[1], [0.5], [-1]]), np.float32([0.3])
    for row, target in zip(rows, motion.targets(rows, state), strict=True):
        sent = motion.command(target, state)
        np.testing.assert_allclose(sent, row, atol=1e-5)
        np.testing.assert_allclose(motion.reached(sent, state), target, atol=1e-6)
        state = state + 0.02 * sent
    assert Offsets((0,), (0,), 0.02, -1, 1).command(np.float32([5]), state) == 1
    assert Offsets((0,), (0,)).command(np.float32([1e30]), np.float32([1])) == np.float32(
        1e30
    )  # one to one, no end
    assert Offsets((0,), (0,)).reached(np.float32([5]), np.float32([1])) == 6


def test_what_rows_are_measured_from() -> None:
    """Columns 0 and 2 of a row belong to numbers 3 and 1 of the state; column 1 is absolute, such as a gripper."""
    state, rows = np.float32([9, 10, 9, 20]), np.float32([[1, 5, 2], [1, 6, 2]])
    relative, offsets = Relative((0, 2), (3, 1)), Offsets((0, 2), (3, 1), 0.5, -1.5, 1.5)
    assert relative.targets(rows, state).tolist() == [[21, 5, 12], [21, 6, 12]]
    assert offsets.targets(rows, state).tolist() == [[20.5, 5, 11], [21, 6, 12]]
    assert relative.rows(np.float32([[21, 5, 12]]), state).tolist() == [[1, 5, 2]]
    assert offsets.rows(np.float32([[20.5, 5, 11], [99, 6, 10]]), state).tolist() == [
        [1, 5, 1.5],
        [1.5, 6, -1.5],
    ]
    assert offsets.command(np.float32([0, 5, 10.25]), state).tolist() == [-1.5, 5, 0.5]
    assert offsets.reached(np.float32([1, 5, -1]), state).tolist() == [20.5, 5, 9.5]
    assert offsets.apart(np.float32([0, 5, 0]), np.float32([0.5, 3.5, -0.25])) == 1.5
    for motion in (relative, offsets):
        assert motion.needs_state
        assert motion.roll(state, np.float32([[0, 0, 0], [1, 1, 1], [7, 5, 8]])).tolist() == [9, 8, 9, 7]
        assert motion.roll(state, np.zeros((0, 3))).tolist() == state.tolist()
        for missing in (None, state[:3]):
            with pytest.raises(ValueError, match="state: expected at least 4 numbers"):
                motion.targets(rows, missing)
    assert state.tolist() == [9, 10, 9, 20]
    absolute = Absolute()
    assert absolute.targets(rows, None) is rows
    assert absolute.position(state, 4).tolist() == state.tolist()
    assert np.isnan(absolute.position(state, 3)).all()  # of another robot
    np.testing.assert_array_equal(relative.position(state, 3), [20, np.nan, 10])
    np.testing.assert_array_equal(relative.position(state[:3], 3), [np.nan] * 3)
    np.testing.assert_array_equal(offsets.still(3), [0, np.nan, 0])
    assert [found.placed(3).tolist() for found in (absolute, relative, offsets)] == [
        [True] * 3,
        [True, False, True],
        [False] * 3,
    ]
    assert absolute.roll(state, np.zeros((0, 3))) is state
    assert absolute.roll(state[:3], rows).tolist() == [1, 6, 2]
    wider = parse_motion(
        {"kind": "absolute", "action": [0, 2], "state": [3, 1]}
    )  # of a state with other numbers too
    assert wider.targets(rows, None) is rows
    np.testing.assert_array_equal(wider.position(state, 3), [20, np.nan, 10])
    assert wider.placed(3).tolist() == [True, False, True]
    assert wider.roll(state, np.float32([[7, 5, 8]])).tolist() == [9, 8, 9, 7]
    with pytest.raises(ValueError, match=r"expected a state of 3 values \(as many as the action\), got 4"):
        absolute.roll(state, rows)
    for columns in (((), ()), ((0, 1), (0,))):
        with pytest.raises(ValueError, match="motion: expected lists of indices of equal length"):
            Relative(*columns)
    with pytest.raises(ValueError, match="motion: expected lists of indices of equal length"):
        Absolute((0, 1), (0,))
    assert type(parse_motion(None)) is Motion
    for kind in (7, "warp"):
        with pytest.raises(
            ValueError, match="motion.kind: expected one of as is, absolute, relative, offsets"
        ):
            parse_motion({"kind": kind})
    given = {"kind": "offsets", "action": [0, 2], "state": [3, 1], "scale": 0.5, "low": -1.5, "high": 1.5}
    assert parse_motion(given) == offsets
    assert "kind" in given  # the caller's


def test_what_a_chunk_commands_and_where_a_robot_is() -> None:
    """Offsets are commands as they come, other rows the targets that they name; NaN is where nothing says a place."""
    rows, state = np.float32([[1, 5, 2]]), np.float32([9, 10, 9, 20])
    relative, offsets = Relative((0, 2), (3, 1)), Offsets((0, 2), (3, 1))
    assert Motion().commands(rows, None) is rows
    assert offsets.commands(rows, state) is rows
    assert relative.commands(rows, state).tolist() == [[21, 5, 12]]
    for motion in (relative, offsets, Absolute((0, 2), (3, 1))):
        for dim, seen in (
            (3, [20, np.nan, 10]),
            (4, [20, np.nan, 10, np.nan]),
            (2, [np.nan] * 2),
            (1, [np.nan]),
        ):
            np.testing.assert_array_equal(motion.pose(state, dim), np.float32(seen))
        np.testing.assert_array_equal(motion.pose(state[:3], 3), [np.nan] * 3)
        np.testing.assert_array_equal(motion.pose(None, 3), [np.nan] * 3)
    for none in (Offsets((0,), (0,)).pose(None, 1), Motion().pose(state, 1), Motion().still(1)):
        assert np.isnan(none).all()
    assert not Motion().placed(2).any()
    assert relative.apart(np.float32([1, 2, 3]), np.float32([1, 4.5, 2])) == 2.5
    for columns in (((0,), ()), ((), (0,)), ((0,), (0, 1))):
        with pytest.raises(
            ValueError, match=f"at least 1, in action and state, got {len(columns[0])} and {len(columns[1])}$"
        ):
            Absolute(*columns)
    with pytest.raises(ValueError, match="future: needs a motion"):
        Motion().roll(state, rows)


def test_points_between_two_commands() -> None:
    last, row = np.float32([0, 4]), np.float32([2, 0])
    assert interpolate(None, row, 0.5) is row
    assert interpolate(last, row, 1.0) is row
    assert [interpolate(last, row, part).tolist() for part in (0.0, 0.25, 0.5)] == [[0, 4], [0.5, 3], [1, 2]]


def test_future_state_is_that_of_the_answer() -> None:
    player = Player(parse_handover("aligned"), parse_rule("2"), Absolute(), future=True)
    player.ask(0, 0, np.float32([7]))
    player.accept(np.arange(8, dtype=np.float32)[:, None], 3)
    for step in (3, 4):
        node = player.take(step)
        assert node is not None
        player.commanded(step, node.row)
    assert player.ask(5, 5, np.float32([1.2])).fields["state"] == 4  # rows 2, 3, 4 are executed until step 8
    with pytest.raises(ValueError, match="needs a motion"):
        Player(parse_handover("aligned"), parse_rule("2"), future=True).motion.roll(
            np.zeros(1), np.zeros((1, 1))
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hz": 0}, "hz: expected a number above 0"),
        ({"hz": 1e-144}, "hz: expected 0.001 to 100000, got 1e-144"),
        ({"hz": 2e5}, "hz: expected 0.001 to 100000, got 200000"),
        ({"hz": 10, "deadline": float("nan")}, "deadline: expected"),
        ({"hz": 10, "deadline": 1e30}, "deadline: expected"),
        ({"hz": 10, "substeps": 0}, "substeps: expected 1 to 100"),
        ({"hz": 10, "substeps": 101}, "substeps: expected 1 to 100"),
        ({"hz": 10, "substeps": 2}, "substeps: expected motion absolute or relative"),
        ({"hz": 10, "handover": "x"}, "handover: expected one of"),
        ({"hz": 10, "motion": {"kind": "warp"}}, "motion.kind: expected one of"),
        ({"hz": 10, "motion": {"kind": "relative"}}, "motion: "),
        (
            {"hz": 10, "motion": {"kind": "relative", "action": [0], "state": [0, 1]}},
            "motion: expected lists of indices",
        ),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        Settings(**given).controller(1)


ABSOLUTE = {"kind": "absolute"}


def test_settings_at_their_bounds() -> None:
    for given_settings in (
        *({"hz": 1e-3}, {"hz": 1e5}, {"chunk_size": 8192}, {"speed": 1.0}, {"stale": 1e-9, "deadline": 9e29}),
        *({"substeps": 100}, {"max_age": 1e-9, "skew": 1e-9}),
    ):
        Settings(**{"hz": 20.0, **given_settings})
    for name, value, message in (
        ("hz", 9e-4, "expected 0.001 to 100000, got 0.0009"),
        ("hz", 100001.0, "expected 0.001 to 100000, got 100001"),
        ("hz", True, "expected a number above 0, got True"),
        ("deadline", 1e30, "expected a number above 0, got 1e"),
        ("stale", None, "expected a number above 0, got None"),
        ("stale", 0, "expected a number above 0, got 0"),
        ("skew", 0, "expected a number above 0, got 0"),
        ("camera_delay", -0.1, "expected 0 to less than stale (0.5 s), got -0.1"),
        ("camera_delay", 0.5, "expected 0 to less than stale (0.5 s), got 0.5"),
        ("camera_delay", True, "expected 0 to less than stale (0.5 s), got True"),
        ("max_age", 0, "expected a number above 0, got 0"),
        ("speed", 1.01, "expected 0.01 to 1 (the speed of training), got 1.01"),
        ("substeps", 0, "expected 1 to 100, got 0"),
        ("substeps", 101, "expected 1 to 100, got 101"),
        ("substeps", True, "expected Integral, got True"),
        ("finish", 1, "expected bool, got 1"),
        ("motion", 3, "expected Mapping or NoneType, got 3"),
        ("committed_rows", -1, "expected 0 or more, got -1"),
        ("refine", -1, "expected 0 or more control steps, got -1"),
        ("chunk_size", -1, "expected 0 to 8192 actions, got -1"),
        ("chunk_size", 8193, "expected 0 to 8192 actions, got 8193"),
    ):
        with pytest.raises(SettingsError, match=f"^{name}: {re.escape(message)}"):
            Settings(**{"hz": 20.0, name: value})
    with pytest.raises(SettingsError, match="^stale_of.front: expected a number above 0, got 0"):
        Settings(20.0, stale_of={"front": 0})
    with pytest.raises(SettingsError, match="^substeps: cannot be combined with fusion, got 2"):
        Settings(20.0, fusion="average", substeps=2)
    for more, rows in (({}, 1024), ({"chunk_size": 3}, 3)):
        assert Settings(8.0, **more).of_chunks(2).max_rows == rows
        assert Settings(8.0, fusion="average", **more).of_stream(2).max_rows == rows
    assert (Settings(8.0).period, Settings(8.0, max_age=0.49).of_chunks(1).max_age) == (0.125, 3)
    assert Settings(8.0).of_chunks(1).max_age is None
    with pytest.raises(
        SettingsError, match="limits.workspace_low, limits.workspace_high: cannot be combined with fusion"
    ):
        Settings(8.0, fusion="average", limits={"workspace_low": [0.0, None]}).controller(2)
    for more, message in (
        (
            {"replan": "disagreement:1,2", "handover": "freeze"},
            "replan: disagreement needs chunk merging with overlapping chunks",
        ),
        ({"future": True}, "future: needs a motion"),
        (
            {"refine": 1, "handover": "rtc"},
            "handover: .* cannot be combined with an edge adapter",
        ),
        ({"substeps": 2}, "substeps: expected motion absolute or relative"),
        ({"speed": 0.5}, "speed: expected motion absolute, relative or offsets"),
        (
            {"limits": {"workspace_low": 0.0}},
            "limits.workspace_low, limits.workspace_high: need a motion that",
        ),
        ({"speed": 0.5, "motion": ABSOLUTE, "refine": 1}, "speed: expected 1 with"),
        ({"speed": 0.5, "motion": ABSOLUTE, "future": True}, "speed: expected 1 with"),
    ):
        with pytest.raises(SettingsError, match=f"^{message}"):
            Settings(20.0, **{"handover": "aligned", **more}).controller(1)
    with pytest.raises(SettingsError, match="^fusion: expected"):
        Settings(20.0, fusion="mean").controller(1)
    motion = {"kind": "relative", "action": [0], "state": [5]}  # the state has no such number
    with pytest.raises(
        SettingsError,
        match="^limits.velocity: the robot's position before its first command is unknown for 0, 1",
    ):
        Settings(20.0, motion=motion, limits={"velocity": 1.0}).check_start(2, 3)
    assert Settings(20.0).committed_rows == 0
    for more in ({"substeps": 2}, {"future": True}, {"speed": 0.5}, {"refine": 1}):
        Settings(20.0, "aligned", motion=ABSOLUTE, **more).controller(1)

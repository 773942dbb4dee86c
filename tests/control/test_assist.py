"""A near policy with a far one beside it: when the far one is asked, and whose rows the robot gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from sinew_client import ClientError
from sinew_client.arm.assist import Assist, AssistRule, parse_assist
from sinew_client.control import Relative
from sinew_client.control.safety import RowsError

WAIT_S = 30.0


class Far:
    """A policy that answers 100 + row, or raises ``fault``; ``asked`` counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.rows = 100.0 + np.arange(10, dtype=np.float32)[:, None]
        self.fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()
        self.close = self.closed.set

    def __call__(self, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        self.asked += 1
        assert self.gate.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        return self.rows


def near(observation: Mapping[str, Any], limit: float) -> np.ndarray:
    """Answer 10 x time + row: what it says of a step never changes at 10 Hz."""
    return np.round(10.0 * observation["time"]) + np.arange(10, dtype=np.float32)[:, None]


def assisted(
    rule: str, far: Far, call: Any = near, **options: Any
) -> tuple[Assist, Callable[[float], np.ndarray]]:
    """Return it, and what asks it at a time, in seconds, at 10 Hz."""
    clock = {"now": 0.0}
    found = Assist(
        lambda: call, lambda: far, parse_assist(rule), 10.0, 60.0, clock=lambda: clock["now"], **options
    )
    opened = found()

    def ask(now: float, **fields: Any) -> np.ndarray:
        clock["now"] = now
        return opened({"time": now, "state": np.zeros(1, np.float32), **fields}, 1.0)

    return found, ask


def settle(found: Assist) -> None:
    """Wait until the far policy's answer lies there."""
    assert found._far._answer is not None
    end = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if not found._far._answer.empty():
            return
        end.wait(0.005)
    raise AssertionError("no answer")


def test_the_far_rows_are_followed_from_their_moment_on_until_half_are_left() -> None:
    far = Far()
    found, ask = assisted("every:5", far)
    assert ask(1.0)[0] == 10  # near answers, far is asked
    settle(found)
    assert ask(1.2)[:, 0].tolist() == [102, 103, 104, 105, 106, 107, 108, 109]
    assert ask(1.4)[0] == 104
    assert ask(1.5)[0] == 15  # five of ten rows are left, no more than half
    assert ask(4.0)[0] == 40
    assert found.report() == {
        "asked": {"every": 1},
        "answered": 1,
        "late": 0,
        "failed": {},
        "chunks": {"near": 3, "far": 2},
    }
    assert (
        found.text()
        == "2 of 5 chunks from the far policy, 1 requests (1 every): 1 answers, 0 of them too late,"
        " 0 failures"
    )
    ask(6.2)  # five seconds after the answer was seen
    settle(found)
    assert ask(6.7)[0] == 67  # with five of its ten rows left, no more than half
    assert (found.asked["every"], found.late) == (2, 1)


def test_what_is_past_is_not_followed_again() -> None:
    found, ask = assisted("every:5", Far())
    ask(1.0)
    settle(found)
    assert [float(ask(now)[0, 0]) for now in (1.4, 1.5, 1.4)] == [
        104,
        15,
        14,
    ]  # the last frame is out of order


def test_a_clock_that_is_set_back_by_more_than_frames_come_out_of_order() -> None:
    found, ask = assisted("every:1000", Far())
    ask(21.0)
    settle(found)
    ask(21.0)
    np.testing.assert_array_equal(ask(11.0), Far().rows)  # by ten seconds, from its first row on
    ask(21.0)
    assert found.asked == {"every": 1}
    assert ask(10.5)[0] == 105
    assert found.asked == {"every": 2}  # nobody knows when the last answer came


def test_both_policies_have_rows_of_one_width() -> None:
    far, width = Far(), [2]
    found, ask = assisted("every:0", far, lambda observation, limit: np.zeros((4, width[0]), np.float32))
    ask(1.0)
    settle(found)
    ask(1.1)
    wanted = "expected 1 to 1024 actions of 2 numbers, got shape [10, 1]"
    assert found.failed == {f"the far policy: a chunk: {wanted}": 1}
    width[0] = 3
    with pytest.raises(RowsError, match=r"a chunk: .* actions of 2 numbers, got shape \[4, 3\]"):
        ask(1.2)


def test_an_observation_without_a_time_is_of_the_present() -> None:
    found, ask = assisted("every:5", Far(), lambda *_: np.ones((10, 1), np.float32))
    ask(3.0, time=None)
    settle(found)
    ask(3.2)
    assert found.far_chunks == 1


def test_both_connections_are_ended() -> None:
    far, other = Far(), Far()
    found, ask = assisted("every:0", far)
    ask(1.0)
    settle(found)
    found.close()
    assert far.closed.wait(WAIT_S)
    found().close()  # a function has nothing to end
    assisted("every:0", far, other)[0]().close()
    assert other.closed.is_set()


def test_a_robot_does_not_wait_for_the_far_policy() -> None:
    far = Far()
    far.gate.clear()
    found, ask = assisted("every:0", far)
    assert [float(ask(t)[0, 0]) for t in (1.0, 1.1, 1.2)] == [10, 11, 12]
    assert found.asked["every"] == 1  # one request is under way at a time
    far.gate.set()
    settle(found)
    assert ask(1.3)[0] == 103


def test_a_far_policy_that_fails_is_told_and_asked_again_later() -> None:
    far = Far()
    far.fault = ClientError("no such host")
    found, ask = assisted("every:0", far)
    ask(1.0)
    settle(found)
    assert ask(1.01)[0] == 10
    assert found.failed == {"ClientError: no such host": 1}
    assert found.asked["every"] == 1  # 50 ms after a failure, then longer
    far.fault = None
    ask(2.0)
    settle(found)
    assert ask(2.1)[0] == 101
    settle(found)
    far.rows = np.full((10, 1), np.nan, np.float32)
    ask(5.0)
    settle(found)
    assert ask(5.1)[0] == 51
    assert found.failed["the far policy: a chunk is not finite"] == 1
    assert found.faults.counts == {"ClientError": 1, "bad_chunk": 1}


def test_disagreement_asks() -> None:
    far = Far()
    jump = {"by": 0.0}
    found, ask = assisted("disagreement:0.5", far, lambda o, limit: near(o, limit) + jump["by"])
    ask(1.0)
    ask(1.2)
    assert found.asked == {}
    jump["by"] = 0.5
    ask(1.3)
    assert found.asked == {}  # no more than the limit
    jump["by"] = 1.5
    ask(1.4)
    settle(found)
    assert (found.asked, far.asked) == ({"disagreement": 1}, 1)
    assert ask(1.5)[0] == 101
    assert found.asked == {"disagreement": 1}
    ask(1.6)  # with the far rows, which are followed now
    assert found.asked == {"disagreement": 2}


def test_rows_of_no_common_step_do_not_disagree() -> None:
    found, ask = assisted("disagreement:0", Far())
    ask(1.0)
    assert ask(7.0)[0] == 70
    assert found.asked == {}


def test_uncertainty_asks_and_needs_noise() -> None:
    far = Far()
    noise = {"by": 0.5}
    found, ask = assisted(
        "uncertainty:0.5", far, lambda o, limit: near(o, limit) + noise["by"] * (o.get("seed") or 0)
    )
    ask(1.0)
    assert found.asked == {}  # no more than the limit
    noise["by"] = 0.4  # times its draw, the second
    ask(1.2)
    settle(found)
    assert found.asked == {"uncertainty": 1}
    with pytest.raises(ClientError, match="uncertainty: expected a policy that draws noise"):
        assisted("uncertainty:0.5", far)[1](1.0)


def test_far_rows_are_rebased_on_the_newest_state() -> None:
    far = Far()
    found, ask = assisted("every:5", far, motion=Relative((0,), (0,)))
    ask(1.0)
    settle(found)
    assert ask(1.2, state=np.array([2.0], np.float32))[0] == 100  # target 102, from 2


def test_rules_are_read() -> None:
    assert parse_assist("every:5,uncertainty:0.1") == AssistRule(5.0, None, 0.1)
    for text in (
        "",
        "often",
        "every",
        "every:-1",
        "every:nan",
        "every:inf",
        "every:1,every:2",
        "disagreement:x",
    ):
        with pytest.raises(ValueError, match="assist: expected every:SECONDS"):
            parse_assist(text)

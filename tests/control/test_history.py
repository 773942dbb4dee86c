"""What a robot remembers of its control steps, by the rule written out: the newest seen at or before a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sinew_client import ClientError
from sinew_client.history import History
from sinew_client.types import Moment, PolicySpec, VectorSpec


def seen(history: History, *steps: int) -> None:
    for step in steps:
        history.see(step, {"front": np.full((2, 2, 3), step % 256, np.uint8)}, np.float32([step]))


def states(moments: tuple[Moment, ...]) -> list[int]:
    found = [int(moment.state[0]) for moment in moments]
    assert [int(moment.images["front"][0, 0, 0]) for moment in moments] == [state % 256 for state in found]
    return found


@pytest.mark.parametrize(("moments", "stride"), [(2, 1), (3, 1), (3, 2), (4, 5)])
def test_moments_are_strides_of_control_steps_before(moments: int, stride: int) -> None:
    history = History(moments, stride)
    for step in range(40):
        seen(history, step)
        wanted = [max(0, step - back * stride) for back in range(moments - 1, 0, -1)]
        assert states(history.before(step)) == wanted
        assert len(history._kept) == min(step + 1, (moments - 1) * stride + 1)  # and nothing that is not read


def test_a_step_that_saw_nothing_is_stood_for_by_the_one_before() -> None:
    history = History(4, 2)
    seen(history, 0, 1, 3, 5)
    assert states(history.before(6)) == [0, 1, 3]  # of 0, 2 and 4
    assert states(history.before(9)) == [3, 5, 5]  # of 3, 5 and 7


def test_before_the_first_stands_the_first_or_nothing() -> None:
    for padding, wanted in (("repeat", [10, 10, 11]), ("mask", [10, 11])):
        history = History(4, 1, padding)
        assert history.before(10) == ()
        seen(history, 10, 11)
        assert states(history.before(12)) == wanted  # of 9, 10 and 11
        history.clear()
        assert history.before(12) == ()


def test_of_one_step_the_last_counts_and_frames_are_copies() -> None:
    history, frame, state = History(2), np.zeros((2, 2, 3), np.uint8), np.zeros(1, np.float32)
    history.see(4, {"front": frame}, state)
    frame[:], state[:] = 7, 7
    history.see(4, {"front": frame}, state)
    frame[:], state[:] = 9, 9
    assert states(history.before(5)) == [7]
    assert len(history._kept) == 1
    history = History(3)
    seen(history, 1, 2, 3, 3, 3)
    assert states(history.before(4)) == [2, 3]  # what is seen anew pushes nothing out


def test_one_moment_keeps_nothing() -> None:
    history = History()
    assert (history.moments, history.stride, history.padding) == (1, 1, "repeat")
    seen(history, 0, 1, 2)
    assert history.before(3) == ()
    assert not history._kept


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({}, (1, 1, "repeat")),
        ({"history": None, "history_stride": None, "history_padding": ""}, (1, 1, "repeat")),
        ({"history": 3, "history_stride": 4, "history_padding": "mask"}, (3, 4, "mask")),
    ],
)
def test_a_policy_says_it(policy: dict[str, Any], wanted: tuple[int, int, str]) -> None:
    history = History.of(policy)
    assert (history.moments, history.stride, history.padding) == wanted


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"history": True}, "policy.history: expected a whole number, got True"),
        ({"history": 0.5}, "policy.history: expected a whole number, got 0.5"),
        ({"history": 2, "history_stride": "1"}, "policy.history_stride: expected a whole number, got '1'"),
        ({"history": 17}, "policy.history: expected 1 to 16, got 17"),
        (
            {"history": 6, "history_stride": 205},
            "history_stride: expected 1 to 204 control steps between 6 observation steps",
        ),
        ({"history": 2, "history_stride": -1}, "history_stride: expected 1 to 1024 control steps"),
        (
            {"history": 2, "history_padding": "oldest"},
            "policy.history_padding: expected repeat or mask, got 'oldest'",
        ),
    ],
)
def test_a_history_that_no_policy_has_is_refused_by_name(policy: dict[str, Any], text: str) -> None:
    """A server said it, and a robot would keep whatever it asks for."""
    with pytest.raises(ClientError, match=text):
        History.of(policy)
    spec = PolicySpec("a", "b", (), VectorSpec(1), VectorSpec(1), 4, 1, 1, 1).to_dict()
    with pytest.raises(ClientError):
        PolicySpec.from_dict(spec | policy)

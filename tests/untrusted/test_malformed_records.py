"""Records of another shape than their reader shows: one line each, where they raised whatever Python raised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sinew_client.arm.end_effector import KinematicsOptions
from sinew_client.arm.kinematics import KinematicsError
from sinew_eval.evidence import leaderboard

from sinew.cli.top_view import view
from sinew.core import SinewError
from sinew.serve.dashboard.follow import ServerSeen
from tests.hostile.more_readers import EVENTS
from tests.hostile.mutate import places

HOSTILE: tuple[Any, ...] = (None, 5, 10**300, -1.5, "text", [], [[1], 2], {}, {"a": {"b": 1}}, True)


@pytest.mark.parametrize("event", EVENTS)
def test_events_of_another_shape(event: str) -> None:
    """Every value of every event, replaced and left out."""
    shown, messages = 0, []
    for path in places(EVENTS[event]):
        for value in (*HOSTILE, "left out"):
            record = copy.deepcopy(EVENTS[event])
            *parents, last = path
            holder: Any = record
            for key in parents:
                holder = holder[key]
            if value == "left out":
                del holder[last]
            else:
                holder[last] = copy.deepcopy(value)
            seen = ServerSeen("here")
            try:
                seen.hear("about", EVENTS["about"], view)
                seen.hear(event, record, view)
                view(seen)
                seen.to_dict()
                shown += 1
            except SinewError as error:
                messages.append(str(error))
    assert shown > 10
    assert len(messages) > 30
    assert all(each.startswith(f"here: expected {event} of a Sinew server, got ") for each in messages)


def test_an_event_of_a_newer_server_is_left_out() -> None:
    seen = ServerSeen("here")
    seen.hear("weather", {"about": 5}, view)
    assert seen.to_dict()["answers"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([1, 2], r"options: expected an object, got \[1, 2\]"),
        ("tip", "options: expected an object, got 'tip'"),
        (5, "options: expected an object, got 5"),
        ({"within": [10**400, 1]}, "within: expected 2 numbers above 0"),
        ({"singular": 10**400}, "singular: expected one number above 0"),
        ({"\ud800" * 200: 1}, "unknown; known are"),
    ],
)
def test_options_of_an_end_effector(options: Any, message: str) -> None:
    with pytest.raises(KinematicsError, match=message) as caught:
        KinematicsOptions.parse(options)
    str(caught.value).encode()


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), -1, True, "5", None])
def test_numbers_of_a_leaderboard(value: Any) -> None:
    with pytest.raises(SinewError, match="control_hz: expected a number above 0"):
        leaderboard._number_of("control_hz", value, above=True)

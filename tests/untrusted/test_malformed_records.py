"""Records of another shape than their reader shows: one line each, where they raised whatever Python raised."""

from __future__ import annotations

from typing import Any

import pytest
from sinew_client.arm.end_effector import KinematicsOptions
from sinew_client.arm.kinematics import KinematicsError
from sinew_eval.evidence import leaderboard

from sinew.core import SinewError

HOSTILE: tuple[Any, ...] = (None, 5, 10**300, -1.5, "text", [], [[1], 2], {}, {"a": {"b": 1}}, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([1, 2], r"options: expected an object, got \[1, 2\]"),
        ("tip", "options: expected an object, got 'tip'"),
        (5, "options: expected an object, got 5"),
        ({"within": [10**400, 1]}, "within: expected 2 numbers above 0"),
        ({"singular": 10**400}, "singular: expected one number above 0"),
        ({"\ud800" * 200: 1}, "unknown option; use one of"),
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

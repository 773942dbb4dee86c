"""Messages to numbers and back, against the definitions and the bytes of the package rosbags."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.control import NoObservation
from sinew_ros import messages
from sinew_ros.contract import Output
from sinew_ros.messages import Refused
from sinew_ros.newest import Newest

RGB = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)


def message(**fields: Any) -> types.SimpleNamespace:
    stamp = types.SimpleNamespace(**messages.time_of(fields.pop("at", 0.0)))
    return types.SimpleNamespace(header=types.SimpleNamespace(stamp=stamp), **fields)


def image(kind: str, pixels: np.ndarray, padding: int = 0, **changes: Any) -> types.SimpleNamespace:
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    data = np.pad(rows, ((0, 0), (0, padding)))
    fields = {
        "encoding": kind,
        "height": height,
        "width": width,
        "step": data.shape[1],
        "data": data.ravel(),
    }
    return message(**{**fields, **changes})


@pytest.mark.parametrize("padding", [0, 3])
def test_pictures_come_out_red_first(padding: int) -> None:
    alpha = np.full((3, 5, 1), 7, np.uint8)
    grey = RGB[..., :1]
    for encoding, pixels, expected in (
        ("rgb8", RGB, RGB),
        ("bgr8", RGB[..., ::-1], RGB),
        ("rgba8", np.concatenate([RGB, alpha], 2), RGB),
        ("bgra8", np.concatenate([RGB[..., ::-1], alpha], 2), RGB),
        ("mono8", grey, np.repeat(grey, 3, 2)),
    ):
        np.testing.assert_array_equal(messages.picture(image(encoding, pixels, padding)), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoding": "16UC1"}, "encoding '16UC1'"),
        ({"height": 4}, "the number of bytes"),
        ({"step": 3}, "smaller than a row"),
        ({"width": 0}, "the height or the width is 0"),
    ],
)
def test_pictures_that_are_none_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        messages.picture(image("rgb8", RGB, **change))


def test_joints_are_taken_by_name() -> None:
    seen = message(name=["c", "a", "b"], position=[3.0, 1.0, 2.0], velocity=[], effort=[])
    np.testing.assert_array_equal(messages.joints(seen, ["a", "c"], "position"), [1, 3])
    for names, field, said in (
        (["d"], "position", "the joint d is missing"),
        (["a"], "velocity", "the number of values in velocity"),
    ):
        with pytest.raises(Refused, match=said):
            messages.joints(seen, names, field)
    seen.position[1] = np.nan
    with pytest.raises(Refused, match="finite"):
        messages.joints(seen, ["a"], "position")


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=64), st.integers(-1, 40), st.integers(-1, 40), st.integers(-1, 99), st.text(max_size=5)
)
def test_hostile_messages_are_refused(data: bytes, height: int, width: int, step: int, encoding: str) -> None:
    for kind in (encoding, "rgb8", "mono8"):
        seen = message(encoding=kind, height=height, width=width, step=step, data=data)
        try:
            found = messages.picture(seen)
        except Refused:
            continue
        assert found.shape == (height, width, 3)
    with contextlib.suppress(Refused):
        assert messages.compressed(seen) == data


# ----------------------------------------------------------------------------- the newest message


def test_every_message_is_counted_once() -> None:
    source = Newest("front", lambda seen: seen.value, lambda seen: seen, 0.5)
    with pytest.raises(NoObservation, match="front: no message yet"):
        source.take(10.0)
    for at in (0.0, 100.0, 100.1, 100.05, 103.0, 99.0):  # no stamp, good, good, late, of the future, old
        source.put(message(at=at, value=at), now=10.0, clock=100.2)
    assert source.take(10.01) == (100.1, pytest.approx(9.9))
    assert source.take(10.2)[0] == 100.1  # still young enough
    with pytest.raises(NoObservation, match=r"front: the newest message is older than 0.5 s"):
        source.take(10.5)
    assert dict(source.dropped) == {
        "the message has no stamp": 1,
        "not newer than the previous message": 1,
        "the stamp is in the future": 1,
        "older than 0.5 s when it arrived": 1,
    }
    assert (source.received, source.used, source.replaced) == (6, 1, 1)
    assert list(source.ages) == [pytest.approx(0.11)]
    source.put(message(at=20.0, value="again"), now=11.0, clock=20.0)  # another bag: the clock was set back
    assert source.take(11.0) == ("again", 11.0)


def test_arrival_stands_in_for_a_stamp() -> None:
    source = Newest("front", lambda seen: seen.value, lambda seen: seen, 0.5, stamped=False)
    source.put(message(value=1), now=10.0, clock=100.0)
    assert source.take(10.1) == (1, 10.0)


# ----------------------------------------------------------------------------- other implementations

OUTPUT = Output("/arm", "", ("a", "b"), "position", np.array([2.0, 1.0]), np.array([1.0, 0.0]))


def outgoing() -> dict[str, dict[str, Any]]:
    """One message of every type that the bridge publishes."""
    rows = np.array([[3.0, 4.0], [5.0, 6.5]])
    array, state = (
        Output("/arm", kind, OUTPUT.joints, "velocity", OUTPUT.scale, OUTPUT.offset)
        for kind in ("std_msgs/msg/Float64MultiArray", "sensor_msgs/msg/JointState")
    )
    return {
        "trajectory_msgs/msg/JointTrajectory": messages.trajectory(OUTPUT, rows, 0.05),
        "std_msgs/msg/Float64MultiArray": messages.command(array, rows[0], 1.5),
        "sensor_msgs/msg/JointState": messages.command(state, rows[0], 1.5),
        "diagnostic_msgs/msg/DiagnosticArray": messages.diagnostics(2.25, 1, "slow", {"front": "3 received"}),
    }


def test_numbers_leave_in_the_units_of_the_message() -> None:
    trajectory = outgoing()["trajectory_msgs/msg/JointTrajectory"]
    assert [point["positions"] for point in trajectory["points"]] == [[1.0, 4.0], [2.0, 6.5]]
    assert [point["time_from_start"]["nanosec"] for point in trajectory["points"]] == [
        50_000_000,
        100_000_000,
    ]
    assert outgoing()["sensor_msgs/msg/JointState"]["velocity"] == [1.0, 4.0]


@pytest.mark.parametrize("kind", outgoing())
def test_bytes_on_the_wire_are_those_of_rosbags(kind: str) -> None:
    """Two implementations of the same definitions: cyclonedds writes, rosbags reads and writes the same."""
    pytest.importorskip("cyclonedds", reason="the extra `ros` is not installed")
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from sinew_ros import dds_types

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    ours = dds_types.build(dds_types.TYPES[kind], outgoing()[kind]).serialize()
    theirs = store.serialize_cdr(store.deserialize_cdr(ours, kind), kind)
    assert bytes(theirs) == bytes(ours)

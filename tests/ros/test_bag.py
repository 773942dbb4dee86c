"""A bag of 1,000 messages, written and read by the package rosbags, through the robot of topics."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from sinew_client.control import NoObservation
from sinew_ros.__main__ import main
from sinew_ros.contract import parse
from sinew_ros.robot import TopicRobot

from tests.ros.test_bridge import IMAGE, JOINTS, contract
from tests.serve.puppet import desk

START, STEP = 1_700_000_000.0, 0.02  # seconds of the first message, and between two moments
LOST, BAD, UNSTAMPED = (
    range(100, 120),
    (7, 8),
    30,
)  # moments without a picture, with a bad one, with an unstamped one


def write(path: Path, store: Any, count: int) -> None:
    """Write a bag of ``count`` moments: a picture whose pixels tell its number, and joints in another order."""
    from rosbags.rosbag2 import Writer

    types = store.types
    with Writer(path, version=9) as writer:
        topics = {
            "/front": writer.add_connection("/front", IMAGE, typestore=store),
            "/joint_states": writer.add_connection("/joint_states", JOINTS, typestore=store),
        }

        def put(topic: str, kind: str, message: Any, when: float) -> None:
            writer.write(topics[topic], round(when * 1e9), store.serialize_cdr(message, kind))

        for index in range(count):
            when = START + index * STEP
            stamp = types["builtin_interfaces/msg/Time"](sec=int(when), nanosec=round((when % 1) * 1e9))
            header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="arm")
            empty = types["std_msgs/msg/Header"](
                stamp=types["builtin_interfaces/msg/Time"](sec=0, nanosec=0), frame_id=""
            )
            if index not in LOST:
                picture = types[IMAGE](
                    header=empty if index == UNSTAMPED else header, height=4, width=6, is_bigendian=0, step=18,
                    encoding="16UC1" if index in BAD else "bgr8", data=np.full(72, index % 256, np.uint8),
                )  # fmt: skip
                put("/front", IMAGE, picture, when + 0.004)
            none = np.zeros(0)
            joints = types[JOINTS](
                header=header,
                name=["b", "a"],
                position=np.array([-index, index], float),
                velocity=none,
                effort=none,
            )
            put("/joint_states", JOINTS, joints, when + 0.001)


def test_a_bag_of_a_thousand_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from rosbags.rosbag2 import Reader

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    write(tmp_path / "bag", store, 511)
    text = contract("tcp://nobody:1", cameras={"front": {"topic": "/front", "type": IMAGE, "max_age": 0.05}})
    text["state"]["max_age"] = 0.05
    clock = [0.0]  # the bag's is ROS time and the robot's own: no message ages while this machine is busy
    monkeypatch.setattr("sinew_ros.robot.time", SimpleNamespace(monotonic=lambda: clock[0]))
    sent: list[Any] = []
    robot = TopicRobot(parse(text), [sent.append, sent.append], lambda: clock[0])
    seen, blind, total = [], [], 0
    with Reader(tmp_path / "bag") as reader:
        for connection, when, data in reader.messages():
            clock[0] = when * 1e-9
            message = store.deserialize_cdr(data, connection.msgtype)
            total += 1
            if connection.topic == "/joint_states":
                robot.state(0, message)
                continue
            robot.camera("front", message)
            try:
                seen.append(robot.observe())
            except NoObservation as error:
                blind.append(str(error))
    assert total == 511 + 511 - len(LOST) > 1000
    report = robot.report()["topics"]
    assert report["front"]["received"] == 511 - len(LOST)
    assert report["front"]["dropped"] == {
        "encoding '16UC1': expected rgb8, bgr8, rgba8, bgra8, mono8": 2,
        "the message has no stamp": 1,
    }
    for topic in report.values():
        counted = topic["used"] + topic["replaced"] + sum(topic["dropped"].values())
        assert topic["received"] - counted in (0, 1)
    assert report["state"]["replaced"] >= len(LOST) - 1  # nobody asked while the camera was silent
    assert report["front"]["age_ms"]["p50"] == pytest.approx(4.0, abs=0.01)
    index = seen[-1]["state"][0] / 10  # joint a, times the contract's scale
    assert index == 510
    assert seen[-1]["images"]["front"].tolist() == np.full((4, 6, 3), 510 % 256).tolist()
    np.testing.assert_array_equal(seen[-1]["state"], [5100, -5100])
    assert not blind  # a bad picture is dropped, and the one before is young enough


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_a_bag_drives_the_bridge_and_what_came_is_recorded(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from rosbags.rosbag2 import Reader

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    write(tmp_path / "bag", store, 100)  # of 2 s
    with desk() as puppet:
        said = contract(puppet.native, start=True)
        (tmp_path / "robot.yaml").write_text(yaml.safe_dump(said))
        line = ["run", str(tmp_path / "robot.yaml"), "--transport", f"bag:{tmp_path / 'bag'}"]
        kept = ["--record", str(tmp_path / "kept"), "--storage", storage]
        assert main([*line, *kept]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main([*line, *kept]) == 1  # it is there already
        assert "exists already; choose a new folder" in capsys.readouterr().err
        assert main([*line[:-1], f"bag:{tmp_path}"]) == 1
        assert "expected a rosbag of ROS 2" in capsys.readouterr().err
        assert main([*line[:-1], "zenoh"]) == 1
        assert "--transport: expected rclpy, dds or bag:PATH, got zenoh" in capsys.readouterr().err
    assert report["control"]["chunks"] > 0
    assert report["bag"]["failed"] == 0
    assert next((tmp_path / "kept").glob("*.mcap" if storage == "mcap" else "*.db3"))
    found: dict[str, list[Any]] = {}
    with Reader(tmp_path / "kept") as kept_bag, Reader(tmp_path / "bag") as given_bag:
        for connection, _, data in kept_bag.messages():
            found.setdefault(connection.topic, []).append((connection.msgtype, bytes(data)))
        given = [(each.topic, each.msgtype, bytes(data)) for each, _, data in given_bag.messages()]
    for topic in ("/front", "/joint_states"):  # every byte of what was played
        assert found[topic] == [(kind, data) for name, kind, data in given if name == topic]
    assert {topic: len(each) for topic, each in found.items()} == report["bag"]["written"]
    trajectories = [store.deserialize_cdr(data, kind) for kind, data in found["/arm"]]
    assert len(trajectories) == report["published"]["/arm"]
    assert all(each.joint_names == ["a"] for each in trajectories)
    # The puppet's actions are the state's first number, which was 10 x the bag's; out goes what came.
    sent = {round(point.positions[0]) for each in trajectories for point in each.points}
    assert sent <= set(range(100))
    assert sent


def test_a_second_signal_does_not_cut_off_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody presses Ctrl+C once more while the bag is completed."""
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from sinew_ros import bag

    write(tmp_path / "bag", typesys.get_typestore(typesys.Stores.ROS2_HUMBLE), 5)
    close = bag.Bag.close

    def interrupted(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        close(self)

    monkeypatch.setattr(bag.Bag, "close", interrupted)
    with desk() as server:
        text = contract(server.native, start=True, stamps="header")
        (tmp_path / "robot.yaml").write_text(json.dumps(text))
        line = ["run", str(tmp_path / "robot.yaml"), "--transport", f"bag:{tmp_path / 'bag'}"]
        assert main([*line, "--record", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept" / "metadata.yaml").exists()

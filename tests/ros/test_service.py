"""The service GetActionChunk: its bytes, and calls of it over DDS to a program that answers them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sinew_client import Client
from sinew_ros import messages
from sinew_ros.service import KIND, NAME, ChunkService

from tests.ros.test_bridge import FRAME, domain  # noqa: F401 - a fixture
from tests.serve.puppet import desk

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "sinew_msgs"
WAIT_S = 60.0


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(FRAME).save(file, "PNG")
    header = {"stamp": {"sec": 0, "nanosec": 0}, "frame_id": ""}
    return {"header": header, "format": "png", "data": file.getvalue()}


def test_its_bytes_are_those_of_its_definition() -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from sinew_ros import dds_types
    from sinew_ros.bag import build

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    # rmw_cyclonedds puts the caller and the number of the call before either half.
    halves = (PACKAGE / "srv" / "GetActionChunk.srv").read_text().split("---")
    for half, name in zip(halves, ("Request", "Response"), strict=True):
        text = "uint64 guid\nint64 seq\n" + half
        store.register(typesys.get_types_from_msg(text, f"sinew_msgs/msg/{name}"))
    point = {"positions": [0.5, -2.0], "velocities": [], "accelerations": [], "effort": []}
    point["time_from_start"] = {"sec": 0, "nanosec": 50}
    header = {"stamp": {"sec": 3, "nanosec": 4}, "frame_id": "arm"}
    trajectory = {"header": header, "joint_names": ["a", "b"], "points": [point, point]}
    request = {"guid": 1 << 63, "seq": -5, "cameras": ["front"], "images": [picture()], "state": [0.25]}
    request |= {"prompt": "grüß dich", "seed": -1}
    response = {"guid": 7, "seq": 8, "error": "", "trajectory": trajectory, "server_ms": 1.5}
    for kind, fields, name in zip(
        dds_types.SERVICES[KIND], (request, response), ("Request", "Response"), strict=True
    ):
        wanted = store.serialize_cdr(build(store, f"sinew_msgs/msg/{name}", fields), f"sinew_msgs/msg/{name}")
        made = dds_types.build(kind, fields).serialize()
        assert bytes(made)[4:] == bytes(wanted)[4:]  # behind the encapsulation, whose options may differ


def test_calls_are_answered_over_dds(domain: int) -> None:  # noqa: F811
    from sinew_ros.dds import Dds

    with desk() as server:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(["packages/sinew_ros", *sys.path])}
        line = [sys.executable, "-m", "sinew_ros", "serve", server.native, "--transport", "dds"]
        without = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert without.returncode == 1
        assert "--hz: the policy states no control rate; pass --hz RATE" in without.stderr
        with subprocess.Popen(
            [*line, "--hz", "20"], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE
        ) as program:
            caller = Dds(domain)
            try:
                asked = {"cameras": ["front"], "images": [picture()], "state": [0.5, 0.25]}
                asked |= {"prompt": "go", "seed": 3}
                answer = caller.call(NAME, KIND, asked, WAIT_S)
                wrong = caller.call(NAME, KIND, asked | {"state": [1.0]}, WAIT_S)
                unnamed = caller.call(NAME, KIND, asked | {"cameras": []}, WAIT_S)
                program.send_signal(signal.SIGTERM)
                told = json.loads(program.communicate(timeout=WAIT_S)[0])
            finally:
                program.kill()
                caller.close()
        with Client(server.native, timeout=WAIT_S) as client:
            chunk = client.infer(
                {"images": {"front": FRAME}, "state": [0.5, 0.25], "prompt": "go", "seed": 3}
            )
    assert program.returncode == 0
    assert told == {"answered": 1, "failed": 2}
    points = answer.trajectory.points
    np.testing.assert_array_equal([each.positions for each in points], chunk.actions)
    assert [each.time_from_start.nanosec for each in points[:2]] == [50_000_000, 100_000_000]
    assert answer.error == ""
    assert "state: expected shape [2], got shape [1]" in wrong.error
    assert "[bad_observation]" in wrong.error
    assert "cameras: expected one name for each of 1 images, got 0" in unnamed.error
    assert wrong.trajectory.points == unnamed.trajectory.points == []


def test_a_call_that_makes_no_sense_is_answered_with_the_reason() -> None:
    """Whatever fails behind a call, the thread that answers goes on."""
    with desk() as server:
        service = ChunkService(server.native, hz=20)
        good = SimpleNamespace(
            cameras=["front"], images=[SimpleNamespace(**picture())], state=[0.5, 0.25], prompt="go", seed=3
        )
        for change, said in (
            ({"prompt": "\udc80"}, "InvalidObservation"),
            ({"state": ["a", "b"]}, "ValueError"),
        ):
            answer = service.answer(SimpleNamespace(**{**vars(good), **change}))
            assert answer["error"].endswith(f"[{said}]")
            assert answer["trajectory"]["points"] == []
        assert service.answer(good)["error"] == ""
        assert (service.answered, service.failed) == (1, 2)
        service.close()


def test_a_reply_waits_for_its_callers_reader(domain: int) -> None:  # noqa: F811
    """DDS may announce a caller's writer before its reader. A reply written between the two is lost."""
    from cyclonedds.pub import DataWriter
    from cyclonedds.sub import DataReader
    from sinew_ros import dds, dds_types

    server, caller = dds.Dds(domain), dds.Dds(domain)
    answered = threading.Event()

    def answer(request: Any) -> dict[str, Any]:
        answered.set()
        trajectory = {"header": messages.header(0.0), "joint_names": [], "points": []}
        return {"error": request.prompt, "trajectory": trajectory, "server_ms": 0.0}

    try:
        server.serve(NAME, KIND, answer)
        request, response = dds_types.SERVICES[KIND]
        qos = dds._qos("command")
        writer = DataWriter(caller._participant, caller._topic(NAME + "Request", request, "rq"), qos=qos)
        while not writer.get_matched_subscriptions():
            time.sleep(0.001)
        asked = dds_types.build(
            request, {"cameras": [], "images": [], "state": [], "prompt": "go", "seed": 1}
        )
        asked.guid, asked.seq = 7, 1
        writer.write(asked)
        assert answered.wait(WAIT_S)
        time.sleep(0.05)
        reader = DataReader(caller._participant, caller._topic(NAME + "Reply", response, "rr"), qos=qos)
        end = time.monotonic() + WAIT_S
        while not (found := reader.take(1)) and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        caller.close()
        server.close()
    assert [(each.seq, each.error) for each in found] == [(1, "go")]

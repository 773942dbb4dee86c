"""LeRobot's remote inference over real Zenoh sessions on loopback: the conformance list of the protocol.

The names C01 to C52 are the list's. LeRobot 0.7 was not on the package index, so the robot here is
``lerobot_remote_client.py``, which follows huggingface/lerobot at 88807eb6.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

pytest.importorskip("zenoh", reason="the wire needs eclipse-zenoh")

import zenoh
from sinew_client import Client

from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.transport.listen import Listen, RemoteSettings
from sinew.serve.wires.lerobot_remote import wire as remote_wire
from tests import processes
from tests.hostile.decoders import image, mutate
from tests.serve.lerobot_remote_client import (
    ROOT,
    RemoteFault,
    RemoteRobot,
    array,
    direct,
    opened,
    rgb,
    tensor,
)
from tests.serve.puppet import FRAME, WAIT_S, Puppet, desk, until
from tests.serve.test_server import ServerProcess, serving

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
WIRE = "lerobot-remote"
SHORT_S = 0.3  # in which nothing may come


def features(value: float = 0.5, **changes: Any) -> dict[str, Any]:
    found = {
        "observation.state": tensor(np.array([value, 0], np.float32)),
        "observation.images.front": rgb(FRAME),
    }
    return found | changes


@pytest.fixture
def at() -> Iterator[SimpleNamespace]:
    with desk((WIRE,)) as found:
        found.address = getattr(found, WIRE)
        yield found


@pytest.fixture
def robot(at: SimpleNamespace) -> Iterator[RemoteRobot]:
    made = RemoteRobot(at.address, "puppet")
    yield made
    made.close(politely=False)


def fault(act: Callable[[], Any]) -> RemoteFault:
    with pytest.raises(RemoteFault) as caught:
        act()
    return caught.value


# ----------------------------------------------------------------------------- describe and open


def test_c01_to_c07_the_descriptor(at: SimpleNamespace, robot: RemoteRobot) -> None:
    body = robot.describe()
    assert set(body) >= {
        "deployment", "instance_id", "artifact_identity", "ready", "semantics", "capabilities",
        "execution_contracts", "limits", "software",
    }  # fmt: skip
    assert body["artifact_identity"].startswith("sha256:")
    capabilities = body["capabilities"]
    known = {
        "modes", "prediction_steps", "execution_steps", "action_interval", "features", "action_feature", "language",
        "training_max_delay", "rtc_horizon", "current_observation_only", "retains_session_state",
        "action_representation", "model_action_dim",
    }  # fmt: skip
    assert set(capabilities) <= known
    for each in (*capabilities["features"], capabilities["action_feature"]):
        assert set(each) == {"name", "shape", "dtype", "kind", "names", "semantics"}
        assert each["semantics"]
        assert each["kind"] in ("tensor", "rgb")
    action = capabilities["action_feature"]
    assert (action["name"], action["dtype"], len(action["shape"])) == ("action", "float32", 1)
    assert len(action["names"]) == action["shape"][0]
    assert set(body["limits"]) >= {
        "action_deadline_s", "language_deadline_s", "idle_timeout_s", "max_input_chars", "max_output_chars",
    }  # fmt: skip
    assert robot.presence.get(timeout=WAIT_S) is True
    message = robot.envelope("describe", {}, instance_id="", session_id="")
    with pytest.raises(TimeoutError, match="no server answers"):
        robot.query(f"{ROOT}/other/describe", message, timeout=SHORT_S)


def test_c08_and_c09_open(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.describe()
    message = robot.envelope("open", robot.open_body(), session_id="")
    first = robot.ask(f"{robot.at}/open", message, "accepted")
    again = robot.ask(f"{robot.at}/open", message, "accepted")
    assert first == again
    assert first["generation"] == 0
    other = robot.ask(f"{robot.at}/open", robot.envelope("open", robot.open_body()), "accepted")
    assert other["session_id"] != first["session_id"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"expected_artifact": "sha256:other"}, "incompatible"),
        ({"semantics": "degrees"}, "incompatible"),
        ({"action_interval": 0.5}, "incompatible"),
        ({"features": []}, "incompatible"),
        ({"mode": "rtc_trained"}, "unsupported"),
        ({"mode": "fly"}, "malformed"),
        ({"required_capabilities": ["chunk_alignment_v1"]}, "unsupported"),
        ({"chunk_settings": {"chunk_merge": "aligned"}}, "incompatible"),
        ({"chunk_settings": {"chunk_merge": "blend"}}, "incompatible"),
        ({"encoding": "png"}, "unsupported"),
    ],
)
def test_c10_to_c19_and_c22_an_open_request_that_differs(
    at: SimpleNamespace, robot: RemoteRobot, changes: dict[str, Any], code: str
) -> None:
    robot.describe()
    assert fault(lambda: robot.open(**changes)).code == code
    robot.open()
    robot.begin()
    assert (robot.actions(features()) == 0.5).all()


def test_c20_and_c21_other_instances_and_messages(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.describe()
    key = f"{robot.at}/open"
    body = robot.open_body()
    for message, code in (
        (robot.envelope("open", body, instance_id="other"), "stale"),
        (robot.envelope("open", body, request_id=""), "malformed"),
        (robot.envelope("describe", {}), "malformed"),
    ):
        reply = robot.query(key, message)
        assert (reply["message_type"], reply["body"]["code"]) == ("error", code)
        assert reply["request_id"] == message["request_id"]
    robot.open()


# ----------------------------------------------------------------------------- observations


def test_c23_to_c27_observations(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    assert (robot.actions(features(0.25)) == 0.25).all()
    body = robot.infer(features(), "räum auf 🤖", observation_id="ö", capture_time=0.1 + 0.2, task_version=7)
    assert body["capture_time"] == 0.1 + 0.2
    assert robot.actions(features(**{"observation.images.front": rgb(FRAME, image("JPEG"))})).shape == (3, 2)
    big = tensor(np.array([0.75, 0], np.float32), "big")
    assert (robot.actions(features(**{"observation.state": big})) == 0.75).all()
    message = robot.envelope("observation", robot.body(features(0.125)), more="keys", version=1)
    robot.send(dict(sorted(message.items())))
    assert (array(robot.receive(message)["body"]["canonical_actions"]) == 0.125).all()
    assert at.puppet.computed[1] == "räum auf 🤖"


def test_c28_and_c29_what_is_stale(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    message = robot.envelope("observation", robot.body(features()))
    robot.send(message)
    robot.receive(message)

    def sent(**changes: Any) -> str:
        body = robot.body(features()) | changes.pop("body", {})
        return fault(lambda: asked(robot, robot.envelope("observation", body, **changes))).code

    assert sent(request_id=message["request_id"]) == "stale"
    assert sent(body={"sequence": 1}) == "stale"
    assert sent(generation=1) == "stale"
    assert fault(lambda: robot.control("reset", 0, session_id="other")).code == "stale"
    robot.sequence += 100
    assert (robot.actions(features()) == 0.5).all()


def asked(robot: RemoteRobot, message: dict[str, Any]) -> dict[str, Any]:
    robot.send(message)
    return robot.receive(message)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"artifact_identity": "sha256:other"}, "incompatible"),
        ({"features": {}}, "incompatible"),
        ({"features": features(more=tensor(np.zeros(1)))}, "incompatible"),
        ({"features": features(**{"observation.state": tensor(np.zeros(3, np.float32))})}, "incompatible"),
        ({"features": features(**{"observation.state": tensor(np.zeros(2))})}, "incompatible"),
        ({"features": features(**{"observation.images.front": rgb(FRAME[:40])})}, "incompatible"),
        (
            {"features": features(**{"observation.images.front": rgb(FRAME, b"\xff\xd8\xff no picture")})},
            "malformed",
        ),
        (
            {"features": features(**{"observation.images.front": rgb(FRAME[:, :9], image("JPEG"))})},
            "incompatible",
        ),
        ({"task": 3}, "malformed"),
        ({"task": "a" * 5000}, "malformed"),
        ({"task_version": -1}, "malformed"),
        ({"sequence": True}, "malformed"),
        ({"observation_id": ""}, "malformed"),
        ({"delay": 1000}, "malformed"),
        ({"cursor": "1"}, "malformed"),
        ({"canonical_continuation": tensor(np.zeros((3, 5), np.float32))}, "malformed"),
        ({"features": features(np.nan)}, "malformed"),
        (
            {"features": features(**{"observation.state": tensor(np.array([np.inf, 0], np.float32))})},
            "malformed",
        ),
    ],
)
def test_c30_to_c34_an_observation_that_does_not_fit(
    at: SimpleNamespace, robot: RemoteRobot, changes: dict[str, Any], code: str
) -> None:
    robot.start()
    message = robot.envelope("observation", robot.body(features()) | changes)
    told = fault(lambda: asked(robot, message))
    assert told.code == code
    assert "/" not in str(told).replace("LeRobot", ""), "a path"
    assert at.puppet.computed == []
    assert (robot.actions(features()) == 0.5).all()


def test_c35_damaged_messages_are_silent_or_an_error(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    good = msgpack.packb(robot.envelope("observation", robot.body(features())))
    deep: Any = 0
    for _ in range(40):
        deep = [deep]
    for payload in (
        b"", b"\xc1", good[: len(good) // 2], b"\x82\xa1a\x00\xa1a\x00", bytes(33 << 20),
        msgpack.packb(robot.envelope("observation", {"x": msgpack.ExtType(1, b"")})),
        msgpack.packb(robot.envelope("observation", {"x": deep})),
        msgpack.packb(robot.envelope("observation", {"x": [[0] * 300] * 300})),
        msgpack.packb(robot.envelope("observation", {"x": "a" * 20_000})),
        msgpack.packb(robot.envelope("observation", {}, version=2)),
        msgpack.packb(robot.envelope("fly", {})),
    ):  # fmt: skip
        robot.send(payload)
        with pytest.raises(TimeoutError):
            robot.query(f"{robot.key}/control", payload if len(payload) < 1 << 24 else b"\xc1", timeout=2.0)
    assert fault(lambda: asked(robot, robot.envelope("control", {"operation": "reset"}))).code == "malformed"
    assert (robot.actions(features()) == 0.5).all()
    assert at.puppet.computed == ["go"]


def test_c36_a_second_observation_at_once_is_busy(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    first = robot.envelope("observation", robot.body(features(), "wait"))
    robot.send(first)
    until(lambda: at.scheduler.stats()["running"])
    second = robot.envelope("observation", robot.body(features()))
    assert fault(lambda: asked(robot, second)).code == "busy"
    at.puppet.release.set()
    assert (array(robot.receive(first)["body"]["canonical_actions"]) == 0.5).all()


def test_the_bytes_of_a_request_are_counted_until_its_answer(at: SimpleNamespace, robot: RemoteRobot) -> None:
    ledger, node = at.opened[WIRE]._ledger, at.opened[WIRE]._node
    robot.start()
    waiting = robot.envelope("observation", robot.body(features(), "wait"))
    robot.send(waiting)
    until(lambda: at.scheduler.stats()["running"])
    assert FRAME.nbytes < ledger.held_bytes < 2 * FRAME.nbytes
    assert fault(lambda: asked(robot, robot.envelope("observation", robot.body(features())))).code == "busy"
    assert ledger.held_bytes < 2 * FRAME.nbytes
    at.puppet.release.set()
    robot.receive(waiting)
    fault(lambda: robot.infer(features(), capture_time="now"))
    assert (ledger.held_bytes, node._held) == (0, 0)
    robot.control("close", 0)
    assert (ledger.held_bytes, node._held, len(ledger.open)) == (0, 0, 0)


def test_c37_another_robots_session_is_out_of_reach(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    other = RemoteRobot(at.address, "puppet")
    try:
        other.start()
        message = robot.envelope("observation", robot.body(features(0.9)), session_id=other.name)
        with pytest.raises((RemoteFault, TimeoutError)):
            asked_briefly(robot, message)
        # What a robot sends into another one's answers does not arrive there, and it sees nobody's tokens.
        before = other.answers.qsize()
        robot.session.put(f"{other.key}/act", b"a false answer")
        tokens = []
        watching = robot.session.liveliness().declare_subscriber(
            "lerobot/**", direct(tokens.append), history=True
        )
        heard: list[Any] = []
        listening = robot.session.declare_subscriber(f"{other.key}/obs", direct(heard.append))
        assert (other.actions(features(0.25)) == 0.25).all()
        time.sleep(SHORT_S)
        assert other.answers.qsize() == before
        assert not heard
        assert {str(each.key_expr).rpartition("/sessions/")[2] for each in tokens} <= {
            f"{robot.name}/alive", f"{robot.at}/alive",
        }  # fmt: skip
        watching.undeclare()
        listening.undeclare()
    finally:
        other.close(politely=False)


def asked_briefly(robot: RemoteRobot, message: dict[str, Any]) -> dict[str, Any]:
    robot.send(message)
    return robot.receive(message, timeout=SHORT_S)


# ----------------------------------------------------------------------------- control


def test_c38_to_c40_control(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    robot.actions(features())
    old = robot.envelope("observation", robot.body(features()))
    robot.control("invalidate", 1)
    robot.control("invalidate", 1)
    robot.control("reset", 5)
    assert robot.control("status", 5)["session"] == robot.name
    assert fault(lambda: asked(robot, old)).code == "stale"
    for operation, generation, code in (
        ("reset", 4, "stale"),
        ("status", 6, "stale"),
        ("fly", 6, "malformed"),
    ):
        assert fault(lambda: robot.control(operation, generation)).code == code  # noqa: B023
    robot.generation = 5
    assert (robot.actions(features()) == 0.5).all()
    message = robot.envelope("control", {"operation": "reset"}, generation=6)
    assert robot.query(f"{robot.key}/control", message) == robot.query(f"{robot.key}/control", message)


def test_an_invalidation_ends_the_inference_under_way(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    robot.send(robot.envelope("observation", robot.body(features(), "wait")))
    until(lambda: at.scheduler.stats()["running"])
    robot.control("invalidate", 1)  # which would never be acknowledged otherwise: "wait" waits for ever
    assert at.puppet.computed == []
    assert (robot.actions(features()) == 0.5).all()
    assert robot.answers.empty()


def test_the_first_reset_waits_until_the_robot_hears_its_answers(
    at: SimpleNamespace, robot: RemoteRobot, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot.describe()
    robot.open()
    with monkeypatch.context() as patch:
        patch.setattr(remote_wire, "HEARS_S", SHORT_S)
        assert fault(lambda: robot.control("reset", 0)).code == "timeout"
    robot.begin()


def test_c41_aligned_chunks(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start(merge="aligned")
    assert "chunk_alignment_v2" in robot.descriptor["execution_contracts"]
    body = robot.infer(features(), observation_cursor=34, cursor=35)
    assert (body["observation_cursor"], body["cursor"]) == (34, 35)
    for wrong in (
        {"observation_cursor": 2, "cursor": 1},
        {"observation_cursor": True, "cursor": 1},
        {"observation_cursor": ..., "cursor": 1},
    ):
        assert fault(lambda: robot.infer(features(), **wrong)).code == "malformed"  # noqa: B023


class Speaker(Puppet):
    """Answers questions, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Observation] = []

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        self.seen.append(observation)
        if observation.asks:
            text = f"{observation.asks}: {observation.question or observation.prompt}"
            return ActionChunk(
                np.zeros((0, 2), np.float32), text=text if observation.question != "hush" else " "
            )
        return super().run(observation, cancel=cancel)


def test_c42_requests_for_text() -> None:
    with desk((WIRE,), policy=(speaker := Speaker())) as at:
        robot = RemoteRobot(getattr(at, WIRE), "puppet")
        try:
            robot.start()
            assert not robot.descriptor["capabilities"]["language"]
            assert fault(lambda: robot.say(features(), "vqa", "what is it")).code == "unsupported"
            at.service.policies.get().metadata["server"]["says"] = ["question", "subtask"]
            robot.start()
            assert robot.descriptor["capabilities"]["language"]
            found = robot.say(features(), "vqa", "what is it")
            assert found["answer"] == "question: what is it"
            assert found["duration_s"] >= 0
            assert robot.say(features(), "next_subtask", "tidy up")["answer"] == "text_only: tidy up" or (
                speaker.seen[-1].subtask and speaker.seen[-1].prompt == "tidy up"
            )
            assert fault(lambda: robot.say(features(), "sing", "la")).code == "unsupported"
            assert fault(lambda: robot.say(features(), "vqa", " ")).code == "malformed"
            assert fault(lambda: robot.say(features(), "vqa", "hush")).code == "execution"
            assert (robot.actions(features()) == 0.5).all()
        finally:
            robot.close(politely=False)


def test_c43_a_prefix_reaches_the_policy() -> None:
    with desk((WIRE,), policy=(speaker := Speaker())) as at:
        at.service.policies.get().metadata["server"]["guidance"] = ["no-jacobian", "guided"]
        robot = RemoteRobot(getattr(at, WIRE), "puppet")
        try:
            robot.start("rtc_guided")
            assert at.service.uses == {"no-jacobian"}
            first = robot.infer(features())
            assert speaker.seen[-1].previous is None
            rest = {
                "canonical_continuation": tensor(array(first["canonical_actions"])[1:]),
                "model_continuation": tensor(array(first["model_actions"])[1:]),
            }
            robot.infer(features(), delay=2, **rest)
            seen = speaker.seen[-1]
            assert (seen.delay, seen.rtc) == (2, "no-jacobian")
            assert seen.previous is not None
            np.testing.assert_array_equal(seen.previous, array(first["canonical_actions"])[1:])
            short = rest | {"model_continuation": tensor(array(first["model_actions"])[2:])}
            for wrong in (short, rest | {"model_continuation": None}):
                assert fault(lambda: robot.infer(features(), **wrong)).code == "malformed"  # noqa: B023
        finally:
            robot.close(politely=False)


# ----------------------------------------------------------------------------- sessions


def test_c44_several_robots_at_once(at: SimpleNamespace) -> None:
    found: dict[int, list[np.ndarray]] = {}

    def drive(number: int) -> None:
        robot = RemoteRobot(at.address, "puppet", mode=("peer", "client")[number % 2])
        try:
            robot.start()
            found[number] = [robot.actions(features(number / 8 + step / 256)) for step in range(5)]
            robot.close()
        finally:
            robot.close(politely=False)

    robots = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
    for each in robots:
        each.start()
    for each in robots:
        each.join(WAIT_S)
    for number in range(4):
        for step, rows in enumerate(found[number]):
            assert (rows == np.float32(number / 8 + step / 256)).all()


def test_a_full_server_is_busy_with_details() -> None:
    with desk((WIRE,), listen=Listen(max_connections=1)) as at:
        robot = RemoteRobot(getattr(at, WIRE), "puppet")
        try:
            robot.start()
            told = fault(robot.open)
            assert told.code == "busy"
            assert told.more == {"admission_blocker": "active_session", "absence_grace_remaining_s": None}
            assert (robot.actions(features()) == 0.5).all()
        finally:
            robot.close(politely=False)


def test_open_requests_have_a_rate(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.describe()
    codes = []
    for _ in range(2 * remote_wire.OPENS):
        try:
            robot.open()
        except RemoteFault as error:
            codes.append(error.code)
    assert set(codes) == {"busy"}


def test_c45_and_c46_close(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    robot.actions(features())
    began, key = time.monotonic(), robot.key
    robot.control("close", 0)
    assert time.monotonic() - began < WAIT_S
    assert not at.opened[WIRE]._sessions
    with pytest.raises(TimeoutError):
        asked_briefly(robot, robot.envelope("observation", robot.body(features())))
    message = robot.envelope("control", {"operation": "reset"})
    assert robot.query(f"{key}/control", message)["body"]["code"] == "stale"
    robot.start()
    assert (robot.actions(features()) == 0.5).all()


def test_c47_and_c48_a_lost_robot_is_released_after_the_grace(
    at: SimpleNamespace, robot: RemoteRobot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_wire, "GRACE_S", 1e6)
    robot.start()
    sessions = at.opened[WIRE]._sessions
    session = sessions[robot.name]
    robot.token.undeclare()
    until(lambda: session.absent is not None)
    robot.token = robot.session.liveliness().declare_token(f"{robot.key}/alive")
    until(lambda: session.absent is None)
    assert (robot.actions(features()) == 0.5).all()
    robot.token.undeclare()
    until(lambda: session.absent is not None)
    monkeypatch.setattr(remote_wire, "GRACE_S", 0.0)
    until(lambda: not sessions)


GO_AND_WAIT = """
import sys, time
import numpy as np
from tests.serve.lerobot_remote_client import RemoteRobot, rgb, tensor
robot = RemoteRobot(sys.argv[1], "puppet").start()
seen = {
    "observation.state": tensor(np.zeros(2, np.float32)),
    "observation.images.front": rgb(np.zeros((48, 64, 3), np.uint8)),
}
robot.actions(seen)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_robot_is_released(at: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = at.opened[WIRE]._sessions
    killed = processes.Process([sys.executable, "-c", GO_AND_WAIT, at.address], stdout=-1)
    assert killed.stdout.readline() == "ready\n"
    assert len(sessions) == 1
    monkeypatch.setattr(
        remote_wire, "GRACE_S", 0.0
    )  # not before: until its token is heard, a session needs the grace
    killed.kill()
    killed.wait()
    killed.stdout.close()
    until(lambda: not sessions)


def test_c49_a_robot_that_connects_again(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    other = RemoteRobot(at.address, "puppet")
    try:
        other.start()
        assert other.descriptor == robot.descriptor
        assert other.name != robot.name
    finally:
        other.close()


def test_c50_a_hundred_observations(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    for step in range(100):
        assert (robot.actions(features(step / 128)) == step / 128).all()


def test_c51_damaged_messages_on_all_keys_and_then_a_good_session(
    at: SimpleNamespace, robot: RemoteRobot
) -> None:
    rng = random.Random(51)
    robot.start()
    observation = msgpack.packb(robot.envelope("observation", robot.body(features())))
    question = msgpack.packb(robot.envelope("language_request", {"kind": "vqa"}))
    control = msgpack.packb(robot.envelope("control", {"operation": "reset"}))
    opening = msgpack.packb(robot.envelope("open", robot.open_body()))
    describe = msgpack.packb(robot.envelope("describe", {}))
    queries = [
        (f"{ROOT}/puppet/describe", describe), (f"{robot.at}/open", opening), (f"{robot.key}/control", control),
        (f"{robot.at}/sessions/*/control", control), (f"{robot.at}/**", control),
    ]  # fmt: skip
    for number in range(300):
        if number % 2:
            key, good = rng.choice(queries)
            for reply in robot.session.get(key, payload=mutate(rng, good), timeout=WAIT_S):
                assert reply.ok is None or robot.read(reply.ok.payload.to_bytes())
        else:
            key, good = rng.choice([("obs", observation), ("language/request", question)])
            robot.send(mutate(rng, good), key)
    thread = at.opened[WIRE]._thread
    assert thread.is_alive()
    assert at.service.problems() == []
    again = RemoteRobot(at.address, "puppet")
    try:
        again.start()
        assert (again.actions(features()) == 0.5).all()
    finally:
        again.close()


def test_c52_a_chunk_mode_ignores_continuations(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    rows = tensor(np.ones((2, 2), np.float32))
    assert (robot.actions(features(), canonical_continuation=rows, model_continuation=rows) == 0.5).all()
    wide = tensor(np.ones((2, 32), np.float32))
    assert (robot.actions(features(), canonical_continuation=rows, model_continuation=wide) == 0.5).all()


# ----------------------------------------------------------------------------- faults of the policy


def test_a_policy_that_fails_is_told_without_its_details(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    told = fault(lambda: robot.infer(features(), "fail"))
    assert told.code == "execution"
    assert "secret" not in str(told)
    assert (robot.actions(features()) == 0.5).all()


def test_warnings_travel_with_the_action(at: SimpleNamespace, robot: RemoteRobot) -> None:
    robot.start()
    assert robot.infer(features(), "dark")["warnings"] == ["it is dark"]


# ----------------------------------------------------------------------------- two processes


def remote_address(server: ServerProcess) -> str:
    return server.line.split()[-1]


def test_a_policy_in_another_process_gives_what_the_native_protocol_gives(tmp_path: Path) -> None:
    wires = ("--wire", "native:0", "--wire", f"{WIRE}:0", "--semantics", "table-m-v1")
    with serving(tmp_path, ASSETS / "act.gguf", *wires, "--no-prepare", "--threads", 1) as server:
        native = server.line.split()[2]
        with Client(native, timeout=WAIT_S) as client:
            spec = client.spec
            robot = RemoteRobot(remote_address(server), spec.name).start()
            assert robot.descriptor["semantics"] == "table-m-v1"
            hashed = client.metadata()["server"]["identity"]["hash"]
            assert robot.descriptor["artifact_identity"] == f"sha256:{hashed}"
            rng = np.random.default_rng(0)
            for _ in range(3):
                frames = {
                    camera.name: rng.integers(0, 256, (camera.height, camera.width, 3), np.uint8)
                    for camera in spec.cameras
                }
                state = rng.uniform(0, 0.1, spec.state.dim).astype(np.float32)
                sent = {f"observation.images.{name}": rgb(frame) for name, frame in frames.items()}
                rows = robot.actions({"observation.state": tensor(state), **sent}, "push the egg")
                chunk = client.infer({"images": frames, "state": state, "prompt": "push the egg"})
                np.testing.assert_array_equal(rows, chunk.actions[: len(rows)])
            robot.close()
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def test_rtc_modes_of_a_policy_in_another_process(tmp_path: Path) -> None:
    """A policy that was trained with an action prefix keeps it, and guidance comes close to it."""
    wires = ("--wire", f"{WIRE}:0", "--camera-size", "front=80x60")
    with serving(tmp_path, ASSETS / "blocks-rtc.gguf", *wires, "--no-prepare", "--threads", 1) as server:
        robot = RemoteRobot(remote_address(server), "blocks-rtc")
        robot.describe()
        offered = robot.descriptor["capabilities"]
        assert offered["modes"] == ["chunk", "rtc_guided", "rtc_trained"]
        delay = min(3, offered["training_max_delay"])
        assert delay >= 1
        sizes = {each["name"]: each["shape"] for each in offered["features"]}
        assert sizes["observation.images.front"] == [60, 80, 3]
        seen = {
            name: tensor(np.zeros(shape, np.float32))
            if len(shape) == 1
            else rgb(np.full(shape, 90, np.uint8))
            for name, shape in sizes.items()
        }
        task = "put the red block into the left bin"
        apart = {}
        for mode in ("chunk", "rtc_trained", "rtc_guided"):
            robot.open(mode)
            robot.begin()
            distances = []
            for _ in range(
                7
            ):  # each answer has new noise, so one answer of mode chunk may be close by chance
                first = robot.infer(seen, task)
                rows = array(first["canonical_actions"])[4:]
                rest = {"canonical_continuation": tensor(rows), "model_continuation": tensor(rows)}
                second = array(robot.infer(seen, task, delay=delay, **rest)["canonical_actions"])
                distances.append(float(np.abs(second[:delay] - rows[:delay]).max()))
            apart[mode] = float(np.median(distances))
            if mode == "rtc_trained":
                with pytest.raises(RemoteFault, match="delay"):
                    robot.infer(seen, task, delay=offered["prediction_steps"], **rest)
        assert apart["rtc_trained"] < 1e-4, apart
        assert apart["rtc_guided"] < apart["chunk"], apart
        robot.close()


def test_a_killed_server_is_noticed_and_its_successor_is_found(tmp_path: Path) -> None:
    port = processes.free_port()
    command = (ASSETS / "pen.gguf", "--wire", f"{WIRE}:{port}", "--no-prepare", "--threads", 1)
    with serving(tmp_path, *command) as server:
        robot = RemoteRobot(remote_address(server), "pen").start()
        assert robot.presence.get(timeout=WAIT_S) is True
        before = robot.descriptor
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert robot.presence.get(timeout=WAIT_S) is False
        robot.close(politely=False)
    with serving(tmp_path, *command) as server:
        robot = RemoteRobot(remote_address(server), "pen").start()
        assert robot.instance != before["instance_id"]
        assert robot.descriptor["artifact_identity"] == before["artifact_identity"]
        assert robot.descriptor["capabilities"] == before["capabilities"]
        robot.close()
        assert server.stop() == 0


FORGETS_TO_CLOSE = """
from sinew.serve.wires import open_wires
from tests.serve.puppet import desk
with desk(("lerobot-remote",)) as at:
    at.opened.clear()
print("end", flush=True)
"""


def test_a_program_that_does_not_close_its_server_ends() -> None:
    done = processes.run([sys.executable, "-c", FORGETS_TO_CLOSE], timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# ----------------------------------------------------------------------------- keys, TLS, router


def test_a_key_is_the_password_of_a_zenoh_user() -> None:
    with desk((WIRE,), api_key="a key") as at:
        for key, user in (("", ""), ("another", "sinew"), ("a key", "somebody")):
            with pytest.raises(ConnectionError):
                opened(getattr(at, WIRE).replace("://", "/"), key, user=user, connect__timeout_ms=500)
        robot = RemoteRobot(getattr(at, WIRE), "puppet", "a key").start()
        assert (robot.actions(features()) == 0.5).all()
        robot.close()


def test_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with desk((WIRE,), listen=Listen(tls_cert=cert, tls_key=key)) as at:
        address = getattr(at, WIRE)
        assert address.startswith("tls://")
        trusted = {"transport__link__tls__root_ca_certificate": str(cert)}
        robot = RemoteRobot(address, "puppet", **trusted).start()
        assert (robot.actions(features()) == 0.5).all()
        robot.close()
        with pytest.raises(ConnectionError):
            opened(address.replace("tls://", "tcp/"), connect__timeout_ms=500)


def test_a_certificate_of_an_authority_is_rejected_at_the_start(tmp_path: Path) -> None:
    command = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    )
    subprocess.run(
        [*command, "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True
    )
    listen = Listen(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    with pytest.raises(SinewError, match="certificate of an authority"), desk((WIRE,), listen=listen):
        pass


def test_a_router_with_mutual_tls(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """Server and robot both connect to it, with certificates from a file of Zenoh."""
    cert, key = certificate
    port = processes.free_port()
    endpoint = f"tls/127.0.0.1:{port}"
    ours = {
        "root_ca_certificate": str(cert), "connect_certificate": str(cert), "connect_private_key": str(key),
        "listen_certificate": str(cert), "listen_private_key": str(key), "enable_mtls": True,
    }  # fmt: skip
    tls = zenoh.Config()
    for name, value in (
        ("mode", "router"), ("listen/endpoints", [endpoint]), ("scouting/multicast/enabled", False),
        ("transport/link/tls", ours),
    ):  # fmt: skip
        tls.insert_json5(name, json.dumps(value))
    file = tmp_path / "zenoh.json5"
    file.write_text(f"// for the router\n{{transport: {{link: {{tls: {json.dumps(ours)}}}}}}}")
    with zenoh.open(tls):
        settings = RemoteSettings(deployment="cell-3", router=endpoint, zenoh_config=file)
        with desk((WIRE,), listen=Listen(remote=settings)) as at:
            assert getattr(at, WIRE) == f"tls://127.0.0.1:{port}"
            assert any(endpoint in line for line in at.opened[WIRE].guide(at.puppet.spec))
            client = {"transport__link__tls": ours, "mode": "client"}
            robot = RemoteRobot(getattr(at, WIRE), "cell-3", **client).start()
            assert (robot.actions(features()) == 0.5).all()
            robot.close()
            with pytest.raises(ConnectionError):
                opened(
                    endpoint, transport__link__tls={"root_ca_certificate": str(cert)}, connect__timeout_ms=800
                )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (RemoteSettings(deployment="a/b"), "--deployment: expected letters"),
        (RemoteSettings(router="x"), "--router: expected tcp/HOST:PORT"),
        (RemoteSettings(router="tls://host:7447"), "--router: expected tcp/HOST:PORT"),
        (RemoteSettings(zenoh_config=Path("/nowhere.json5")), "--zenoh-config"),
        (
            RemoteSettings(camera_sizes=(("top", (4, 4)),)),
            "--camera-size: expected one of the cameras front, got top",
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named_before_robots_connect(
    settings: RemoteSettings, words: str
) -> None:
    with pytest.raises(SinewError, match=words), desk((WIRE,), listen=Listen(remote=settings)):
        pass

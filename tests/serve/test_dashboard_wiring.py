"""Robots that look wired otherwise than in the training data: the dashboard's viewers are told of them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client

from sinew.core import ActionChunk, Observation, Timing
from sinew.policy import load, open_bundle
from sinew.serve.dashboard import news
from sinew.serve.dashboard.feed import BY_HAND, Feed
from sinew.serve.dashboard.wiring import EVERY, LOOKS, SESSIONS, Wiring
from sinew.serve.deploy import deploy
from sinew.serve.job import ServingJob
from sinew.serve.limits import ServingLimits
from sinew.serve.request import Request
from sinew.serve.service import Service
from sinew.serve.transport.listen import Listen
from tests.serve.puppet import WAIT_S, Puppet, until
from tests.serve.puppet import desk as puppets

pytest.importorskip("mujoco")

from sinew_eval.episodes.adapters import make_env

MANIFEST = open_bundle("blocks").manifest
ENOUGH = EVERY * LOOKS


def seen() -> dict[str, Any]:
    env, adapter = make_env("sinew/Blocks-v0")
    found = adapter.observation(env.reset(seed=5000)[0])
    env.close()
    return {"images": found["images"], "state": found["state"], "prompt": "go"}


RIGHT = seen()
SWAPPED = {**RIGHT, "images": {"front": RIGHT["images"]["wrist"], "wrist": RIGHT["images"]["front"]}}


class Quick(Puppet):
    """The blocks policy's form, without its weights."""

    spec = MANIFEST.spec

    def run(self, observation: Observation, **more: Any) -> ActionChunk:
        return ActionChunk(
            np.zeros((self.spec.chunk_size, self.spec.action.dim), np.float32), Timing(total_ms=1.0), seed=0
        )


def put(wiring: Wiring, given: dict[str, Any], session: str = "arm", count: int = ENOUGH) -> None:
    for _ in range(count):
        wiring.put("native", "peer", session, Observation(**given))


def kinds(wiring: Wiring) -> dict[str, list[tuple[str, str]]]:
    return {row["session"]: [(f["subject"], f["kind"]) for f in row["findings"]] for row in wiring.report()}


def test_a_session_is_told_by_what_is_wrong_and_the_right_one_is_not() -> None:
    wiring = Wiring(MANIFEST)
    put(wiring, RIGHT, "right")
    put(wiring, SWAPPED, "swapped", ENOUGH - EVERY)
    assert kinds(wiring) == {}  # not enough was seen
    put(wiring, SWAPPED, "swapped", EVERY)
    put(wiring, {**RIGHT, "state": np.degrees(RIGHT["state"])}, "degrees")
    expected = {
        "swapped": [("camera front", "swapped"), ("camera wrist", "swapped")],
        "degrees": [("state", "degrees")],
    }
    assert kinds(wiring) == expected
    assert kinds(wiring) == expected
    json.dumps(wiring.report(), allow_nan=False)
    put(wiring, RIGHT, "swapped")  # the plugs were exchanged
    assert list(kinds(wiring)) == ["degrees"]
    wiring.forget()
    assert kinds(wiring) == {}


def test_sessions_are_bounded() -> None:
    wiring = Wiring(MANIFEST)
    put(wiring, SWAPPED, "first")
    for number in range(SESSIONS - 1):
        put(wiring, RIGHT, str(number), 1)
    assert "first" in kinds(wiring)
    put(wiring, RIGHT, "one more", 1)
    assert kinds(wiring) == {}


def test_the_page_looks_with_the_bundle_of_the_policy_that_serves() -> None:
    assert Wiring.of(replace(MANIFEST, seen=None)) is None
    policy = load("egg", engine="eager", threads=1, rename={"eye": "front"})
    first = deploy(policy, ServingLimits())
    service, feed = Service(first), Feed()
    feed.follow(service)
    frame = {
        "images": {"eye": np.zeros((64, 64, 3), np.uint8)},
        "state": np.array([1.0, 0.0]),
        "prompt": "go",
    }

    def ask() -> None:
        done = threading.Event()
        service.submit(
            ServingJob(Request("http", lambda _: Observation(**frame), session="arm")), lambda _: done.set()
        )
        assert done.wait(WAIT_S)

    try:
        with feed.viewer():
            for _ in range(ENOUGH):
                ask()
            assert feed.wiring is not None
            looked = feed.wiring
            until(lambda: kinds(looked) == {"arm": [("camera eye", "black")]})
            service.policies.put(
                "default", replace(first, manifest=None)
            )  # another, of which nothing is known
            ask()
            until(lambda: feed.wiring is None)
    finally:
        first.scheduler.stop()
        assert first.scheduler.join(WAIT_S)


def events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    for line in reply:
        if line.startswith(b"event: "):
            yield line[7:].strip().decode(), json.loads(next(reply)[6:])


def test_viewers_are_told_of_a_robot_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real sockets: a robot on the native wire, a viewer on the page's port."""
    monkeypatch.setattr(news, "HEALTH_S", 0.05)
    wiring = Wiring(MANIFEST)
    monkeypatch.setattr(Wiring, "of", lambda manifest: wiring if manifest is MANIFEST else None)
    with puppets(
        ("native", "web"),
        listen=Listen(dashboard=True),
        policy=Quick(),
        manifest=MANIFEST,
        padded_state_dim=4,
    ) as found:
        with Client(found.native, timeout=WAIT_S) as client:
            client.infer({**SWAPPED, "session": "unseen"})
        assert not wiring._sessions  # nobody looks
        host, _, port = found.web.rpartition("//")[2].partition("/")[0].rpartition(":")
        viewer = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        viewer.request("GET", "/v1/events")
        told = events(reply := viewer.getresponse())
        assert next(told)[0] == "about"
        assert next(record for name, record in told if name == "health")["wiring"] == []
        with Client(found.native, timeout=WAIT_S) as client:
            for _ in range(ENOUGH):
                client.infer({**SWAPPED, "session": "arm"})
                client.infer({**RIGHT, "session": "right"})
        by_hand = Observation(**SWAPPED)
        for _ in range(EVERY):
            found.service.submit(
                ServingJob(Request("http", lambda _: by_hand, session=BY_HAND)), lambda _: None
            )
        rows = next(r["wiring"] for name, r in told if name == "health" and r["wiring"])
        assert [(row["wire"], row["session"]) for row in rows] == [("native", "arm")]
        assert [each["kind"] for each in rows[0]["findings"]] == ["swapped", "swapped"]
        assert BY_HAND not in {session for _, _, session in wiring._sessions}
        reply.close()
        viewer.close()
        until(lambda: not wiring._sessions, "the last viewer to be forgotten")

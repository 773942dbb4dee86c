"""Streams on the native wire: a robot's loop against a real server, bounds, and messages of any content."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client import Client, ServerError, schema
from sinew_client.control import Loop, Planner, Settings, Stream, StreamReport
from sinew_client.control.pace import Pace
from sinew_client.control.planner import newest_of
from sinew_client.form import Fitted
from sinew_client.link import KEEPALIVE
from sinew_client.streams import StreamLink, StreamWindow, decode_window

from sinew.bundle import Bundle, write_bundle
from sinew.core import SinewError
from sinew.lowbit.sources import lowbit_sources
from sinew.policy import Policy, load
from sinew.processing.safety import Safety
from sinew.serve.deploy import deploy
from sinew.serve.device_lock import DeviceLock
from sinew.serve.limits import ServingLimits
from sinew.serve.policies import DEFAULT, Deployment
from sinew.serve.swap import MemoryNeed, Swapper
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import streams
from tests.processes import free_port
from tests.serve.puppet import WAIT_S, desk, lone, until

FRAME = np.zeros((16, 16, 3), np.uint8)
RATE = 100.0


@pytest.fixture(scope="module")
def policy(rolling_bundle: Path) -> Policy:
    return load(rolling_bundle, engine="eager", threads=1)


@contextlib.contextmanager
def serving(policy: Policy, listen: Listen | None = None, **options: Any) -> Iterator[SimpleNamespace]:
    sizes = {"padded_state_dim": policy.padded_state_dim, "padded_action_dim": policy.padded_action_dim}
    with desk(policy=policy, listen=listen, **sizes, **options) as made:
        made.streams = made.opened["native"].codec.open_streams()
        yield made


class Robot:
    """A state that moves, a frame every third tick, and everything that was executed."""

    def __init__(self) -> None:
        self.ticks = self.holds = 0
        self.rows: list[np.ndarray] = []

    def observe(self) -> dict[str, Any]:
        self.ticks += 1
        frame = {"images": {"front": FRAME}, "age": 0.01} if self.ticks % 3 == 1 else {}
        return {"state": np.float32([np.sin(self.ticks), 0.0]), **frame}

    def act(self, row: np.ndarray) -> None:
        self.rows.append(row)

    def hold(self) -> None:
        self.holds += 1


def robot_loop(link: StreamLink) -> Loop:
    """The robot's loop as a test drives it: a tick is begun when the last one has done its part."""
    loop = Loop(Robot(), Stream(link), Settings(RATE, fusion="latest_only"), 1, "go", Pace(1 / RATE))
    loop.pace.next()
    return loop


def drive(loop: Loop, until_windows: int) -> None:
    """Tick until so many windows have come."""

    def ticked() -> bool:
        loop.tick(loop.pace.next())
        return loop.controller.chunks >= until_windows

    until(ticked, f"{until_windows} windows")


def test_a_robot_streams_and_goes_on_with_a_restarted_server(policy: Policy) -> None:
    port = free_port()
    with serving(policy, Listen(port=port)) as server:
        address = server.native
        link = StreamLink(address, RATE, session="arm")
        loop = robot_loop(link)
        drive(loop, 20)
        until(lambda: loop.tick(loop.pace.next()) or loop.robot.rows, "a row in time")
        newest = loop.controller.newest
        assert newest is not None
        assert link.label.startswith("gradual flow matching")
        assert newest.rows.shape == (6, 1)
        assert newest.frame_time <= newest.sample_time
        assert newest.step > newest.sample_time * RATE
        assert len(server.streams.robots) == 1
    before = loop.controller.chunks
    held = ("out of nodes", "no window yet")
    until(
        lambda: loop.tick(loop.pace.next()) or loop.reason in held, "the end of the windows"
    )  # nobody is there
    for _ in range(12):  # and nothing is raised
        loop.tick(loop.pace.next())
    assert loop.reason in held
    with serving(policy, Listen(port=port)) as server:
        drive(loop, before + 10)
        assert len(server.streams.robots) == 1
        link.close()
        until(lambda: not len(server.streams.robots), "the end of the stream")
    report = StreamReport.of(loop)
    assert report.windows == loop.controller.chunks
    assert {
        "sensor_reaction_ms",
        "image_reaction_ms",
        "sensor_age_ms",
        "prefix_age_ms",
    } <= report.measured.keys()
    assert report.held


def test_a_planner_changes_the_instruction_in_mid_stream(policy: Policy) -> None:
    """What a planner answers is in the next prefix of the same session, and windows go on."""
    seen: list[Any] = []

    def plan(prompt: str, observation: Any) -> str | None:
        seen.append((prompt, set(observation)))
        return "stop" if prompt == "go" else None

    with serving(policy) as server:
        loop = robot_loop(StreamLink(server.native, RATE))
        planner = Planner(plan, 0.01, partial(newest_of, loop), loop.say)
        planner.once()  # there is nothing to see yet
        drive(loop, 3)
        (robot,) = server.streams.robots.values()
        assert robot.session.prompt == "go"
        planner.once()
        until(lambda: loop.tick(loop.pace.next()) or robot.session._seen[1] == "stop", "a prefix of it")
        drive(loop, loop.controller.chunks + 3)
        assert list(server.streams.robots.values()) == [robot]
        planner.once()
        planner.close()
        loop.close()
    assert seen == [("go", {"images", "state"}), ("stop", {"images", "state"})]


def test_a_connection_that_breaks_ends_its_streams(policy: Policy) -> None:
    with serving(policy) as server:
        link = StreamLink(server.native, RATE)
        until(lambda: link.send([0, 0], 0.0, images={"front": FRAME}, prompt="go"))
        until(lambda: len(server.streams.robots))
        (peer,) = server.opened["native"].ledger.open
        alive = {
            name: peer.socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name, _ in KEEPALIVE
            if hasattr(socket, name)
        }
        assert link._link is not None
        link._link.shut()
        until(lambda: not len(server.streams.robots))
        link.close()
    # One that lost power or network says nothing: the system finds it.
    assert alive == {name: value for name, value in KEEPALIVE if name in alive}


def test_the_frames_that_a_stream_holds_are_in_the_ledger(policy: Policy) -> None:
    """A stream holds the messages of its last two frames, up to 32 MiB, which nobody counted."""
    with serving(policy) as server:
        ledger = server.opened["native"].ledger
        link = StreamLink(server.native, RATE)
        for moment in (0.0, 0.1, 0.2):
            until(lambda moment=moment: link.send([0, 0], moment, images={"front": FRAME}, prompt="go"))
        until(lambda: 2 * FRAME.nbytes < ledger.held_bytes < 3 * FRAME.nbytes, "two frames")
        until(lambda: link.send([0, 0], 0.3, prompt="go"))
        assert 2 * FRAME.nbytes < ledger.held_bytes < 3 * FRAME.nbytes
        (robot,) = server.streams.robots.values()
        robot.abandon()  # as an exchange of the policy does, on another thread
        until(lambda: link.send([0, 0], 0.4, prompt="go") and ledger.held_bytes < FRAME.nbytes, "its end")
        link.close()
        until(lambda: ledger.held_bytes == 0, "the end of its connection")


def test_a_stream_that_is_begun_anew_knows_nothing_of_the_old_one(policy: Policy) -> None:
    with serving(policy) as server:
        link = StreamLink(server.native, RATE)
        until(lambda: link.send([0, 0], 0.0, images={"front": FRAME}, prompt="go"))
        until(lambda: len(server.streams.robots))
        (old,) = server.streams.robots.values()
        link.restart()
        until(lambda: link.send([0, 0], 0.1, prompt="go"))
        until(lambda: [*server.streams.robots.values()] not in ([], [old]), "another session")
        (new,) = server.streams.robots.values()
        until(lambda: new.session.samples, "its first sample")  # it is known before its sample is taken
        assert (new.session.frames, new.session.samples) == (0, 1)
        link.close()


def message(**fields: Any) -> schema.PredictRequest:
    given = {
        "kind": 4,
        "request_id": 7,
        "rate": RATE,
        "time": 0.0,
        "raw_state": [0.0, 0.0],
        "prompt": "go",
        **fields,
    }
    return schema.PredictRequest(**{name: value for name, value in given.items() if value is not None})


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[SimpleNamespace]:
    with serving(policy, api_key="secret", safety=Safety(policy.processor)) as made:
        yield made


def answer(address: str, *requests: schema.PredictRequest) -> bytes:
    """Send messages on one connection; return the first reply."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVTIMEO, 60_000)
        peer.connect(address)
        for request in requests:
            request.api_key = request.api_key or "secret"
            peer.send(request.SerializeToString())
        found = peer.recv()
    context.destroy(linger=0)
    return found


@pytest.mark.parametrize(
    ("code", "text", "fields"),
    [
        ("unauthorized", "key", {"api_key": "other"}),
        ("bad_observation", "rate: expected", {"rate": None}),
        ("bad_observation", "rate: expected", {"rate": 50.0}),
        ("bad_observation", "time: expected", {"time": None}),
        ("bad_observation", "time: expected", {"time": float("inf")}),
        ("bad_observation", "time: expected", {"time": -1e9}),
        ("bad_observation", "state: expected", {"raw_state": [0.0]}),
        ("bad_observation", "state.0: expected", {"raw_state": [1e9, 0.0]}),
        ("bad_observation", "previous: expected", {"previous": [1.0]}),
        ("bad_observation", "rtc: expected", {"rtc": "trained"}),
        ("bad_observation", "interpolation: expected", {"interpolation": "cubic"}),
        (
            "bad_observation",
            "text_tokens: expected 0, or a bundle with its language head",
            {"text_tokens": 1},
        ),
        ("bad_observation", "text_tokens: expected 0 to 256", {"text_tokens": 257}),
        ("bad_request", "session: expected", {"session": "x" * 200}),
    ],
)
def test_what_is_no_message_of_a_stream_is_refused(
    server: SimpleNamespace, code: str, text: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ServerError, match=text) as refusal:
        decode_window(answer(server.native, message(**fields)))
    assert refusal.value.code == code


def test_streams_are_bounded(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [message(session=str(number)) for number in range(streams.PER_CONNECTION + 1)]
    with pytest.raises(ServerError, match="streams of this connection run"):
        decode_window(answer(server.native, *asked))
    until(lambda: not len(server.streams.robots))
    monkeypatch.setattr(streams, "MAX_STREAMS", 0)
    with pytest.raises(ServerError, match="which is the limit; try again later"):
        decode_window(answer(server.native, message()))
    monkeypatch.setattr(streams, "MAX_MESSAGE", 10)
    with pytest.raises(ServerError, match="bytes in a message"):
        decode_window(answer(server.native, message()))


def test_a_frame_that_cannot_be_decoded_is_told(server: SimpleNamespace) -> None:
    bad = message(camera_names=["front"])
    bad.images.add(encoding=0, data=b"no picture")
    with pytest.raises(ServerError, match=r"images\.front"):
        decode_window(answer(server.native, bad))
    bad.frame_time = 1e7
    with pytest.raises(ServerError, match="frame_time: expected"):
        decode_window(answer(server.native, bad))


class Asker:
    """A connection that reads nothing."""

    unsent = 0

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.address = address
        self.under_way: set[Any] = set()
        self.sent: list[bytes] = []
        self.keeps: dict[Any, int] = {}

    def release(self, keeper: Any) -> None:
        self.keeps.pop(keeper, None)

    def reply(self, frames: list[Any], size: int = 0) -> None:
        self.sent.append(frames[-1])


def test_windows_that_nobody_reads_are_dropped(policy: Policy) -> None:
    with serving(policy) as made:
        taker, asker = made.streams, Asker()
        take(taker, asker, message())
        (robot,) = taker.robots.values()
        window = streams.Window(1, np.zeros((6, 1), np.float32), 0.0, 0.0)
        robot.window(window)
        asker.unsent = streams.MAX_UNREAD + 1
        robot.window(window)
        robot.failed(SinewError("x"))
        assert (len(asker.sent), robot.dropped) == (1, 1)
        assert decode_window(asker.sent[0]).label
        for each in list(asker.under_way):  # as the wire does when a connection ends
            each.abandon()
        assert (len(taker.robots), asker.under_way) == (0, set())


def test_windows_pass_limits_that_are_per_row(policy: Policy) -> None:
    safety = Safety(policy.processor)
    safety._action_low, safety._action_high = np.full((6, 1), -1.0), np.linspace(1.0, 6.0, 6)[:, None]
    safety._fixed = safety._allowed((6, 1))
    with serving(policy, safety=safety) as made:
        asker = Asker()
        take(made.streams, asker, message())
        (robot,) = made.streams.robots.values()
        state = np.zeros(2, np.float32)
        for count in (4, 6, 11):
            robot.window(
                streams.Window(1, np.full((count, 1), 5.5, np.float32), 0.0, 0.0, run=count, state=state)
            )
        assert [len(decode_window(each).rows) for each in asker.sent] == [4, 6, 11]
        robot.window(streams.Window(1, np.full((4, 1), 6.5, np.float32), 0.0, 0.0, state=state))
        with pytest.raises(ServerError, match="statistics allow"):
            decode_window(asker.sent[-1])


def test_the_places_of_silent_robots_are_given_away(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    with serving(policy) as made:
        taker, now = made.streams, [0.0]
        taker._clock = lambda: now[0]
        lost, quiet, live, late = Asker(), Asker(), Asker(), Asker()

        def there() -> set[Asker]:
            return {robot.peer for robot in taker.robots.values()}

        take(taker, lost, message())
        now[0] = 1.0
        take(taker, quiet, message())
        with pytest.raises(SinewError, match="which is the limit; try again later"):
            take(taker, live, message())  # both have just been heard
        now[0] = 1.0 + streams.SPARE_S + 0.1
        take(taker, live, message())
        assert there() == {quiet, live}  # the most silent one alone made room
        assert lost.under_way == set()
        now[0] += streams.SILENT_S - 1.0
        take(taker, live, message())
        assert taker.end_silent() == 1
        assert there() == {live}
        now[0] += streams.SILENT_S
        assert taker.end_silent() == 1
        take(taker, late, message())
        assert there() == {late}


def test_no_client_keeps_the_others_out(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature of the defect: two streams on each of four connections left no place for anybody else."""
    monkeypatch.setattr(streams, "MAX_STREAMS", 4)
    with serving(policy) as made:
        hogs = [Asker(), Asker()]
        for hog, name in ((hogs[0], "a"), (hogs[0], "b"), (hogs[1], "a"), (hogs[1], "b")):
            take(made.streams, hog, message(session=name))

        def held() -> list[str]:
            return [f"{robot.peer.address} {robot.name}" for robot in made.streams.robots.values()]

        other = Asker("10.0.0.2")
        take(made.streams, other, message())  # an address that had none
        assert held() == ["10.0.0.1 a", "10.0.0.1 b", "10.0.0.1 a", "10.0.0.2 "]
        with pytest.raises(ServerError, match="so this stream has ended for a client without a stream"):
            decode_window(hogs[1].sent[-1])
        with pytest.raises(SinewError, match="which is the limit; try again later"):
            take(made.streams, hogs[1], message(session="b"))
        with pytest.raises(SinewError, match="which is the limit; try again later"):
            take(made.streams, other, message(session="b"))  # it has one
        near = Asker()
        take(made.streams, near, message())  # a connection that had none, of the address that has most
        assert held() == ["10.0.0.1 a", "10.0.0.1 a", "10.0.0.2 ", "10.0.0.1 "]
        with pytest.raises(SinewError, match="which is the limit; try again later"):
            take(made.streams, Asker(), message())  # each has one by now
        take(made.streams, Asker("10.0.0.3"), message())


def test_a_clock_that_goes_back_is_refused_and_the_stream_begins_anew(server: SimpleNamespace) -> None:
    """One wrong time neither silences a stream nor lets older samples win."""
    with pytest.raises(
        ServerError, match=r"time: expected 1e\+08 s of the robot's clock or later"
    ) as refusal:
        decode_window(answer(server.native, message(time=1e8), message(time=1.0)))
    assert refusal.value.code == "bad_observation"
    until(lambda: not len(server.streams.robots))
    taker, asker = server.streams, Asker()
    for time in (2.0, 2.0, 2.5):
        take(taker, asker, message(time=time))
    (before,) = taker.robots.values()
    with pytest.raises(SinewError, match="time: expected 2.5 s"):
        take(taker, asker, message(time=1.0))
    take(taker, asker, message(time=1.1))
    (after,) = taker.robots.values()
    assert (before.ended, after.ended, after.session.samples) == (True, False, 1)
    after.abandon()


def test_a_stream_goes_on_with_the_policy_that_takes_its_place(rolling_bundle: Path, tmp_path: Path) -> None:
    """A signature of the defect: it went on with the old one for as long as it lived, and kept it in memory."""
    other = shifted(rolling_bundle, tmp_path / "other.gguf", 100.0)

    def stood(source: str) -> Deployment:
        found = load(source, engine="eager", threads=1)
        return deploy(found, ServingLimits())

    policy = load(rolling_bundle, engine="eager", threads=1)
    with serving(policy) as server, contextlib.ExitStack() as closing:
        swapper = Swapper(server.service, stood, lambda _source: MemoryNeed(1), str(rolling_bundle))
        link = Noting(server.native, RATE)
        closing.callback(link.close)
        loop = robot_loop(link)
        drive(loop, 5)
        assert link.seen
        for source, low in ((other, 50.0), (rolling_bundle, -50.0), (other, 50.0)):
            gone = weakref.ref(server.service.policies.get().scheduler.policy)
            swapper.load(DEFAULT, str(source))
            if gone() is not server.puppet:  # the first one is the desk's
                until(lambda: gone() is None, "its end")  # noqa: B023 - although the robot has said nothing since
            asked = next(
                link._ids
            )  # samples from now on have greater numbers, whether they are sent or dropped
            until(lambda: loop.tick(loop.pace.next()) or max(link.seen) > asked + 5, "new windows")  # noqa: B023
            new = [rows for number, rows in link.seen.items() if number > asked]
            assert all(low < rows.min() and rows.max() < low + 100 for rows in new)
            assert "the policy was replaced" in link.error
        assert link.faults.total == 0
        server.service.policies.get().scheduler.stop()


def test_a_stream_of_a_policy_of_other_units_that_takes_its_place_is_not_followed(
    rolling_bundle: Path,
) -> None:
    """It was compared when the link connected; another one is compared before its first window is taken."""
    policy = load(rolling_bundle, engine="eager", threads=1)
    about = deploy(policy, ServingLimits()).metadata["policy"]
    with serving(policy) as server, contextlib.ExitStack() as closing:
        link = StreamLink(server.native, RATE, policy=about)
        closing.callback(link.close)
        loop = robot_loop(link)
        drive(loop, 5)
        for unit in ("deg", ""):
            found = deploy(load(rolling_bundle, engine="eager", threads=1), ServingLimits())
            action = {**about["action"], "units": [unit] if unit else []}
            if unit:
                about["action"] = {**about["action"], "units": ["rad"]}
                link._fitted = Fitted(about)
            found = replace(found, metadata={**found.metadata, "policy": {**about, "action": action}})
            server.service.policies.put(DEFAULT, found)
            if unit:
                until(
                    lambda: loop.tick(loop.pace.next()) or "start of this run: action.units" in link.error,
                    "why",
                )
                assert loop.controller.newest.deployment not in (0, found.number)
                assert link.faults.counts["UnsafeChunk"]
            else:
                drive(loop, loop.controller.chunks + 5)
            closing.callback(found.scheduler.stop)


def test_streams_of_a_policy_that_is_unloaded_end(rolling_bundle: Path, policy: Policy) -> None:
    with serving(policy) as server, contextlib.ExitStack() as closing:
        swapper = Swapper(
            server.service,
            lambda source: deploy(load(source, engine="eager", threads=1), ServingLimits()),
            lambda _source: MemoryNeed(1),
            str(rolling_bundle),
        )
        swapper.load("b", str(rolling_bundle))
        link = StreamLink(f"{server.native}/b", RATE)
        closing.callback(link.close)
        loop = robot_loop(link)
        drive(loop, 3)
        gone = weakref.ref(server.service.policies.get("b").scheduler.policy)
        swapper.unload("b")
        assert len(server.streams.robots) == len(server.streams.loops) == 0
        until(lambda: gone() is None, "its end")
        refused = "policy: expected one of default"  # after the word that its stream has ended, or before
        until(lambda: loop.tick(loop.pace.next()) or refused in (link.error or ""), "a refusal")
        assert link.faults.counts["unknown_policy"]


class Noting(StreamLink):
    """A link that keeps the rows of its windows, by the number of the newest sample in them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: dict[int, np.ndarray] = {}

    def windows(self) -> list[StreamWindow]:
        found = super().windows()
        self.seen |= {window.request_id: window.rows for window in found if len(window.rows)}
        return found


def shifted(bundle: Path, out: Path, by: float) -> Path:
    """Write a bundle again with so much more in every action."""
    opened = Bundle(bundle)
    processing = opened.manifest.processing
    mean = tuple(each + by for each in processing.action.stats["mean"])
    action = replace(processing.action, stats={**processing.action.stats, "mean": mean})
    manifest = replace(opened.manifest, processing=replace(processing, action=action))
    write_bundle(out, lambda: manifest, lowbit_sources(opened, {}))
    return out


def test_requests_leave_streams_a_share_and_have_the_rest(
    rolling_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted in runs of the head here: each takes one. While a request is computed there is half of its time
    for streams, whatever they ask for; a signature of the defect is that nothing held them."""
    ran, release, inside = [0.0], threading.Event(), threading.Event()
    policy = load(rolling_bundle, engine="eager", threads=1)
    evaluate = policy.engine.evaluate

    jumped = [0.0]  # the time of the last of the jumps below

    class Accounted(DeviceLock):
        def used(self, begun: float | None) -> float:
            with self._changed:  # what computes during a jump has not used that time
                return super().used(None if begun is None else max(begun, jumped[0]))

    def counted(*given: Any) -> np.ndarray:
        with device_lock._changed:
            ran[0] += 1
        return evaluate(*given)

    def held(prepared: Any, **options: Any) -> Any:
        inside.set()
        assert release.wait(WAIT_S)
        return run(prepared, **options)

    monkeypatch.setattr(policy.engine, "evaluate", counted)
    device_lock = Accounted(clock=lambda: ran[0])
    with (
        serving(policy, device_lock=device_lock) as server,
        Client(server.native, timeout=WAIT_S) as client,
        contextlib.ExitStack() as closing,
    ):
        run, policy.run = policy.run, held  # type: ignore[method-assign]
        link = StreamLink(server.native, RATE)
        closing.callback(link.close)
        closing.callback(release.set)
        loop = robot_loop(link)
        drive(loop, 5)
        asked = {"images": {"front": FRAME}, "state": np.zeros(2), "prompt": "go"}
        asking = threading.Thread(target=client.infer, args=(asked,))
        asking.start()
        assert inside.wait(WAIT_S)
        before = ran[0]
        until(
            lambda: loop.tick(loop.pace.next()) or device_lock.yielding or ran[0] > before + 5,
            "streams to wait",
        )
        assert ran[0] <= before + 2  # the one that ran, and one
        for passed in (10.0, 10.0):  # the request takes its time, and streams have theirs again
            with device_lock._changed:
                jumped[0] = ran[0] = ran[0] + passed
            before = ran[0]

            def goes_on(before: float = before) -> bool:
                with device_lock._changed:  # who sleeps for so many seconds sees that this clock went on
                    device_lock._changed.notify_all()
                loop.tick(loop.pace.next())
                return ran[0] > before

            until(goes_on, "a run")
            for _ in range(20):
                loop.tick(loop.pace.next())
            assert ran[0] <= before + 1  # and not what they did not use before
        release.set()
        asking.join(WAIT_S)
        drive(loop, loop.controller.chunks + 5)


def test_a_silent_stream_ends_without_a_message_of_anybody(policy: Policy) -> None:
    """The wire's loop sleeps until the first stream is due to end, and no longer."""
    with serving(policy) as server:
        taker, wire, now = server.streams, server.opened["native"], [0.0]
        taker._clock = lambda: now[0]
        assert taker.patience() == float("inf")
        assert wire._patience() is None
        link = StreamLink(server.native, RATE)
        until(lambda: link.send([0, 0], 0.0, prompt="go"))
        until(lambda: len(taker.robots))
        now[0] = 4.0
        until(lambda: wire._patience() == streams.SILENT_S - 4.0, "the time that is left")
        now[0] = streams.SILENT_S
        assert taker.patience() == 0.0
        wire.wake(None)  # as the end of that time would
        until(lambda: not len(taker.robots), "the end of the stream")
        until(lambda: not len(taker.loops), "the end of its loop")
        until(lambda: link.send([0, 0], 20.0), "the robot again")
        until(lambda: len(taker.robots))
        link.close()


def test_a_server_with_max_age_refuses_streams_by_name(policy: Policy) -> None:
    with (
        serving(policy, safety=Safety(policy.processor, max_age=1.0)) as made,
        pytest.raises(SinewError, match="stream: this server compares Unix times"),
    ):
        take(made.streams, Asker(), message())


def take(taker: Any, asker: Asker, request: schema.PredictRequest) -> None:
    header = SimpleNamespace(kind=request.kind, session=request.session, policy=request.policy)
    taker.take(asker, [], header, memoryview(request.SerializeToString()))


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from([4, 5]),
        "rate": st.sampled_from([RATE, 0.0, 1e9]) | st.floats(width=32),
        "time": st.floats(),
        "frame_time": st.floats(),
        "delay": st.integers(0, 2**32 - 1),
        "raw_state": st.lists(st.floats(width=32), max_size=4),
        "prompt": st.text(max_size=5),
        "session": st.text(max_size=3),
        "rtc": st.sampled_from(["", "none", "guided", "?"]),
        "seed": st.integers(0, 2**64 - 1),
        "solver_steps": st.integers(0, 2**32 - 1),
        "text_tokens": st.sampled_from([0, 1, 2**32 - 1]),
        "camera_names": st.lists(st.text(max_size=5), max_size=2),
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FIELDS, min_size=1, max_size=4))
def test_messages_of_any_content_are_taken_or_refused(policy: Policy, given: list[dict[str, Any]]) -> None:
    from sinew.serve.wires.native import NativeCodec

    codec = NativeCodec()
    codec.bind(
        lone(policy.spec, policy.padded_state_dim, policy.padded_action_dim, policy, Safety(policy.processor))
    )
    taker, asker = codec.open_streams(), Asker()
    for fields in given:
        with contextlib.suppress(SinewError):
            take(taker, asker, message(**fields))
        assert len(taker.robots) <= streams.PER_CONNECTION
        for robot in list(taker.robots.values()):
            with contextlib.suppress(SinewError):
                robot.session.read()
            window = robot.session.run()
            assert window is None or np.isfinite(window.rows).all()

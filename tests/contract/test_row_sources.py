"""Every source of rows keeps the loop's promises: one table, sources x what happens to their answers, or to the robot.

A source is what ``Loop`` asks: chunks by request in several places, streams, and both in simulated time. The clock is
the test's, and moves when the loop waits for its next tick; before it does, what was asked is answered, unless the test
holds answers back. Threads, sockets and links are the real ones; what a policy would say is the test's.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import ClientError, ConnectionLost, ServerError, schema
from sinew_client.arm.assist import Assist, parse_assist
from sinew_client.control import (
    Adapter,
    Loop,
    NoObservation,
    Pace,
    Refinement,
    Servers,
    Settings,
    Stopped,
    Stream,
)
from sinew_client.control.adapter_file import CameraEncoder, Form
from sinew_client.errors import Refused
from sinew_client.streams import StreamLink
from sinew_eval.episodes.settings import Latency
from sinew_eval.episodes.sources import Measured, Simulated, SimulatedLink, StreamCosts

from sinew.core import ObservationError, SinewError
from sinew.policy import load
from sinew.processing.safety import Safety
from sinew.serve import contexts
from sinew.serve.deploy import PolicyHost
from sinew.serve.transport.listen import Listen
from sinew.stream import LocalLink, Window
from sinew.stream.split import SplitCalls
from tests import processes
from tests.control.test_edge_adapter import tensors
from tests.serve.puppet import desk

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
HZ, ROWS = 20.0, 8
WAIT_S = 60.0
FRAME = {"front": np.zeros((12, 10, 3), np.uint8)}
LOST, MISFIT = "the other side is gone", "images.side: expected a frame, got none"


def until(seen: Any) -> None:
    limit = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < limit
        time.sleep(0.001)


class Clock:
    """Seconds that move when somebody sleeps; ``before`` is called then."""

    def __init__(self) -> None:
        self.time, self.before = 0.0, lambda: None

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.before()
        self.time += seconds


class Robot:
    """A joint or more, a camera that can fall silent, and a run that ends after so many commands."""

    def __init__(self, seen: dict[str, Any] | None = None, dim: int = 1) -> None:
        self.sent: list[float | None] = []  # the first number of a row; None: a hold
        self.blind, self.ends = "", 1 << 30
        self.seen, self.dim = seen or {"images": FRAME, "state": np.zeros(1, np.float32)}, dim

    def observe(self) -> dict[str, Any]:
        if self.blind:
            raise NoObservation(self.blind)
        return dict(self.seen)

    def act(self, row: np.ndarray) -> None:
        assert row.shape == (self.dim,)
        assert np.isfinite(row).all()
        self.sent.append(float(row[0]))
        if len([each for each in self.sent if each is not None]) >= self.ends:
            raise Stopped("the episode is over")

    def hold(self) -> None:
        self.sent.append(None)


# ----------------------------------------------------------------------------- what a policy would say


class Script:
    """What the test lets a policy say: rows of ``value``, or one of ``wrong``. ``speaks``: not held back."""

    def __init__(self) -> None:
        self.value, self.wrong = 1.0, ""
        self.speaks = threading.Event()
        self.speaks.set()

    def rows(self) -> np.ndarray:
        """Return what is said now. Raises what it stands for."""
        if self.wrong == "lost":
            raise ConnectionLost(LOST)
        if self.wrong == "refused":
            raise ServerError("bad_observation", MISFIT)
        found = np.full((ROWS, 3 if self.wrong == "shape" else 1), self.value, np.float32)
        found[-1] = np.nan if self.wrong == "nan" else found[-1]
        return found

    def call(self, observation: Any, limit: float) -> np.ndarray:
        """Answer as a policy in this process does."""
        error, found = None, None
        try:
            found = self.rows()
        except ClientError as problem:
            error = problem
        assert self.speaks.wait(WAIT_S)
        if error is not None:
            raise error
        assert found is not None
        return found


class Case:
    """A source under test. empty: a behaviour that it has no cell for -> why. raises: what ends the run in place of a
    hold, where its policy raises; "" where nothing does."""

    empty: dict[str, str] = {}  # noqa: RUF012
    raises = False
    misfit = MISFIT
    settings: dict[str, Any] = {"handover": "aligned", "replan": "4", "deadline": 1.0}  # noqa: RUF012
    adapter: Adapter | None = None

    def __init__(self) -> None:
        self.script = Script()

    def robot(self) -> Robot:
        return Robot()

    def open(self, clock: Clock) -> Any:
        raise NotImplementedError

    def settle(self, loop: Loop) -> None:
        """Wait until what was asked is answered."""
        source: Any = loop.source
        if self.script.speaks.is_set():
            until(lambda: source._answer is None or not source._answer.empty())

    def lose(self) -> None:
        self.script.wrong = "lost"

    def find(self) -> None:
        self.script.wrong = ""

    def refuse(self) -> None:
        self.script.wrong = "refused"

    def close(self) -> None: ...


class Requests(Case):
    """A policy in this process, asked on a thread."""

    def open(self, clock: Clock) -> Any:
        return lambda: self.script.call


class Refined(Requests):
    """The same, and a small network on the robot that refines its chunks."""

    empty = {  # noqa: RUF012
        "cancelled": "rows are the network's own, whichever chunk it is given; the row above has the chunks'"
    }
    settings = {**Case.settings, "refine": 12}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.adapter = Adapter(
            form := Form("toy", HZ, ROWS, 1, 1, 3, 12, 1, [CameraEncoder("front", 12, 10, [2, 1])]),
            tensors(form),
        )


class Assisted(Requests):
    """The same, and a policy elsewhere that is asked beside it and does not answer."""

    def open(self, clock: Clock) -> Any:
        self.far = threading.Event()
        call = lambda *_: self.far.wait(WAIT_S) and self.script.rows()  # noqa: E731
        self.assist = Assist(
            lambda: self.script.call, lambda: call, parse_assist("every:0"), HZ, 600.0, clock=clock.now
        )
        return self.assist

    def close(self) -> None:
        self.far.set()
        self.assist.close()


class Server:
    """Answers requests and samples of a stream on a socket, as the script says."""

    def __init__(self, script: Script, port: int = 0):
        self.script, self._end = script, threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{port or processes.free_port()}"
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        kept: deque[tuple[list[bytes], bytes]] = deque()
        while not self._end.is_set():
            if self._socket.poll(1 if kept else 20):
                *head, body = self._socket.recv_multipart()
                request = schema.PredictRequest.FromString(body)
                if request.kind != schema.PredictRequest.Kind.Value("STREAM_END"):
                    kept.append((head, self._answer(request)))
            while kept and self.script.speaks.is_set():
                head, reply = kept.popleft()
                self._socket.send_multipart([*head, reply])
        self._socket.close(0)
        self._context.term()

    def _answer(self, request: Any) -> bytes:
        reply = schema.PredictResponse(request_id=request.request_id)
        try:
            rows = self.script.rows()
        except ServerError as error:
            reply.error, reply.error_code = error.message, error.code
            return reply.SerializeToString()
        reply.horizon, reply.dim = rows.shape
        reply.actions.extend(rows.ravel().tolist())
        if request.rate:
            reply.window.step = round(request.time * HZ) + request.delay
            reply.window.sample_time = request.time
            reply.window.frame_time = request.frame_time or request.time
        return reply.SerializeToString()

    @property
    def ended(self) -> bool:
        return self._end.is_set()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class TwoServers(Case):
    """Two servers: where the first one is gone, the second answers."""

    settings = {**Case.settings, "deadline": 10.0}  # noqa: RUF012

    def open(self, clock: Clock) -> Any:
        self.servers = [Server(self.script), Server(self.script)]
        return Servers([server.address for server in self.servers], without=("time",))

    def lose(self) -> None:
        self.servers.pop(0).close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


class TwoPlaces(Case):
    """Vision and prefix on a real server, the head here. The first number of a row is the script's."""

    # A real policy computes within this time on a busy machine too, and a lost server costs it once.
    settings = {**Case.settings, "deadline": 8.0}  # noqa: RUF012
    misfit = "state.opening: expected"

    def robot(self) -> Robot:
        self.policy = load(ASSETS / "pen.gguf", device="cpu", engine="eager", threads=1)
        seen = self.policy.dummy_observation()
        self._robot = Robot({"images": seen.images, "state": seen.state}, self.policy.spec.action.dim)
        return self._robot

    def open(self, clock: Clock) -> Any:
        self._serve()
        calls = SplitCalls(self.policy, f"{self.address}/context.fp32")

        def connect() -> Any:
            call = calls()

            def answer(observation: Any, limit: float) -> np.ndarray:
                said, rows = self.script.call(observation, limit), call(observation, limit)
                rows[:, 0], rows[-1, 0] = said[0, 0], said[-1, 0]
                return np.repeat(rows, said.shape[1], axis=1)

            answer.close = call.close  # type: ignore[attr-defined]
            return answer

        return connect

    def _serve(self, port: int = 0) -> None:
        self._stack = contextlib.ExitStack()
        padded = {
            "padded_state_dim": self.policy.padded_state_dim,
            "padded_action_dim": self.policy.padded_action_dim,
        }
        safety = Safety(self.policy.processor)
        listen = Listen(port=port or processes.free_port())  # a server that comes back needs its port
        made = desk(policy=self.policy, safety=safety, listen=listen, **padded)
        at, self._host = self._stack.enter_context(made), PolicyHost()
        at.service.policies.get().metadata["server"] = self.policy.describe()
        contexts.add(at.service, ("fp32",), self._host)
        self.address = at.native

    def lose(self) -> None:
        for scheduler in self._host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)
        self._stack.close()
        self._host = PolicyHost()

    def find(self) -> None:
        self._serve(int(self.address.rpartition(":")[2]))

    def refuse(self) -> None:
        self._robot.seen["state"] = np.full_like(self._robot.seen["state"], 1e6)

    def close(self) -> None:
        self.lose()


class InSimulatedTime(Case):
    """Evaluation: answers are handed over when their delay has passed."""

    empty = {  # noqa: RUF012
        "refused": "what the policy raises ends the episode, whatever it is: that is the cell lost",
    }
    raises = True

    def open(self, clock: Clock) -> Any:
        return Simulated(self, 0, 0, Latency("12"), HZ)  # type: ignore[arg-type]

    def infer(self, observation: Any, seed: int) -> tuple[np.ndarray, float]:
        return self.script.rows(), 0.0

    def settle(self, loop: Loop) -> None:
        """Do nothing: every answer is as late as it is told, which is later than its rows."""


class ByTheWallClock(InSimulatedTime):
    """Evaluation on the machine's clock: requests as a robot sends them."""

    def open(self, clock: Clock) -> Any:
        return Measured(self, 0, 0)  # type: ignore[arg-type]

    def infer(self, observation: Any, seed: int) -> tuple[np.ndarray, float]:
        return self.script.call(observation, 0.0), 0.0

    def settle(self, loop: Loop) -> None:
        Case.settle(self, loop)


class OfSocket(Case):
    """A stream of a server: windows are pushed back for samples."""

    settings = {"fusion": "latest_only"}  # noqa: RUF012

    def open(self, clock: Clock) -> Any:
        self.server, self._sent = Server(self.script), 0
        self.link = StreamLink(self.server.address, HZ)
        assert self.link.wait_connected(WAIT_S)
        return Stream(self.link)

    def settle(self, loop: Loop) -> None:
        sent, self._sent = self.link.sent > self._sent, self.link.sent
        if not sent:
            self.link.wait_connected(0.02)  # nobody is there
        elif self.script.speaks.is_set():
            until(lambda: self.link.wait_window(0.01) or self.server.ended)

    def lose(self) -> None:
        self.server.close()

    def find(self) -> None:
        self.script.wrong = ""
        if self.server.ended:
            self.server = Server(self.script, int(self.server.address.rpartition(":")[2]))

    def close(self) -> None:
        self.script.speaks.set()
        self.server.close()


class Windows:
    """A session whose head runs say what the script says, for a link in this process."""

    label, rate, run_cost, wants_prefix = "", 1e6, 1.0, False

    def __init__(self, script: Script, waits: bool):
        self.script, self.prompt, self._waits = script, "", waits
        self._new: Any = None

    @property
    def wants_run(self) -> bool:
        return self._new is not None

    def now(self) -> float:
        return 0.0

    def say(self, prompt: str) -> None:
        self.prompt = prompt

    def anew(self) -> Windows:
        return Windows(self.script, self._waits)

    def push_sample(self, sample: Any) -> None:
        self._new = sample

    def push_frame(self, images: Any, taken: float) -> None: ...

    def compute(self) -> None: ...

    def run(self, pause: Any = None) -> Window | None:
        if not self._waits and not self.script.speaks.is_set():
            return None
        sample, self._new = self._new, None
        if sample is None:
            return None
        try:
            rows = self.script.call(None, 0.0)
        except ServerError as error:
            raise ObservationError("images.side", "a frame", "none") from error
        except ConnectionLost as error:
            raise SinewError(LOST) from error
        return Window(round(sample.time * HZ) + sample.delay, rows, sample.time, sample.time)


class Here(Case):
    """A stream of a policy in this process, whose loops are threads."""

    settings = OfSocket.settings

    def open(self, clock: Clock) -> Any:
        came = self.came = threading.Event()

        class Link(LocalLink):
            def window(self, window: Window) -> None:
                super().window(window)
                came.set()

            def failed(self, error: SinewError) -> None:
                super().failed(error)
                came.set()

        self.link = Link(Windows(self.script, True))  # type: ignore[arg-type]
        return Stream(self.link)

    def settle(self, loop: Loop) -> None:
        if self.script.speaks.is_set() and self.link.session.wants_run:
            assert self.came.wait(WAIT_S)
            self.came.clear()

    def close(self) -> None:
        self.script.speaks.set()


class SimulatedStream(InSimulatedTime):
    """A stream in simulated time, whose two loops take as long as they are told."""

    settings = OfSocket.settings

    def open(self, clock: Clock) -> Any:
        session: Any = Windows(self.script, False)
        return Stream(SimulatedLink(session, StreamCosts(0.0, 0.01), clock.now))


SOURCES: dict[str, type[Case]] = {
    "requests": Requests,
    "requests with an edge adapter": Refined,
    "requests with an assistant": Assisted,
    "two servers": TwoServers,
    "a policy in two places": TwoPlaces,
    "evaluation": InSimulatedTime,
    "evaluation in real time": ByTheWallClock,
    "a stream of a server": OfSocket,
    "a stream here": Here,
    "an evaluated stream": SimulatedStream,
}
BEHAVIOURS = ("late", "lost", "cancelled", "refused", "wrong", "blind", "stopped")


class Driven(SimpleNamespace):
    """A loop on a source, its robot and its script."""

    case: Case
    loop: Loop
    robot: Robot

    def tick(self, count: int = 1) -> list[float | None]:
        """Tick so often; return what the robot was sent. Each hold has a reason, and each tick one of both."""
        before = len(self.robot.sent)
        for number in range(count):
            self.loop.tick(self.loop.pace.next())
            assert len(self.robot.sent) == before + number + 1
            assert (self.robot.sent[-1] is None) == bool(self.loop.reason)
        return self.robot.sent[before:]

    def moves(self) -> None:
        """Tick until the robot is sent a row."""
        until(lambda: self.tick() != [None])

    def holds(self) -> str:
        """Tick until it holds; return why."""
        until(lambda: self.tick() == [None])
        return self.loop.reason


def cells(behaviour: str) -> Any:
    """Parametrize a test with the sources that have a cell for a behaviour."""
    names = [name for name, kind in SOURCES.items() if behaviour not in kind.empty]
    return pytest.mark.parametrize("driven", names, indirect=True)


@pytest.fixture
def driven(request: pytest.FixtureRequest) -> Iterator[Driven]:
    case, clock = SOURCES[request.param](), Clock()
    robot = case.robot()
    settings = Settings(HZ, **{"stale": 1e6, **case.settings})
    source = case.open(clock)
    listeners = [] if case.adapter is None else [Refinement(case.adapter)]
    loop = Loop(robot, source, settings, robot.dim, "go", Pace(1 / HZ, clock.now, clock.sleep), listeners)
    clock.before = lambda: case.settle(loop)
    yield Driven(case=case, loop=loop, robot=robot, script=case.script)
    case.script.speaks.set()
    loop.close()
    case.close()


# ----------------------------------------------------------------------------- the table


@cells("late")
def test_late(driven: Driven) -> None:
    """While nothing comes the robot holds, at first and after its rows have run out; then it goes on."""
    driven.script.speaks.clear()
    assert driven.tick(10) == [None] * 10
    driven.script.speaks.set()
    driven.moves()
    driven.script.speaks.clear()
    assert driven.holds()
    driven.script.speaks.set()
    driven.moves()


@cells("lost")
def test_lost(driven: Driven) -> None:
    """Where the other side goes the robot holds for it, or goes on with another one; when it is back it moves again.
    In an evaluation, whose policy has no other side, the episode ends, with the robot held."""
    driven.moves()
    driven.case.lose()
    if driven.case.raises:
        with pytest.raises((SinewError, ClientError), match=LOST):
            driven.loop.run(1000)
        assert driven.robot.sent[-1] is None
        return
    if isinstance(driven.case, TwoServers):
        driven.script.value = 2.0
        until(lambda: driven.tick() == [2.0])  # which only the second one says
        return
    reason = driven.holds()
    assert re.search(f"{LOST}|out of nodes|ConnectionLost|RequestTimeout", reason)
    driven.case.find()
    driven.moves()


@cells("cancelled")
def test_cancelled(driven: Driven) -> None:
    """What was under way when the robot was paused is not executed, whenever it comes."""
    driven.script.speaks.clear()
    driven.tick(3)
    driven.loop.pause()
    assert driven.tick(2) == [None, None]
    assert driven.loop.reason == "paused"
    driven.script.value = 2.0
    driven.loop.resume()
    driven.script.speaks.set()
    driven.moves()
    driven.tick(ROWS)
    assert set(driven.robot.sent) == {None, 2.0}


@cells("refused")
def test_refused(driven: Driven) -> None:
    """What is refused for what it is before the robot has moved ends the run by name."""
    driven.case.refuse()
    with pytest.raises(Refused, match=driven.case.misfit):
        driven.loop.run(1000)
    assert set(driven.robot.sent) == {None}


@cells("wrong")
@pytest.mark.parametrize("wrong", ["shape", "nan"])
def test_wrong(driven: Driven, wrong: str) -> None:
    """Rows that no robot may be sent are a fault: it holds for them until good ones come."""
    driven.moves()
    driven.script.wrong = wrong
    until(lambda: driven.tick() == [None] and driven.loop.report().faults["total"])
    assert re.search("expected . to 1024 actions of . numbers, got shape|not finite$", driven.loop.reason)
    driven.script.wrong = ""
    driven.moves()


@cells("blind")
def test_blind(driven: Driven) -> None:
    """A robot that sees nothing to act on holds for what it says, from that step on, and goes on by itself."""
    driven.moves()
    driven.robot.blind = "the camera is silent"
    until(lambda: driven.tick() == [None] and driven.loop.reason == driven.robot.blind)
    assert driven.tick(3) == [None] * 3
    driven.robot.blind = ""
    driven.moves()


@cells("stopped")
def test_stopped(driven: Driven) -> None:
    """A robot that ends the run is held, whatever is under way, and there is a report."""
    driven.robot.ends = 5
    report = driven.loop.run(1000)
    assert report.executed == 5
    assert driven.robot.sent[-1] is None
    assert report.steps == len(driven.robot.sent) - 1
    assert not driven.loop.stopped


@pytest.mark.parametrize(
    ("source", "behaviour"), [(name, each) for name, kind in SOURCES.items() for each in kind.empty]
)
def test_an_empty_cell_says_why(source: str, behaviour: str) -> None:
    assert behaviour in BEHAVIOURS
    assert len(SOURCES[source].empty[behaviour]) > 20


def test_every_behaviour_has_its_test() -> None:
    assert all(f"test_{behaviour}" in globals() for behaviour in BEHAVIOURS)

"""What one client can cost another: the promise of SECURITY.md, in counted steps on a clock of the test.

Nothing here measures time and nothing runs on threads. The policy advances the clock by what each stage costs, and
requests arrive at fixed times of this clock, also between two steps of an inference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest

from sinew.core import ActionChunk, CancelledError, Observation, SinewError
from sinew.serve import scheduler as scheduling
from sinew.serve.batching import LARGEST
from sinew.serve.device_lock import DeviceLock
from sinew.serve.job import RequestGroup, ServingJob
from sinew.serve.request import Outcome, Request
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from tests.serve.puppet import FRAME

READ, STEPS, MOST = 4.0, 10, 100  # seconds of the context, at one second a step; usual steps; most steps
ALONE = READ + STEPS
TIMES = 8  # a robot's answers that do not count, until costs are known


class Stepped(ServedPolicy):
    """A policy that costs ``READ`` and a second a step, and each further member of a batch ``more`` times as much."""

    unbatched = ""

    def __init__(self, machine: Machine, pauses: bool, more: float):
        self.machine, self.able, self.more = machine, pauses, more

    @property
    def pauses(self) -> bool:
        return self.able

    def prepare(self, observation: Observation) -> Observation:
        return observation

    def batch_key(self, prepared: Observation) -> Hashable:
        return prepared.solver_steps

    cost_key = batch_key

    def run(
        self,
        prepared: Observation,
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> ActionChunk:
        (found,) = self.run_batch([prepared], cancel=cancel, between=between)
        return found

    def run_batch(
        self,
        members: Sequence[Observation],
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> list[Any]:
        assert (between is not None) == self.able
        cost = 1.0 + self.more * (len(members) - 1)
        self.machine.advance(cost * READ)
        for _ in range(members[0].solver_steps or STEPS):
            if cancel is not None and cancel.is_set():
                raise CancelledError("between two steps")
            self.machine.advance(cost)
            if between is not None:
                between()
        return [ActionChunk(np.zeros((1, 1), np.float32)) for _ in members]


class Asker:
    """A client that asks again ``pause`` seconds after its answer. ``took``: what each answer took."""

    def __init__(self, name: str, steps: int = STEPS, count: int = 1, pause: float = 0.0, at: float = 0.0):
        self.name, self.steps, self.count, self.pause = name, steps, count, pause
        self.due, self.asked, self.left = at, 0.0, 0
        self.took: list[float] = []


class Machine:
    def __init__(self, max_batch: int | None, pauses: bool = True, more: float = 1.0):
        self.now, self.askers = 0.0, list[Asker]()
        self.scheduler = Scheduler(Stepped(self, pauses, more), max_batch=max_batch)
        if self.scheduler.batcher is not None:
            self.scheduler.batcher.limit = max_batch or LARGEST

    def advance(self, seconds: float) -> None:
        """Let time pass, then decode what has come."""
        self.now += seconds
        for asker in self.askers:
            if asker.due <= self.now and not asker.left:
                self._ask(asker)
        while (request := self.scheduler._received.next()) is not None:
            self.scheduler._decode(request)
            self.scheduler._decoded(request)

    def _ask(self, asker: Asker) -> None:
        asker.asked, asker.left = self.now, asker.count
        together = RequestGroup(asker.count) if asker.count > 1 else None
        for _ in range(asker.count):
            seen = Observation({"front": FRAME}, np.zeros(2, np.float32), "go", solver_steps=asker.steps)
            request = Request("", lambda _budget, seen=seen: seen, connection=asker.name)
            made = ServingJob(request, together=together)
            self.scheduler.submit(made, lambda outcome: self._answered(asker, outcome))

    def _answered(self, asker: Asker, outcome: Outcome) -> None:
        assert not isinstance(outcome, SinewError), outcome
        asker.left -= 1
        if not asker.left:
            asker.took.append(self.now - asker.asked)
            asker.due = self.now + asker.pause

    def run(self, seconds: float, *askers: Asker) -> None:
        self.askers += askers
        end = self.now + seconds
        while self.now < end:
            self.advance(0.0)
            if (first := self.scheduler._ready.next()) is None:
                self.advance(max(0.0, min(each.due for each in self.askers) - self.now))
                continue
            requests: list[Request] = []
            if self.scheduler._begin(first, requests):
                self.scheduler._answer(first, requests)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(*options: Any, **more: Any) -> Machine:
        made = Machine(*options, **more)
        monkeypatch.setattr(scheduling.time, "perf_counter", lambda: made.now)
        return made

    return make


ATTACKS = {
    "many steps": lambda n: [Asker(f"attacker {n}", MOST)],
    "two requests of many steps": lambda n: [Asker(f"attacker {n}", MOST), Asker(f"attacker {n}", MOST)],
    "other steps each time": lambda n: [Asker(f"attacker {n}", MOST - each) for each in range(2)],
    "messages of 64": lambda n: [Asker(f"attacker {n}", STEPS, 64)],
    "messages of 64 with many steps": lambda n: [Asker(f"attacker {n}", MOST, 64)],
    "one step each": lambda n: [Asker(f"attacker {n}", 1), Asker(f"attacker {n}", 1)],
}


@pytest.mark.parametrize("max_batch", [1, 8, None])
@pytest.mark.parametrize("pause", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("attack", ATTACKS)
def test_one_client_makes_another_wait_about_twice_as_long(machine, attack, pause, max_batch):
    at = machine(max_batch)
    robot = Asker("robot", pause=pause)
    at.run(4000 + 200 * pause, robot, *ATTACKS[attack](0))
    late = robot.took[TIMES:]
    assert len(late) > 30
    assert median(late) <= 2.2 * ALONE
    assert max(late) <= 3 * ALONE
    assert all(asker.took or asker.left for asker in at.askers)


@pytest.mark.parametrize("more", [0.1, 0.2, 0.3, 0.6, 1.0])
def test_a_message_is_split_where_its_batches_cost_more_than_a_robots_inference(machine, more):
    """A batch of eight costs 1.7 to 8 times as much as one, and does not pause. A robot waits for one batch."""
    at = machine(8, pauses=False, more=more)
    robot = Asker("robot", pause=3.0)
    at.run(8000, robot, Asker("message", count=64))
    assert median(robot.took[TIMES:]) <= 2.0 * ALONE


@pytest.mark.parametrize("max_batch", [1, 8])
def test_each_connection_of_several_attackers_has_its_share_and_no_more(machine, max_batch):
    at = machine(max_batch)
    robots = [Asker("robot"), Asker("another robot", pause=20.0)]
    attackers = [
        asker for n, attack in enumerate(ATTACKS) if attack != "one step each" for asker in ATTACKS[attack](n)
    ]
    at.run(20_000, *robots, *attackers)
    clients = len({asker.name for asker in at.askers})
    for robot in robots:
        assert median(robot.took[TIMES:]) <= (clients + 0.5) * ALONE
    assert all(asker.took for asker in at.askers if asker.count == 1)  # nobody starves


def test_a_client_that_asks_for_much_has_half_of_the_time_and_its_answers(machine):
    at = machine(1)
    heavy = Asker("heavy", MOST)
    at.run(10_000, Asker("robot"), heavy)
    assert len(heavy.took) >= 0.45 * 10_000 / (READ + MOST)


def test_robots_that_ask_alike_take_turns(machine):
    """None comes between the steps of another: each has the answer that its turn brings."""
    at = machine(1)
    robots = [Asker(f"robot {n}") for n in range(4)]
    at.run(6000, *robots)
    assert {took for robot in robots for took in robot.took[2:]} == {4 * ALONE}


def test_a_policy_that_cannot_pause_gives_turns_by_cost(machine):
    """A robot that always waits is answered as often as the attacker's inferences cost."""
    at = machine(1, pauses=False)
    robot, other = Asker("robot"), Asker("robot too")
    heavy = Asker("heavy", MOST)
    at.run(20_000, robot, other, heavy)
    answers = len(robot.took) + len(other.took)
    assert answers * ALONE >= 0.55 * 20_000
    assert median(robot.took) <= 3.2 * ALONE


def test_a_message_fills_a_batch_where_nobody_else_is_or_where_it_costs_no_more(machine):
    alone = machine(8)
    message = Asker("message", count=64)
    alone.run(2000, message)
    assert alone.scheduler.stats()["batches"] == alone.scheduler.stats()["served"] / 8
    wide = machine(8, more=0.0)
    message, robot = Asker("message", count=64), Asker("robot")
    wide.run(8000, message, robot)
    assert len(message.took) > 8000 / 64 / ALONE  # more than one by one could be


def test_a_new_connection_for_each_request_brings_no_first_place(machine):
    at = machine(1)
    robot, names = Asker("robot"), iter(range(1 << 20))

    class Churn(Asker):
        @property
        def name(self) -> str:
            return f"new {next(names)}"

        @name.setter
        def name(self, value: str) -> None: ...

    at.run(6000, robot, Churn("", MOST), Churn("", 1))
    assert median(robot.took[TIMES:]) <= 3.2 * ALONE
    assert max(robot.took[TIMES:]) <= 4 * ALONE


def test_a_stall_of_the_machine_is_not_charged_to_the_robot_whose_turn_it_was(machine):
    at = machine(1)
    robot, other = Asker("robot"), Asker("other")
    at.run(500, robot, other)
    whole, policy = at.scheduler.policy.run_batch, at.scheduler.policy

    def stalled(*given: Any, **more: Any) -> Any:
        at.now += 1000.0
        policy.run_batch = whole
        return whole(*given, **more)

    policy.run_batch = stalled
    count = len(robot.took)
    at.run(2000, robot)
    assert max(robot.took[count + 2 :]) <= 4 * ALONE


def test_a_turn_passes_to_another_policy_of_the_device() -> None:
    """Once it has taken as long as the other's last turn."""
    now, order = [0.0], list[str]()
    lock = DeviceLock(clock=lambda: now[0])

    def short() -> None:
        with lock:
            now[0] += 2.0
            order.append("short")
        with lock:  # this thread's last turn is known
            now[0] += 2.0
            order.append("short")

    thread = threading.Thread(target=short)
    with lock:
        now[0] += 1.0
        assert lock.pass_on() == 0.0  # nobody waits
        thread.start()
        while len(lock._line) < 2:
            pass
        assert lock.pass_on() == 2.0  # its usual time is not known yet
        while len(lock._line) < 2:
            pass
        for _ in range(3):
            order.append("step")
            now[0] += 1.0
            lock.pass_on()
    thread.join()
    assert order == ["short", "step", "step", "short", "step"]

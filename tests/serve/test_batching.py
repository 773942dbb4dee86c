"""Which requests share an inference, and what each of them is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.core import ActionChunk, CancelledError, Observation, SinewError, Timing
from sinew.serve import batching
from sinew.serve.batching import Batcher, Costs
from sinew.serve.job import PreparedInputs, RequestGroup, ServingJob
from sinew.serve.request import DeadlineError, Request, ShuttingDownError, SupersededError
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from tests.serve.puppet import FRAME, enqueue, until


def job(kind: object, deadline: float | None = None) -> ServingJob:
    return ServingJob(Request("", lambda budget: None), deadline, prepared=PreparedInputs(kind=kind))  # type: ignore[arg-type,return-value]


def costs(table: dict[int, float], kind: object = "a") -> Costs:
    found = Costs()
    for size, seconds in table.items():
        found.learn(kind, size, seconds)
    return found


def batcher(table: dict[int, float], limit: int = 8) -> Batcher:
    made = Batcher(limit)
    made.costs = costs(table)
    return made


CHEAP = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 8: 1.7}


def test_costs_are_learnt_and_guessed_with_care():
    known = costs({1: 1.0, 4: 2.5})
    assert known.seconds("a", 2) == pytest.approx(1.5)  # between two measured ones
    assert known.seconds("a", 8) == pytest.approx(5.0)  # no cheaper than two batches of four
    assert known.seconds("b", 1) is None
    assert not known.measured("a", 2)
    assert costs({2: 1.0, 8: 4.0, 16: 99.0}).seconds("a", 4) == 2.0  # the next ones
    known.learn("a", 1, 2.0)
    assert 1.0 < known.seconds("a", 1) < 1.5
    assert known.surely("a", 1) > known.seconds("a", 1)
    for number in range(1000):
        known.learn(number, 1, 1.0)
    assert known.seconds("a", 1) is None  # clients name kinds, so not all are remembered


def test_what_waits_is_taken_together():
    line = [job("a") for _ in range(5)]
    assert batcher(CHEAP).members(line[0], line[1:], 0.0) == line
    assert batcher(CHEAP, 3).members(line[0], line[1:], 0.0) == line[:3]


def test_only_what_fits():
    line = [job("a"), job("b"), job("a"), job(None)]
    assert batcher(CHEAP).members(line[0], line[1:], 0.0) == [line[0], line[2]]
    assert batcher(CHEAP).members(line[3], [*line[:3], job(None)], 0.0) == [line[3]]
    assert batcher({}).members(line[0], line[1:], 0.0) == line[:1]  # nothing is known of any size


def test_a_batch_that_makes_all_wait_longer_is_not_formed():
    line = [job("a") for _ in range(4)]
    dear = {n: 1.0 * n for n in range(1, 9)}
    assert batcher(dear).members(line[0], line[1:], 0.0) == line[:1]
    assert batcher({1: 1.0, 2: 2.5}).members(line[0], line[1:2], 0.0) == line[:1]
    assert batcher({1: 1.0, 2: 1.5}).members(line[0], line[1:2], 0.0) == line[:2]  # all wait as long
    assert batcher({1: 1.0, 2: 1.8}).members(line[0], [job("b"), line[1]], 0.0) == line[:1]


def test_a_deadline_that_holds_alone_holds_in_the_batch():
    tight, *others = [job("a", deadline=1.05), job("a"), job("a")]
    assert batcher(CHEAP).members(tight, others, 0.0) == [tight]
    just = [job("a", deadline=1.1), job("a", deadline=1.0 + 1.1)]  # to the moment
    assert batcher(CHEAP).members(just[0], just[1:], 0.0) == just
    lost = job("a", deadline=0.5)  # which nothing can hold
    assert batcher(CHEAP).members(lost, others, 0.0) == [lost, *others]
    waiting = job("b", deadline=2.05)  # it would begin after one inference, not after a batch
    for line in (
        [waiting, others[1]],
        [waiting, others[1], job("c")],
        [job("c"), job("b", deadline=3.05), others[1]],
    ):
        assert batcher(CHEAP).members(others[0], line, 0.0) == [others[0]]
    assert batcher(CHEAP).members(tight, [others[0], job("b")], 0.0) == [tight]


def test_sizes_that_nobody_measured_are_tried_where_deadlines_allow():
    line = [job("a"), job("a", deadline=1.5), job("a")]
    assert batcher({1: 1.0}).members(line[0], line[1:], 0.0) == line[:2]
    tight = [job("a", deadline=1.5), job("a")]
    assert batcher({1: 1.0}).members(tight[0], tight[1:], 0.0) == tight[:1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("aab"), st.one_of(st.none(), st.floats(0, 12))), min_size=1, max_size=8
    ),
    st.lists(st.floats(0.5, 3), min_size=8, max_size=8),
)
def test_no_deadline_breaks_that_would_have_held(wanted, table):
    line = [job(kind, deadline) for kind, deadline in wanted]
    times = dict(enumerate(np.maximum.accumulate(table).tolist(), 1))
    made = batcher(times)
    made.costs.learn("b", 1, 0.7)
    cost = {"a": times[1], "b": 0.7}
    kind = line[0].kind
    chosen = made.members(line[0], line[1:], 0.0)
    assert chosen[0] is line[0]
    assert all(member.kind == kind for member in chosen)
    ends, clock = {}, 0.0
    for each in line:  # one after another
        clock += cost[each.kind]
        ends[id(each)] = clock
    clock = times[len(chosen)] if kind == "a" and len(chosen) > 1 else cost[kind] * len(chosen)
    after = {id(each): clock for each in chosen}
    for each in line:
        if id(each) not in after:
            clock += cost[each.kind]
            after[id(each)] = clock
    for each in line:
        if each.deadline is not None and ends[id(each)] <= each.deadline:
            assert after[id(each)] <= each.deadline + 1e-9


def test_costs_mix_old_and_new_and_grow_old(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(batching.time, "monotonic", lambda: clock[0])
    known = costs({2: 1.0})
    assert known.surely("a", 2) == known.seconds("a", 2) == 1.0
    known.learn("a", 2, 2.0)
    assert known.seconds("a", 2) == pytest.approx(1.2)  # a fifth of the way
    assert known.surely("a", 2) == pytest.approx(1.2 + 2 * 0.2)
    known.learn("a", 2, 1.2)
    assert known.surely("a", 2) == pytest.approx(1.2 + 2 * 0.8 * 0.2)
    assert known.seconds("a", 1) == known.seconds("a", 2)  # a smaller one costs at most as much
    assert known.seconds("a", 3) == pytest.approx(1.5 * 1.2)
    clock[0] += batching.OLD_S - 1
    assert known.measured("a", 2)
    clock[0] += 1
    assert not known.measured("a", 2)
    line, made = [job("a"), job("a")], batcher({1: 1.0})
    clock[0] += batching.OLD_S
    made.costs.learn("a", 2, 1.0)
    assert made.members(line[0], line[1:], 0.0) == line  # though what one costs is old
    known.learn("a", 2, 1.2)
    assert known.measured("a", 2)


def test_kinds_that_were_used_last_are_remembered():
    known = Costs()
    for kind in range(batching.MAX_KEYS):
        known.learn(kind, 1, 1.0)
    known.learn(0, 1, 1.0)
    assert known.seconds(1, 1) == 1.0
    known.learn("new", 1, 1.0)
    assert known.seconds(1, 1) is None  # the one that was learnt longest ago
    assert [known.seconds(kind, 1) for kind in (0, 2, "new")] == [1.0] * 3


class Timed:
    """A policy whose batches take what a table says, on a clock of its own; its first run of each size takes longer."""

    unbatched = ""

    def __init__(self, table: dict[int, float]):
        self.table, self.clock = table, 0.0
        self.ran: list[int] = []
        self.warmed: list[int] = []

    def dummy_observation(self) -> str:
        return "warm"

    def warm_batches(self, largest: int) -> None:
        self.warmed.append(largest)

    def prepare(self, observation: str) -> str:
        return observation

    def batch_key(self, prepared: str) -> str:
        return "a"

    def run_batch(self, members: list[str], *, cancel: threading.Event | None = None) -> list:
        self.clock += self.table[len(members)] + (0.0 if len(members) in self.ran else 0.125)
        self.ran.append(len(members))
        return members


def calibrated(table: dict[int, float], limit: int | None, monkeypatch) -> tuple[Batcher, Timed]:
    policy, made = Timed(table), Batcher(limit)
    monkeypatch.setattr(batching.time, "perf_counter", lambda: policy.clock)
    made.calibrate(policy)  # type: ignore[arg-type]
    assert policy.warmed == ([made.limit] if made.limit > 1 else [])
    return made, policy


@pytest.mark.parametrize(
    ("table", "limit", "tried"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, 16, [1, 2, 4, 8, 16]),  # free, up to the largest of auto
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0}, 4, [1, 2, 4, 8]),  # the last doubling brings nothing
        (
            {1: 0.25, 2: 0.475, 4: 0.925, 8: 1.5},
            1,
            [1, 2, 4],
        ),  # 1.053 times as much goes on, and is not worth it
        ({1: 1.25, 2: 1.5, 4: 2.5, 8: 3.0}, 4, [1, 2, 4]),  # a batch of four takes too long to try eight
        ({1: 0.25, 2: 0.475, 4: 0.875, 8: 1.75}, 4, [1, 2, 4, 8]),  # 1.14 times as much is
        ({1: 3.0, 2: 3.0}, 1, [1]),  # nor is two tried where one is too slow
        ({1: 1.0, 2: 3.0}, 1, [1, 2]),
        ({1: 1.0, 2: 1.25, 4: 2.5}, 2, [1, 2, 4]),
    ],
)
def test_auto_grows_while_it_pays(table, limit, tried, monkeypatch):
    made, policy = calibrated(table, None, monkeypatch)
    assert list(dict.fromkeys(policy.ran)) == tried
    assert made.describe()["max_batch"] == limit
    for size in tried:
        first = 0.125 if table[size] + 0.125 > batching.LONGEST_S else 0.0  # which is tried once only
        assert made.costs.seconds("a", size) == pytest.approx(table[size] + first)
        assert policy.ran.count(size) == (1 if first else 1 + batching.TRIALS)
        assert f"{size}: {1e3 * (table[size] + first):.1f} ms" in made.reason
    if limit > 1:
        took = made.costs.seconds("a", limit)
        assert f"{limit * table[1] / took:.2f} times the throughput at {limit}" in made.reason
    else:
        assert "no faster than its members one by one" in made.reason


@pytest.mark.parametrize(("load", "noted"), [(0.0, False), (999.0, True)])
def test_a_busy_machine_is_named_beside_the_times(load, noted, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    made, _ = calibrated({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, None, monkeypatch)
    assert ("other programs were running" in made.describe()["max_batch_reason"]) is noted
    assert bool(made.busy) is noted


def test_a_size_is_tried_until_once_takes_too_long(monkeypatch):
    steps, policy = iter([2.0, 2.5]), Timed({})

    def run(_members: list[str]) -> None:
        policy.clock += next(steps)

    monkeypatch.setattr(policy, "run_batch", run)
    monkeypatch.setattr(batching.time, "perf_counter", lambda: policy.clock)
    assert batching.time_batches(policy, [1]) == {1: 2.0}
    assert list(steps) == []


def test_what_came_in_one_message_is_computed_at_once_and_by_itself():
    """Whatever it costs others; what is late or of another kind is not in it."""
    message, other = RequestGroup(5), RequestGroup(1)
    kinds = (("a", message), ("b", message), ("a", None), ("a", other), ("a", message), (None, message))
    line = [job(kind) for kind, _ in kinds]
    for each, (_, together) in zip(line, kinds, strict=True):
        each.together = together
    late = job("a", 0.5)
    late.together = message
    assert Batcher(8).members(line[0], [*line[1:], late], 1.0) == [line[0], line[4]]
    assert Batcher(1).members(line[0], line[1:], 1.0) == line[:1]
    assert batcher(CHEAP).members(line[2], [*line[:2], *line[3:]], 1.0) == [line[2]]
    assert batcher(CHEAP).members(line[5], line[:5], 1.0) == [line[5]]
    assert Batcher(3).describe() == {"max_batch": 3, "max_batch_reason": "asked for"}


@pytest.mark.parametrize(("asked", "tried"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (4, [1, 2, 4])])
def test_a_limit_that_was_asked_for_stays(asked, tried, monkeypatch):
    made, policy = calibrated(dict.fromkeys((1, 2, 4, 8), 1.0), asked, monkeypatch)
    assert made.describe()["max_batch"] == asked
    assert list(dict.fromkeys(policy.ran)) == tried


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from("aab"), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 3), min_size=8, max_size=8),
    st.integers(1, 8),
)
def test_the_batch_is_the_one_with_which_all_wait_least(kinds, table, limit):
    line = [job(kind) for kind in kinds]
    made = batcher(dict(enumerate(table, 1)), limit)
    made.costs.learn("b", 1, 0.7)
    made.costs.learn("b", 2, 0.8)
    cost = {"a": table[0], "b": 0.7}
    of = {"a": table, "b": [0.7, 0.8]}[line[0].kind]
    fit = [each for each in line if each.kind == line[0].kind][:limit]

    def waited(size: int) -> float:
        ends, clock = [of[size - 1]] * size, of[size - 1]
        for each in line:
            if each not in fit[:size]:
                clock += cost[each.kind]
                ends.append(clock)
        return sum(ends)

    chosen = made.members(line[0], line[1:], 0.0)
    if line[0].kind == "b" and len(fit) > 2 and len(chosen) > 2:
        return  # sizes that nobody measured are tried
    assert chosen == fit[: len(chosen)]
    sizes = range(1, min(len(fit), len(of)) + 1)
    assert waited(len(chosen)) <= min(map(waited, sizes)) + 1e-9


def test_who_is_lost_or_has_left_is_in_no_batch():
    late, now, gone, last = job("a", 0.5), job("a", 1.0), job("a"), job("a")
    gone.cancel.set()
    first = job("a")
    assert batcher(CHEAP).members(first, [late, now, gone, last], 1.0) == [first, now, last]


def test_deadlines_of_other_policies_count():
    line = [job("a") for _ in range(3)]
    assert batcher(CHEAP).members(line[0], line[1:], 0.0, [job("b", 2.0)]) == line[:1]
    assert batcher(CHEAP).members(line[0], line[1:], 0.0, [job("b", 2.15)]) == line[:2]
    assert batcher(CHEAP).members(line[0], line[1:], 0.0, [job("b", 2.25)]) == line


def test_a_batch_is_cancelled_by_all_of_it():
    line = [job("a"), job("a")]
    for each in line:
        assert not batching.AllCancelled(line).is_set()
        each.cancel.set()
    assert batching.AllCancelled(line).is_set()


def test_one_is_no_batch():
    line = [job("a"), job("a")]
    assert batcher({1: 1.0, 2: 1.0}, 1).members(line[0], line[1:], 0.0) == line[:1]
    assert batcher({1: 1.0, 2: 1.0}, 2).members(line[0], line[1:], 0.0) == line


# ----------------------------------------------------------------------------- in the scheduler


class Jointly(ServedPolicy):
    """A policy whose kind of batch is the prompt's first letter, and whose inferences wait for ``open``."""

    unbatched = ""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[str]] = []

    def warm_up(self) -> None: ...

    def dummy_observation(self) -> Observation:
        return Observation(images={"front": FRAME}, state=np.zeros(2), prompt="warm")

    def prepare(self, observation: Observation) -> Observation:
        return observation

    def batch_key(self, prepared: Observation) -> str:
        return prepared.prompt[0]

    def run(self, prepared: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        (found,) = self.run_batch([prepared], cancel=cancel)
        if isinstance(found, SinewError):
            raise found
        return found

    def run_batch(
        self, members: list[Observation], *, cancel: threading.Event | None = None
    ) -> list[ActionChunk | SinewError]:
        prompts = [member.prompt for member in members]
        if prompts[0] != "warm":
            gate = self.open
            self.entered.set()
            while not gate.wait(0.002):
                if cancel is not None and cancel.is_set():
                    raise CancelledError("between two stages")
            self.batches.append(prompts)
        if "a bug" in prompts:
            raise RuntimeError("secret detail")
        actions = [np.full((3, 2), member.state[0], np.float32) for member in members]
        return [
            SinewError("a bad one") if prompt == "a bad" else ActionChunk(each, Timing(batch=len(members)))
            for prompt, each in zip(prompts, actions, strict=True)
        ]


class Desk:
    def __init__(self, max_batch: int | None = 8):
        self.policy = Jointly()
        self.scheduler = Scheduler(self.policy, max_batch=max_batch)
        self.scheduler.start()
        assert self.scheduler.batcher is not None
        self.scheduler.batcher.limit = max_batch or 8  # whatever this machine measured
        self.scheduler.batcher.costs.learn("a", 1, 1.0)
        self.scheduler.batcher.costs.learn("a", 8, 1.1)
        for size in range(2, 8):
            self.scheduler.batcher.costs.learn("a", size, 1.05)
        self.found: dict[str, ActionChunk | SinewError] = {}
        self.number = 0

    def ask(self, prompt: str, client: str, **options) -> ServingJob:
        """Ask as ``client``; the answer is found under the client's name, or prompt and client.

        Returns when the request is decoded, because two threads decode and one could overtake the other.
        """
        self.number += 1
        observation = Observation(images={"front": FRAME}, state=np.full(2, self.number), prompt=prompt)
        name = f"{prompt} {client}"
        job = enqueue(
            self.scheduler,
            lambda check: observation,
            lambda outcome: self.found.__setitem__(name, outcome),
            client=client,
            **options,
        )
        until(lambda: not job.waiting or job in self.scheduler._ready.order())
        return job

    def hold(self) -> None:
        """Begin an inference behind which others queue."""
        self.ask("z", "holder")
        until(self.policy.entered.is_set)

    def ready(self, count: int) -> None:
        """Wait until so many requests are prepared."""
        until(lambda: len(self.scheduler._ready.order()) == count)

    def go(self, count: int) -> list[list[str]]:
        """Let everything be computed; return the batches after the first inference."""
        self.policy.open.set()
        until(lambda: len(self.found) == count)
        return self.policy.batches[1:]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.policy.open.set()
    made.scheduler.stop()
    assert made.scheduler.join(60)


def test_waiting_requests_share_an_inference(desk):
    desk.hold()
    for number in range(4):
        desk.ask("a go", f"robot {number}")
    desk.ask("b other", "robot 9")
    desk.ready(5)
    assert desk.go(6) == [["a go"] * 4, ["b other"]]
    for number in range(4):
        chunk = desk.found[f"a go robot {number}"]
        assert (chunk.actions[0, 0], chunk.timing.batch) == (number + 2, 4)
        assert chunk.timing.queue_ms > 0
    stats = desk.scheduler.stats()
    assert (stats["served"], stats["batches"], stats["running"]) == (6, 3, False)


def test_a_picture_that_takes_long_to_decode_keeps_no_other_waiting(desk):
    desk.hold()
    decoded = threading.Event()

    def large(check):
        decoded.wait(60)
        raise SinewError("too large")

    enqueue(desk.scheduler, large, lambda outcome: desk.found.__setitem__("large", outcome), client="large")
    desk.ask("a go", "robot")
    desk.ready(1)
    decoded.set()
    desk.go(3)
    assert str(desk.found["large"]) == "too large"


def test_whose_deadline_passed_in_the_queue_is_told_and_counted(desk, monkeypatch):
    desk.hold()
    for number, seconds in enumerate((10, 10, 10_000)):
        desk.ask("a go", f"robot {number}", deadline=time.perf_counter() + seconds)
    desk.ready(3)
    real = time.perf_counter
    with monkeypatch.context() as patched:
        patched.setattr("sinew.serve.scheduler.time", SimpleNamespace(perf_counter=lambda: real() + 100))
        desk.scheduler.expire()
    assert {desk.found[f"a go robot {n}"].code for n in (0, 1)} == {DeadlineError.code}
    stats = desk.scheduler.stats()
    assert (stats["late"], stats["failed"], stats["waiting"], stats["running"]) == (2, 2, 1, True)
    assert desk.go(4) == [["a go"]]


def test_the_error_of_one_is_answered_to_it_alone(desk):
    desk.hold()
    for number, prompt in enumerate(("a go", "a bad", "a go")):
        desk.ask(prompt, f"robot {number}")
    desk.ready(3)
    desk.go(4)
    assert str(desk.found["a bad robot 1"]) == "a bad one"
    assert all(isinstance(desk.found[f"a go robot {n}"], ActionChunk) for n in (0, 2))


def test_a_failure_that_nobody_foresaw_is_found_one_by_one(desk):
    desk.hold()
    for number, prompt in enumerate(("a go", "a bug", "a go")):
        desk.ask(prompt, f"robot {number}")
    desk.ready(3)
    assert desk.go(4) == [["a go", "a bug", "a go"], ["a go"], ["a bug"], ["a go"]]
    error = desk.found["a bug robot 1"]
    assert isinstance(error, SinewError)
    assert "secret" not in str(error)
    assert all(isinstance(desk.found[f"a go robot {n}"], ActionChunk) for n in (0, 2))


def test_a_client_that_leaves_harms_no_other(desk):
    desk.hold()
    jobs = [desk.ask("a go", f"robot {number}") for number in range(3)]
    desk.ready(3)
    desk.policy.entered.clear()
    hold, desk.policy.open = desk.policy.open, threading.Event()
    hold.set()
    until(desk.policy.entered.is_set)  # the batch has begun
    desk.scheduler.cancel(jobs[1])
    desk.go(4)
    assert desk.found["a go robot 1"].code == "cancelled"
    assert all(isinstance(desk.found[f"a go robot {n}"], ActionChunk) for n in (0, 2))


def test_who_left_a_batch_that_failed_is_not_computed_alone(desk):
    desk.hold()
    jobs = [desk.ask(prompt, f"robot {number}") for number, prompt in enumerate(("a go", "a bug", "a go"))]
    desk.ready(3)
    desk.policy.entered.clear()
    hold, desk.policy.open = desk.policy.open, threading.Event()
    hold.set()
    until(desk.policy.entered.is_set)
    desk.scheduler.cancel(jobs[2])
    assert desk.go(4) == [["a go", "a bug", "a go"], ["a go"], ["a bug"]]
    assert desk.found["a go robot 2"].code == "cancelled"


def test_who_leaves_while_it_is_decoded_is_in_no_batch(desk):
    made, told = [], []

    def decode(_budget):
        for name in "bc":
            desk.ask(f"a {name}", name)
        desk.ready(2)
        until(lambda: made)[0].cancel.set()
        return Observation(images={"front": FRAME}, state=np.zeros(2), prompt="a")

    desk.policy.open.set()
    made.append(enqueue(desk.scheduler, decode, told.append, client="a"))
    until(lambda: len(desk.found) == 2)
    assert (type(told[0]), desk.policy.batches) == (CancelledError, [["a b", "a c"]])


def test_what_a_batch_took_is_learnt_where_all_of_it_was_answered(desk, monkeypatch):
    """By a clock that inferences alone move."""
    now, learnt, left = [100.0], [], []
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    run = desk.policy.run_batch

    def moving(*given, **options):
        found = run(*given, **options)
        left.append(len(desk.scheduler._ready.order()))
        now[0] += 0.25 * len(found)
        desk.scheduler._failures, desk.scheduler._broken = 2, "sick"  # as if others had failed meanwhile
        return found

    monkeypatch.setattr(desk.policy, "run_batch", moving)
    monkeypatch.setattr(desk.scheduler.batcher.costs, "learn", lambda *given: learnt.append(given))
    monkeypatch.setattr("sinew.serve.scheduler.time", clock)
    desk.scheduler.batcher.limit = 2
    desk.hold()
    for number, prompt in enumerate(("a go", "a bad", "a go", "a go")):
        desk.ask(prompt, f"robot {number}")
    desk.ready(4)
    assert desk.go(5) == [["a go", "a bad"], ["a go", "a go"]]
    assert learnt == [("z", 1, 0.25), ("a", 2, 0.5)]
    assert left == [4, 2, 0]  # who is computed waits no more, and keeps no memory there
    assert (desk.scheduler._failures, desk.scheduler._broken) == (0, None)


def test_a_batch_that_everybody_left_ends(desk):
    desk.hold()
    jobs = [desk.ask("a go", f"robot {number}") for number in range(2)]
    desk.ready(2)
    desk.policy.entered.clear()
    hold, desk.policy.open = desk.policy.open, threading.Event()
    hold.set()
    until(desk.policy.entered.is_set)
    for each in jobs:
        desk.scheduler.cancel(each)
    until(lambda: len(desk.found) == 3)  # though the inference is held
    assert {desk.found[f"a go robot {n}"].code for n in (0, 1)} == {"cancelled"}


def test_stopping_answers_all_members(desk):
    desk.hold()
    for number in range(3):
        desk.ask("a go", f"robot {number}")
    desk.ready(3)
    desk.policy.entered.clear()
    hold, desk.policy.open = desk.policy.open, threading.Event()
    hold.set()
    until(desk.policy.entered.is_set)
    desk.scheduler.stop()
    until(lambda: len(desk.found) == 4)
    assert {type(desk.found[f"a go robot {n}"]) for n in range(3)} == {ShuttingDownError}


def test_who_floods_gets_no_second_place_before_the_others(desk):
    desk.scheduler.batcher.limit = 4
    desk.hold()
    for prompt in ("a first", "a second"):
        desk.ask(prompt, "flooder")
    for number in range(3):
        desk.ask("a go", f"robot {number}")
    desk.ready(5)
    first, second = desk.go(6)
    assert sorted(first) == ["a first", "a go", "a go", "a go"]
    assert second == ["a second"]


def test_the_newest_of_a_session_is_computed(desk):
    desk.hold()
    desk.ask("a old", "robot", session="s")
    desk.ask("a new", "robot", session="s")
    desk.ask("a go", "other")
    desk.ready(2)
    assert desk.go(4) == [["a new", "a go"]]
    assert isinstance(desk.found["a old robot"], SupersededError)


def test_auto_measures_and_says_what_it_found():
    made = Desk(max_batch=None)
    try:
        told = made.scheduler.batcher.describe()
        assert "measured 1: " in told["max_batch_reason"]
    finally:
        made.scheduler.stop()
        assert made.scheduler.join(60)


def test_a_policy_without_batches():
    class Single(Jointly):
        unbatched = "expected another engine, got this one"

    for asked, says in ((None, ""), (4, "--max-batch 4: expected another engine, got this one")):
        scheduler = Scheduler(Single(), max_batch=asked)
        if says:
            with pytest.raises(SinewError, match=says):
                scheduler.start()
        else:
            scheduler.start()
            assert scheduler.batcher.describe() == {"max_batch": 1, "max_batch_reason": Single.unbatched}
        scheduler.stop()
        assert scheduler.join(60)

"""The queue in which connections take turns, against a plain model of it."""

from __future__ import annotations

import threading
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sinew.serve import fair_queue as module
from sinew.serve.fair_queue import FairQueue
from tests.serve.puppet import WAIT_S

OWNERS = st.sampled_from("abcd")


class TurnsModel(RuleBasedStateMachine):
    """Items as a list in the order of their coming, and for each owner when its last turn, or its arrival, was."""

    def __init__(self) -> None:
        super().__init__()
        self.real: FairQueue[tuple[str, int]] = FairQueue()
        self.items: list[tuple[str, int]] = []
        self.last: dict[str, int] = {}
        self.moments = 0

    def turn(self, owner: str) -> None:
        self.moments += 1
        self.last[owner] = self.moments

    def first(self) -> tuple[str, int] | None:
        """The oldest item of the owner that had no turn for longest."""
        return min(self.items, key=lambda item: self.last[item[0]], default=None)

    def taken(self) -> tuple[str, int] | None:
        item = self.first()
        if item is not None:
            self.items.remove(item)
            self.turn(item[0])
        return item

    @rule(owner=OWNERS)
    def put(self, owner: str) -> None:
        self.moments += 1
        item = (owner, self.moments)
        if owner not in self.last:
            self.turn(owner)
        self.items.append(item)
        self.real.put(owner, item)

    @rule()
    def next(self) -> None:
        assert self.real.next() == self.taken()

    @rule()
    def get(self) -> None:
        if self.items:
            assert self.real.get() == self.taken()

    @rule(owner=OWNERS)
    def took(self, owner: str) -> None:
        self.turn(owner)
        self.real.took(owner)

    @rule(at=st.integers(0, 8), owner=OWNERS)
    def remove(self, at: int, owner: str) -> None:
        if at < len(self.items):
            item = self.items.pop(at)
            assert self.real.remove(item[0], item) is True
            assert self.real.remove(item[0], item) is False
        assert self.real.remove(owner, (owner, -1)) is False

    @rule()
    def drain(self) -> None:
        assert sorted(self.real.drain()) == sorted(self.items)
        self.items = []

    @invariant()
    def the_order_is_told(self) -> None:
        """As if everything were taken and nothing came."""
        items, last, moments = list(self.items), dict(self.last), self.moments
        found = []
        while self.items:
            found.append(self.taken())
        self.items, self.last, self.moments = items, last, moments
        assert self.real.order() == found


TurnsModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTurnsModel = TurnsModel.TestCase


def test_items_of_one_owner_go_by_their_key() -> None:
    turns: FairQueue[int] = FairQueue(key=lambda item: item)
    for item in (3, 1, 2):
        turns.put("a", item)
    assert [turns.next() for _ in range(4)] == [1, 2, 3, None]
    for item in (2, 1):
        turns.put("a", item)
    assert [turns.next() for _ in range(2)] == [1, 2]
    plain: FairQueue[int] = FairQueue()
    for item in (3, 1, 2):
        plain.put("a", item)
    assert [plain.next() for _ in range(3)] == [3, 1, 2]


def test_so_many_owners_are_remembered(monkeypatch) -> None:
    """The one whose last turn was longest ago is forgotten: when it comes again it stands behind who waits."""
    monkeypatch.setattr(module, "REMEMBERED", 3)
    turns: FairQueue[str] = FairQueue()
    for owner in "abcd":  # the fourth is one too many
        turns.put(owner, owner)
        assert turns.next() == owner
    turns.put("b", "b1")
    turns.put("a", "a1")  # forgotten
    turns.put("d", "d1")
    assert turns.order() == ["b1", "d1", "a1"]
    assert len(turns._accounts) == 3
    turns = FairQueue()
    for owner in "abc":
        turns.put(owner, owner)
        turns.next()
    turns.took("a")  # so that its turn is the newest
    turns.took("d")  # one too many: b is forgotten
    for owner in "ba":
        turns.put(owner, owner)
    assert turns.order() == ["a", "b"]


def test_every_item_wakes_one_reader_and_the_end_wakes_all() -> None:
    turns: FairQueue[int] = FairQueue()
    found: list[int | None] = []
    done = threading.Semaphore(0)

    def read() -> None:
        while True:
            found.append(turns.get())
            done.release()
            if found[-1] is None:
                return

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for item in range(20):
        turns.put("a", item)
        assert done.acquire(timeout=WAIT_S)
    assert sorted(found) == list(range(20))
    turns.end(3)
    for reader in readers:
        reader.join(WAIT_S)
        assert not reader.is_alive()
    assert found[20:] == [None] * 3


def test_a_reader_sleeps_until_something_comes() -> None:
    turns: FairQueue[int] = FairQueue()
    looks = threading.Semaphore(0)

    class Counted:
        lock, count = threading.Lock(), 0

        def __enter__(self) -> None:
            self.lock.acquire()
            self.count += 1

        def __exit__(self, *error: object) -> None:
            self.lock.release()
            looks.release()

    counted = turns._lock = Counted()  # type: ignore[assignment]
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.append(turns.get()), daemon=True)
    reader.start()
    assert looks.acquire(timeout=WAIT_S)
    time.sleep(0.05)  # for whoever does not sleep
    turns.put("a", 1, 2)
    reader.join(WAIT_S)
    assert (found, counted.count) == ([1], 3)  # the reader's two looks, and the items
    assert turns._signals.qsize() == 1  # that of the second, for whoever sleeps for it


def test_what_waits_is_given_before_the_end() -> None:
    turns: FairQueue[int] = FairQueue()
    for item in (1, 2):
        turns.put("a", item)
    turns.end(1)
    assert [turns.get() for _ in range(3)] == [1, 2, None]


def test_an_item_whose_signal_was_lost_is_found() -> None:
    """A thread that was killed may have taken a signal and no item; nor is a signal left over from what was taken."""
    turns: FairQueue[int] = FairQueue()
    turns.put("a", 1)
    turns._signals.get_nowait()
    assert turns.get() == 1
    for item in (2, 3):
        turns.put("a", item)
        assert turns.get() == item
    assert turns._signals.empty()

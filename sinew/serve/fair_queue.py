"""A queue in which connections take turns, so that the one that asks most does not get most.

Whose last turn was longest ago comes first, whether it waited all the time since or has just come back: otherwise a
robot that asks again when it is answered would stand behind a flooder's backlog, which never leaves the line.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
# Owners whose last turn is known; who comes first, or again after so many, comes behind who waits
REMEMBERED = 1024


class FairQueue(Generic[T]):
    """First come first served among the items of one owner; between owners who had no turn for longest. Thread-safe.

    key: what came first, where items are put in by several threads that may overtake one another.
    """

    def __init__(self, key: Callable[[T], float] | None = None) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[T]] = {}
        self._turns: OrderedDict[int, int] = OrderedDict()  # an owner's hash -> its last turn, or its arrival
        self._clock = 0
        self._signals: SimpleQueue[None] = SimpleQueue()  # there is something to look at
        self._ended = False

    def put(self, owner: Hashable, *items: T) -> None:
        """Add items behind the others of their owner that came before them; nobody sees some of them alone."""
        with self._lock:
            if hash(owner) not in self._turns:
                self._turn(owner)
            line = self._lines.setdefault(owner, deque())
            line.extend(items)
            if self._key is not None and len(line) > 1:
                self._lines[owner] = deque(sorted(line, key=self._key))
        for _ in items:
            self._signals.put(None)

    def get(self) -> T | None:
        """Wait for an item whose owner's turn it is. None after ``end``: there are no more."""
        waited = False
        while True:
            with self._lock:  # looked at first: a thread that was killed may have taken a signal and no item
                if self._lines:
                    item = self._take()
                    break
                if self._ended:
                    return None
            self._signals.get()
            waited = True
        if not waited:  # its own signal, and never that of another item, for which another thread may wait
            with contextlib.suppress(Empty):
                self._signals.get_nowait()
        return item

    def next(self) -> T | None:
        """Return the item whose owner's turn it is, or None where nothing waits."""
        with self._lock:
            return self._take() if self._lines else None

    def remove(self, owner: Hashable, item: T) -> bool:
        """Take an item out; False if it is not there."""
        with self._lock:
            line = self._lines.get(owner)
            if line is None or item not in line:
                return False
            line.remove(item)
            if not line:
                del self._lines[owner]
            return True

    def order(self) -> list[T]:
        """Return what waits, in the order in which ``get`` gives it if nothing else comes."""
        with self._lock:
            lines = deque(deque(self._lines[owner]) for owner in sorted(self._lines, key=self._last))
        found = []
        while lines:
            line = lines.popleft()
            found.append(line.popleft())
            if line:
                lines.append(line)
        return found

    def took(self, owner: Hashable) -> None:
        """Note that an owner had a turn: one of its items was taken out of the line (``remove``)."""
        with self._lock:
            self._turn(owner)

    def drain(self) -> list[T]:
        """Take everything out."""
        with self._lock:
            found = [item for line in self._lines.values() for item in line]
            self._lines.clear()
            return found

    def end(self, readers: int) -> None:
        """Let ``get`` return None, on so many threads, as soon as nothing is left."""
        self._ended = True
        for _ in range(readers):
            self._signals.put(None)

    def _take(self) -> T:
        owner = min(self._lines, key=self._last)
        line = self._lines[owner]
        item = line.popleft()
        if not line:
            del self._lines[owner]
        self._turn(owner)
        return item

    def _last(self, owner: Hashable) -> int:
        return self._turns.get(hash(owner), 0)

    def _turn(self, owner: Hashable) -> None:
        self._clock += 1
        self._turns[hash(owner)] = self._clock
        self._turns.move_to_end(hash(owner))
        if len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)

"""A queue in which connections take turns, so that the one that asks most does not get most."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """First come first served among the items of one owner, round robin between owners. Thread-safe.

    key: what came first, where items are put in by several threads that may overtake one another.
    """

    def __init__(self, key: Callable[[T], float] | None = None) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._lines: OrderedDict[Hashable, deque[T]] = (
            OrderedDict()
        )  # the owner whose turn it is stands first
        self._signals: SimpleQueue[None] = SimpleQueue()  # there is something to look at
        self._ended = False

    def put(self, owner: Hashable, item: T) -> None:
        """Add an item behind the others of its owner that came before it."""
        with self._lock:
            line = self._lines.setdefault(owner, deque())
            line.append(item)
            if self._key is not None and len(line) > 1:
                self._lines[owner] = deque(sorted(line, key=self._key))
        self._signals.put(None)

    def get(self) -> T | None:
        """Wait for an item whose owner's turn it is. None after ``end``: there are no more."""
        while True:
            with self._lock:  # looked at first: a thread that was killed may have taken a signal and no item
                if self._lines:
                    item = self._take()
                    break
                if self._ended:
                    return None
            self._signals.get()
        with contextlib.suppress(Empty):
            self._signals.get_nowait()
        return item

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
            lines = deque(deque(line) for line in self._lines.values())
        found = []
        while lines:
            line = lines.popleft()
            found.append(line.popleft())
            if line:
                lines.append(line)
        return found

    def took(self, owner: Hashable) -> None:
        """Put an owner behind the others: one of its items was taken out of turn (``remove``)."""
        with self._lock:
            if owner in self._lines:
                self._lines.move_to_end(owner)

    def drain(self) -> list[T]:
        """Take everything out."""
        with self._lock:
            found = [item for line in self._lines.values() for item in line]
            self._lines.clear()
            return found

    def end(self, readers: int = 1) -> None:
        """Let ``get`` return None, on so many threads, as soon as nothing is left."""
        self._ended = True
        for _ in range(readers):
            self._signals.put(None)

    def _take(self) -> T:
        owner, line = next(iter(self._lines.items()))
        item = line.popleft()
        if line:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
        return item

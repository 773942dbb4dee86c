"""A queue that serves connections by cost, so that a busy client cannot starve the others.

Each owner has a virtual time: the seconds of computing that its requests have cost. The owner with the least comes
first (start-time fair queueing, Goyal, Vin and Cheng 1996). Between equal owners the one comes first whose last turn
was longest ago. An owner that had nothing to compute has saved nothing: when it returns, its virtual time is at least
that of the owner that was served last. A new owner comes behind those that wait. All new owners together have the share
of one until their second request, so that a new connection for each request brings nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 1024  # owners whose account is kept; an owner that is forgotten returns as a new one
ACTIVE_S = 5.0  # seconds after its last request for which an owner counts as active


@dataclass(slots=True)
class _Account:
    """used: virtual time, in seconds. turn: number of the owner's last turn, or of its arrival. seen: when its last
    item came. served: whether it had a turn. new: whether its turn is the first."""

    used: float
    turn: int
    seen: float
    served: bool = False
    new: bool = True


class FairQueue(Generic[T]):
    """First come first served among the items of one owner; owners take turns by what they have cost. Thread-safe.

    Without ``charge`` every turn is free, and owners take turns one by one.

    Args:
        key: the order of items of one owner, where several threads put them in and may overtake one another.
        clock: seconds, by which owners are active.
    """

    def __init__(
        self, key: Callable[[T], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key, self._clock = key, clock
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[T]] = {}
        self._accounts: OrderedDict[int, _Account] = OrderedDict()  # hash of an owner -> its account
        self._served = 0.0  # the virtual time at which the newest turn began
        self._new = 0.0  # the virtual time of new owners together
        self._turns = 0
        self._signals: SimpleQueue[None] = SimpleQueue()  # there is something to look at
        self._ended = False

    def put(self, owner: Hashable, *items: T) -> None:
        """Append items to their owner's line, all at once for other threads."""
        with self._lock:
            account = self._account(owner)
            account.seen = self._clock()
            if owner not in self._lines:
                account.used = max(account.used, self._served)
                account.new = not account.served
            line = self._lines.setdefault(owner, deque())
            line.extend(items)
            if self._key is not None and len(line) > 1:
                self._lines[owner] = deque(sorted(line, key=self._key))
        for _ in items:
            self._signals.put(None)

    def get(self, timeout: float | None = None) -> T | None:
        """Wait for an item whose owner's turn it is. None after ``end``: there are no more. Raises TimeoutError if none
        comes within ``timeout`` seconds."""
        waited = False
        while True:
            with self._lock:  # looked at first: a thread that was killed may have taken a signal and no item
                if self._lines:
                    item = self._take(self._first())
                    break
                if self._ended:
                    return None
            try:
                self._signals.get(timeout=timeout)
            except Empty:
                raise TimeoutError from None
            waited = True
        if not waited:  # its own signal, and never that of another item, for which another thread may wait
            with contextlib.suppress(Empty):
                self._signals.get_nowait()
        return item

    def next(self) -> T | None:
        """Return the item whose owner's turn it is, or None where nothing waits."""
        with self._lock:
            return self._take(self._first()) if self._lines else None

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

    @property
    def waits(self) -> bool:
        """Return True if anything waits."""
        return bool(self._lines)

    def next_behind(self, owners: Collection[Hashable], light: Callable[[T], bool]) -> T | None:
        """Take the item whose turn it is, of another owner that has used less than each of ``owners``.

        Args:
            owners: whose turn is under way.
            light: whether an item may come between.

        Returns:
            The item, or None where no such item waits.
        """
        with self._lock:
            used = min(self._account(owner).used for owner in owners)
            for other in sorted(self._lines, key=self._place):
                if other in owners:
                    continue
                if self._account(other).used >= used:
                    return None
                if light(self._lines[other][0]):
                    return self._take(other)
        return None

    def order(self) -> list[T]:
        """Return the waiting items in the order of ``get``, if no other item arrives and no turn costs more."""
        with self._lock:
            owners = sorted(self._lines, key=self._place)
            lines = deque((self._account(owner).used, deque(self._lines[owner])) for owner in owners)
        found = []
        while lines:
            used, line = lines.popleft()
            found.append(line.popleft())
            if line:  # behind the owners that have used as much
                lines.insert(sum(other <= used for other, _ in lines), (used, line))
        return found

    def took(self, owner: Hashable) -> None:
        """Note that an owner had a turn: one of its items was taken out of the line (``remove``)."""
        with self._lock:
            self._turn(owner)

    def charge(self, owner: Hashable, seconds: float) -> None:
        """Add to what an owner has used; less than 0 gives back."""
        with self._lock:
            account = self._account(owner)
            account.used += seconds
            if account.new:
                self._new += seconds

    def alone(self, owner: Hashable) -> bool:
        """Return True where no other owner waits or has put an item in for ``ACTIVE_S``."""
        since = self._clock() - ACTIVE_S
        with self._lock:
            mine = hash(owner)
            return not any(each != owner for each in self._lines) and not any(
                account.seen > since for each, account in self._accounts.items() if each != mine
            )

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

    def _take(self, owner: Hashable) -> T:
        line = self._lines[owner]
        item = line.popleft()
        if not line:
            del self._lines[owner]
        self._turn(owner)
        return item

    def _first(self) -> Hashable:
        """Return the owner whose turn it is, of those that wait."""
        return min(self._lines, key=self._place)

    def _place(self, owner: Hashable) -> tuple[float, int]:
        account = self._account(owner)
        return account.used, account.turn

    def _account(self, owner: Hashable) -> _Account:
        """Return an owner's account; a new one is behind all that wait."""
        account = self._accounts.get(hash(owner))
        if account is None:
            waiting = [known.used for each in self._lines if (known := self._accounts.get(hash(each)))]
            self._turns += 1
            self._new = max(self._new, self._served)
            account = _Account(max([self._new, *waiting]), self._turns, self._clock())
            self._accounts[hash(owner)] = account
            if len(self._accounts) > REMEMBERED:
                kept = {hash(owner), *map(hash, self._lines)}
                for each in self._accounts:
                    if each not in kept:
                        del self._accounts[each]
                        break
        return account

    def _turn(self, owner: Hashable) -> None:
        account = self._account(owner)
        self._turns += 1
        account.turn, account.served = self._turns, True
        self._served = max(self._served, account.used)
        self._accounts.move_to_end(hash(owner))

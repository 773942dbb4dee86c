"""A queue that serves connections by cost, so that a busy client cannot starve the others.

Each item of the queue belongs to an owner, such as a connection. Each owner has a virtual time: the seconds of
computing that its requests have cost. The owner with the smallest virtual time is served first (start-time fair
queueing, Goyal, Vin and Cheng 1996). Between equal owners, the owner whose last turn was longest ago is served first.
An idle owner does not save up time: when it returns, its virtual time is at least the virtual time of the owner that
was served last. A new owner is served after the waiting owners. Until their second request, all new owners together
have the share of one owner. So a client gains nothing from a new connection for each request.
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
REMEMBERED = 1024  # largest number of stored accounts; an owner without an account counts as new
ACTIVE_S = 5.0  # seconds after its last request during which an owner counts as active


@dataclass(slots=True)
class _Account:
    """The account of an owner: how much computing time it has used.

    Attributes:
        used: Virtual time in seconds.
        turn: Number of the owner's last turn, or of its arrival.
        seen: Time of its last item.
        served: True if it had a turn.
        new: True until its second request.
    """

    used: float
    turn: int
    seen: float
    served: bool = False
    new: bool = True


class FairQueue(Generic[T]):
    """A queue of items that belong to owners. The owner that has used the least computing time is served first, and the
    items of one owner are served in order. Thread-safe.

    Without calls of ``charge``, turns cost nothing, and owners take turns one by one.

    Args:
        key: Sort key for the items of one owner, if several threads add items and may overtake each other. None keeps
            the order of arrival.
        clock: Returns the time in seconds, to decide which owners are active.
    """

    def __init__(
        self, key: Callable[[T], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key, self._clock = key, clock
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[T]] = {}
        self._accounts: OrderedDict[int, _Account] = OrderedDict()  # hash of an owner -> its account
        self._served = 0.0  # virtual time at which the newest turn began
        self._new = 0.0  # common virtual time of all new owners
        self._turns = 0
        self._signals: SimpleQueue[None] = SimpleQueue()  # one signal per item, and one per reader at the end
        self._ended = False

    def put(self, owner: Hashable, *items: T) -> None:
        """Append items to the line of their owner. Other threads see either none or all of the items."""
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
        """Wait for the item whose turn it is. Return None after ``end``, when no items are left.

        Raises:
            TimeoutError: No item arrived within ``timeout`` seconds.
        """
        waited = False
        while True:
            # Check the lines before the signals, because a killed thread may have taken a signal without its item.
            with self._lock:
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
        # The item was taken without its signal, so remove one signal. After a wait the signal is already
        # removed, and another signal may belong to an item for which another thread waits.
        if not waited:
            with contextlib.suppress(Empty):
                self._signals.get_nowait()
        return item

    def next(self) -> T | None:
        """Take the item whose turn it is out of the queue, without waiting; None if the queue is empty."""
        with self._lock:
            return self._take(self._first()) if self._lines else None

    def remove(self, owner: Hashable, item: T) -> bool:
        """Remove an item. Return False if it is not in the queue."""
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
        """True if an item waits."""
        return bool(self._lines)

    def next_behind(self, owners: Collection[Hashable], light: Callable[[T], bool]) -> T | None:
        """Take the next item of an owner that has used less computing time than each of ``owners``.

        Args:
            owners: Owners whose turn is in progress.
            light: Returns True if an item is cheap enough to interrupt this turn.

        Returns:
            The item, or None if no such item waits.
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
        """Return the waiting items in the order in which ``get`` would return them, if no other item arrives and
        turns cost nothing.
        """
        with self._lock:
            owners = sorted(self._lines, key=self._place)
            lines = deque((self._account(owner).used, deque(self._lines[owner])) for owner in owners)
        items = []
        while lines:
            used, line = lines.popleft()
            items.append(line.popleft())
            # Insert the owner after all owners that have used the same time or less.
            if line:
                lines.insert(sum(other <= used for other, _ in lines), (used, line))
        return items

    def took(self, owner: Hashable) -> None:
        """Record that an owner had a turn, after one of its items was taken out of the queue with ``remove``."""
        with self._lock:
            self._turn(owner)

    def charge(self, owner: Hashable, seconds: float) -> None:
        """Add seconds to an owner's virtual time, because its request has used this time. A negative number gives time
        back.
        """
        with self._lock:
            account = self._account(owner)
            account.used += seconds
            if account.new:
                self._new += seconds

    def alone(self, owner: Hashable) -> bool:
        """Return True if no other owner waits or has added an item in the last ``ACTIVE_S`` seconds."""
        since = self._clock() - ACTIVE_S
        with self._lock:
            mine = hash(owner)
            return not any(each != owner for each in self._lines) and not any(
                account.seen > since for each, account in self._accounts.items() if each != mine
            )

    def drain(self) -> list[T]:
        """Remove all items from the queue, and return them."""
        with self._lock:
            items = [item for line in self._lines.values() for item in line]
            self._lines.clear()
            return items

    def end(self, readers: int) -> None:
        """End the queue: when no items are left, ``get`` returns None on each of ``readers`` threads."""
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
        """Return the owner that is served next, among the owners with a waiting item."""
        return min(self._lines, key=self._place)

    def _place(self, owner: Hashable) -> tuple[float, int]:
        account = self._account(owner)
        return account.used, account.turn

    def _account(self, owner: Hashable) -> _Account:
        """Return an owner's account. A new account is served after all waiting owners."""
        account = self._accounts.get(hash(owner))
        if account is None:
            waiting = [
                account_of.used for each in self._lines if (account_of := self._accounts.get(hash(each)))
            ]
            self._turns += 1
            self._new = max(self._new, self._served)
            account = _Account(max([self._new, *waiting]), self._turns, self._clock())
            self._accounts[hash(owner)] = account
            if len(self._accounts) > REMEMBERED:
                protected = {hash(owner), *map(hash, self._lines)}
                for each in self._accounts:
                    if each not in protected:
                        del self._accounts[each]
                        break
        return account

    def _turn(self, owner: Hashable) -> None:
        account = self._account(owner)
        self._turns += 1
        account.turn, account.served = self._turns, True
        self._served = max(self._served, account.used)
        self._accounts.move_to_end(hash(owner))

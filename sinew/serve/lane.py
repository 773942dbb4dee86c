"""One place for computing, shared by the schedulers of several policies: they take turns, one inference at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Waiting = Callable[[], Sequence[Any]]  # the jobs of a scheduler that are ready, in the order of their turns


class Lane:
    """Lets threads in one at a time, in the order in which they asked. A context manager; not reentrant.

    A scheduler asks once for each inference, so that policies take turns, as connections do inside each of them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # who is inside stands first
        self._members: dict[object, Waiting] = {}

    def __enter__(self) -> None:
        place = object()
        with self._changed:
            self._line.append(place)
            try:
                while self._line[0] is not place:
                    self._changed.wait()
            except BaseException:  # the thread is ended from outside: the others go on
                self._line.remove(place)
                self._changed.notify_all()
                raise

    def __exit__(self, *_exc_info: object) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()

    def join(self, member: object, waiting: Waiting) -> None:
        """Let the others know what waits at ``member``."""
        with self._changed:
            self._members[member] = waiting

    def leave(self, member: object) -> None:
        """Forget ``member``, which computes no more."""
        with self._changed:
            self._members.pop(member, None)

    def beside(self, member: object) -> list[Any]:
        """Return the first ready job of each other member: what waits for this member's inference to end."""
        with self._changed:
            others = [waiting for each, waiting in self._members.items() if each is not member]
        return [jobs[0] for waiting in others if (jobs := waiting())]

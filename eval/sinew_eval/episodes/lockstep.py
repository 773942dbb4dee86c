"""Several episodes at once against one policy: what they ask at the same moment is one batch.

Each episode runs as it does alone, in a thread of its own that goes on until it needs something that all share: the
policy, the next episode, and in a vectorised environment its step and its reset. When every episode waits, the thread
that plays them answers one kind of request, of all that wait for it at once. So what is in a batch depends on the
episodes and on nobody's clock. An answer in a batch rounds differently from the same answer alone, so commands repeat
to the bit only in the same batches, and an episode that hangs by a rounding may end differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sinew_eval.episodes.policies import EpisodePolicy, EvalPolicy
from sinew_eval.episodes.runner import Episode, EpisodeSettings, peak_of, run_episode

if TYPE_CHECKING:
    import gymnasium

    from sinew_eval.episodes.adapters import EnvAdapter

# Kinds of requests. When several kinds wait, they are answered in this order.
NEXT, RESET, INFER, STEP = ORDER = ("next", "reset", "infer", "step")

# Maps the requests of one kind (seat -> request, seats in ascending order) to an answer or an error for each seat.
Answer = Callable[[Mapping[int, Any]], Mapping[int, Any]]


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Where one of the episodes is played: an environment of its own, or a part of a vectorised one."""

    env: gymnasium.Env
    adapter: EnvAdapter


class Shared(Protocol):
    """A vectorised environment, whose parts are reset and stepped at once. together: only all of them can be reset."""

    together: bool

    def attend(self, ask: Callable[[int, str, Any], Any]) -> None:
        """Take what its parts ask with."""

    def reset(self, asked: Mapping[int, Any]) -> Mapping[int, Any]: ...

    def step(self, asked: Mapping[int, Any]) -> Mapping[int, Any]: ...


class _Ended(BaseException):
    """Ends the thread of an episode whose run has failed elsewhere; no environment takes it for an error of its own."""


class Meeting:
    """Where the threads of all seats wait until each of them does.

    answers: kind of a request (of :data:`ORDER`) -> what answers all that wait for it. together: kinds that are
    answered only when all seats ask for just that.
    """

    def __init__(self, seats: int):
        self.answers: dict[str, Answer] = {}
        self.together: set[str] = set()
        self._alive = set(range(seats))
        self._asked: dict[int, tuple[str, Any]] = {}
        self._told: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def ask(self, seat: int, kind: str, what: Any) -> Any:
        """Wait for the answer to a request. Raises it where it is an error."""
        with self._changed:
            self._asked[seat] = (kind, what)
            self._changed.notify_all()
            while seat not in self._told and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise _Ended
            told = self._told.pop(seat)
        if isinstance(told, Exception):
            raise told
        return told

    def run(self, play: Callable[[int], None]) -> None:
        """Run ``play`` for every seat to its end. Raises the first error of any."""
        threads = [
            threading.Thread(target=self._sit, args=(play, seat), name=f"sinew-episode-{seat}", daemon=True)
            for seat in sorted(self._alive)
        ]
        for thread in threads:
            thread.start()
        try:
            while self._answer():
                pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            raise
        finally:
            for thread in threads:
                thread.join()

    def _sit(self, play: Callable[[int], None], seat: int) -> None:
        try:
            play(seat)
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by run
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._alive.discard(seat)
                self._changed.notify_all()

    def _answer(self) -> bool:
        """Wait until all wait, and answer one kind of request; False when nobody is left."""
        with self._changed:
            while self._error is None and not self._alive <= self._asked.keys():
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if not self._alive:
                return False
            kind, asked = self._due()
            for seat in asked:
                del self._asked[seat]
        told = self.answers[kind](asked)
        with self._changed:
            self._told.update(told)
            self._changed.notify_all()
        return True

    def _due(self) -> tuple[str, dict[int, Any]]:
        """Return the kind that is served now and the requests of that kind."""
        for kind in ORDER:
            asked = {seat: what for seat, (name, what) in sorted(self._asked.items()) if name == kind}
            if asked and (len(asked) == len(self._asked) or kind not in self.together):
                return kind, asked
        raise AssertionError(f"nobody answers {self._asked}")


class _Asking:
    """The policy, as one seat asks it."""

    def __init__(self, policy: EvalPolicy, meeting: Meeting, seat: int):
        self._policy, self._meeting, self._seat = policy, meeting, seat
        self.chunk_size, self.committed_rows = policy.chunk_size, policy.committed_rows
        self.motion, self.served = policy.motion, policy.served

    def start(self, env: gymnasium.Env) -> None:
        """Do nothing: the policy is told when the seats' next episodes are given out."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return self._meeting.ask(self._seat, INFER, (observation, seed))

    def close(self) -> None:
        """Do nothing: it belongs to all seats."""


def play_together(
    seats: Sequence[WorkerSlot],
    policy: EpisodePolicy,
    conduct: EpisodeSettings,
    seeds: Sequence[int],
    shared: Shared | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play an episode for each of ``seeds``, as many at once as there are seats; return them in that order.

    A seat whose episode is over takes the next seed at once. shared: the vectorised environment that the seats are
    parts of. on_episode: called for each that is over. Raises what an episode raises.
    """
    seats = seats[: len(seeds)]
    meeting, found = Meeting(len(seats)), dict[int, Episode]()
    left = iter(seeds)

    def next_seeds(asked: Mapping[int, Any]) -> dict[int, int | None]:
        for episode in asked.values():
            if episode is not None:
                found[episode.seed] = episode
                if on_episode is not None:
                    on_episode(episode)
        given = {seat: next(left, None) for seat in asked}
        for seat, seed in given.items():
            if seed is not None:
                policy.begin(_session(seat))
        return given

    def play(seat: int) -> None:
        env, adapter = seats[seat].env, seats[seat].adapter
        asking, episode = _Asking(policy, meeting, seat), None
        while (seed := meeting.ask(seat, NEXT, episode)) is not None:
            played = run_episode(env, adapter, asking, conduct, seed)
            episode = replace(played, peak_bytes=peak_of(policy))

    def infer(asked: Mapping[int, Any]) -> dict[int, Any]:
        requests = [(observation, seed, _session(seat)) for seat, (observation, seed) in asked.items()]
        return dict(zip(asked, policy.infer_all(requests), strict=True))

    meeting.answers = {NEXT: next_seeds, INFER: infer}
    if shared is not None:
        meeting.answers |= {RESET: shared.reset, STEP: shared.step}
        meeting.together = {RESET} if shared.together else set()
        shared.attend(meeting.ask)
    meeting.run(play)
    return [found[seed] for seed in seeds]


def _session(seat: int) -> str:
    return f"seat-{seat}"

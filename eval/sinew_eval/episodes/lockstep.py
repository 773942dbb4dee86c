"""Play several episodes at once against one policy, and answer their simultaneous requests in one batch.

Each episode runs in its own thread, called a seat, until it needs something that all episodes share: the policy, the
next seed, or the step and reset of a vectorised environment. When every seat waits, one thread answers all waiting
requests of one kind. Therefore the content of a batch depends only on the episodes, and not on timing.

An answer in a batch rounds differently from the same answer alone. Commands repeat bit for bit only with equal
batches, and a rounding difference can change the outcome of an episode.
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

# Function that answers all requests of one kind. Its argument maps each seat (the number of an episode that
# plays now) to its request, in ascending order. Its result maps each seat to an answer or an error.
Answer = Callable[[Mapping[int, Any]], Mapping[int, Any]]


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One of the places at which an episode is played: an environment with its adapter.

    Attributes:
        env: An environment, or a part of a vectorised environment.
        adapter: The adapter of the environment.
    """

    env: gymnasium.Env
    adapter: EnvAdapter


class Shared(Protocol):
    """Interface of a vectorised environment, whose parts are reset and stepped at the same time.

    Attributes:
        together: True if the parts cannot be reset one by one, but only all at the same time.
    """

    together: bool

    def attend(self, ask: Callable[[int, str, Any], Any]) -> None:
        """Set the function with which the parts of the environment send their requests.

        Args:
            ask: Function of the part's number, the kind of the request, and its data.
        """

    def reset(self, requests: Mapping[int, Any]) -> Mapping[int, Any]: ...

    def step(self, requests: Mapping[int, Any]) -> Mapping[int, Any]: ...


class _Ended(BaseException):
    """Raised in the thread of an episode to end it, after another episode has failed. It is not a subclass of
    Exception, so that environments do not catch it.
    """


class Meeting:
    """Collects the requests of all seats (the threads of the episodes) and answers them when every seat waits.

    Attributes:
        answers: For each kind of request (:data:`ORDER`), the function that answers all waiting requests of this kind.
        together: Kinds that are answered only when every seat waits with a request of this kind.
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
        """Send a request of an episode's thread and wait for its answer.

        Args:
            seat: Number of the thread.
            kind: Kind of the request.
            what: Data of the request.

        Returns:
            The answer.

        Raises:
            Exception: The answer is an error.
        """
        with self._changed:
            self._asked[seat] = (kind, what)
            self._changed.notify_all()
            while seat not in self._told and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise _Ended
            answer = self._told.pop(seat)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, play: Callable[[int], None]) -> None:
        """Run ``play`` in one thread per episode until all threads have ended. Raises the first error of any thread."""
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
        except BaseException as error:  # noqa: BLE001 - run() raises it again
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._alive.discard(seat)
                self._changed.notify_all()

    def _answer(self) -> bool:
        """Wait until every episode's thread waits, and answer all requests of one kind. Returns False when all
        threads have ended.
        """
        with self._changed:
            while self._error is None and not self._alive <= self._asked.keys():
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if not self._alive:
                return False
            kind, requests = self._due()
            for seat in requests:
                del self._asked[seat]
        answers = self.answers[kind](requests)
        with self._changed:
            self._told.update(answers)
            self._changed.notify_all()
        return True

    def _due(self) -> tuple[str, dict[int, Any]]:
        """Return the kind of request that is answered next, and all waiting requests of this kind."""
        for kind in ORDER:
            requests = {seat: what for seat, (name, what) in sorted(self._asked.items()) if name == kind}
            if requests and (len(requests) == len(self._asked) or kind not in self.together):
                return kind, requests
        raise AssertionError(f"no kind of request can be answered: {self._asked}")


class _Asking:
    """Policy for the thread of one episode. It sends its requests to the meeting, which answers them in batches."""

    def __init__(self, policy: EvalPolicy, meeting: Meeting, seat: int):
        self._policy, self._meeting, self._seat = policy, meeting, seat
        self.chunk_size, self.committed_rows = policy.chunk_size, policy.committed_rows
        self.motion, self.served = policy.motion, policy.served

    def start(self, env: gymnasium.Env) -> None:
        """Do nothing. The policy is reset when the episode's thread gets its next seed."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return self._meeting.ask(self._seat, INFER, (observation, seed))

    def close(self) -> None:
        """Do nothing, because the threads of all episodes share the policy."""


def play_together(
    seats: Sequence[WorkerSlot],
    policy: EpisodePolicy,
    conduct: EpisodeSettings,
    seeds: Sequence[int],
    shared: Shared | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play an episode for each seed, with as many episodes at once as there are seats. A free seat takes the next
    seed.

    Args:
        seats: Environments with their adapters.
        policy: The policy.
        conduct: Settings of the episodes.
        seeds: Seeds of the episodes.
        shared: Vectorised environment that contains the seats. None if the seats are separate environments.
        on_episode: Called for each finished episode.

    Returns:
        The episodes, in the order of ``seeds``.

    Raises:
        SinewError: An episode failed.
    """
    seats = seats[: len(seeds)]
    meeting, episodes = Meeting(len(seats)), dict[int, Episode]()
    left = iter(seeds)

    def next_seeds(by_seat: Mapping[int, Any]) -> dict[int, int | None]:
        for episode in by_seat.values():
            if episode is not None:
                episodes[episode.seed] = episode
                if on_episode is not None:
                    on_episode(episode)
        next_by_seat = {seat: next(left, None) for seat in by_seat}
        for seat, seed in next_by_seat.items():
            if seed is not None:
                policy.begin(_session(seat))
        return next_by_seat

    def play(seat: int) -> None:
        env, adapter = seats[seat].env, seats[seat].adapter
        asking, episode = _Asking(policy, meeting, seat), None
        while (seed := meeting.ask(seat, NEXT, episode)) is not None:
            played = run_episode(env, adapter, asking, conduct, seed)
            episode = replace(played, peak_bytes=peak_of(policy))

    def infer(by_seat: Mapping[int, Any]) -> dict[int, Any]:
        requests = [(observation, seed, _session(seat)) for seat, (observation, seed) in by_seat.items()]
        return dict(zip(by_seat, policy.infer_all(requests), strict=True))

    meeting.answers = {NEXT: next_seeds, INFER: infer}
    if shared is not None:
        meeting.answers |= {RESET: shared.reset, STEP: shared.step}
        meeting.together = {RESET} if shared.together else set()
        shared.attend(meeting.ask)
    meeting.run(play)
    return [episodes[seed] for seed in seeds]


def _session(seat: int) -> str:
    return f"seat-{seat}"

"""Many episodes: in parallel processes, resumable, with one JSON line per finished episode."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sinew.core import SinewError
from sinew.engine.backend import BACKENDS
from sinew.eval.adapters import make_env
from sinew.eval.policies import (
    EXPERT,
    EpisodePolicy,
    EvalPolicy,
    InProcess,
    ServerPolicy,
    identity,
    open_policy,
)
from sinew.eval.runner import Conduct, Episode, run_episode, run_stream_episode
from sinew.eval.settings import Task, Variant
from sinew.eval.sources import StreamCosts

LOG = "episodes.jsonl"
OnEpisode = Callable[[Variant, Episode], None]


class Elsewhere(Protocol):
    """Plays episodes in another interpreter."""

    def play(
        self, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], workers: int
    ) -> Iterator[tuple[int, Episode]]:
        """todo: index of a variant, seed. Yields the index and its episode, in any order."""


def key(task: Task, variant: Variant) -> str:
    """Everything that determines an episode except its seed: what has been played under the same key need not
    be played again. The file name of a bundle does not count, its bytes do."""
    what = {**task.to_dict(), **variant.to_dict(), "target": identity(variant.target)["id"]}
    if variant.edge_adapter:
        what["edge_adapter"] = identity(variant.edge_adapter)["id"]
    return json.dumps(what, sort_keys=True)


def run(
    task: Task,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    *,
    workers: int = 1,
    out: Path | None = None,
    on_episode: OnEpisode | None = None,
    elsewhere: Elsewhere | None = None,
    player: Callable[[Task], EpisodePlayer] | None = None,
) -> list[list[Episode]]:
    """Episodes of every variant, in the order of ``seeds``.

    out: a folder; finished episodes are appended to its ``episodes.jsonl`` and are not played again.
    workers: 1 plays in this process, more start that many, each with one compute thread.
    on_episode: called for each episode, also for those found in the log.
    elsewhere: plays instead of this interpreter. player: makes what plays in this process, with one worker.

    Raises what an episode raises; what was finished before is in the log.
    """
    keys = [key(task, variant) for variant in variants]
    done: dict[tuple[str, int], Episode] = {}
    log = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        log = out / LOG
        done = read_log(log)
    todo = []
    for index, variant in enumerate(variants):
        for seed in seeds:
            if (episode := done.get((keys[index], seed))) is None:
                todo.append((index, seed))
            elif on_episode is not None:
                on_episode(variant, episode)
    file = None if log is None else _open_log(log)
    try:
        if elsewhere is None or not todo:
            play: Callable[..., Iterator[tuple[int, Episode]]] = partial(_play, make=player or EpisodePlayer)
        else:
            play = elsewhere.play
        for index, episode in play(task, variants, todo, workers):
            done[keys[index], episode.seed] = episode
            if file is not None:
                file.write(json.dumps({"key": keys[index], **episode.to_dict()}) + "\n")
                file.flush()
            if on_episode is not None:
                on_episode(variants[index], episode)
    finally:
        if file is not None:
            file.close()
    return [[done[k, seed] for seed in seeds] for k in keys]


def read_log(log: Path) -> dict[tuple[str, int], Episode]:
    """(key, seed) -> episode. A line that a kill cut short is left out, and its episode played again."""
    found = {}
    for line in log.read_text().splitlines() if log.is_file() else []:
        try:
            values = json.loads(line)
            key = values.pop("key")
            found[key, values["seed"]] = Episode(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def _open_log(log: Path) -> Any:
    """Opened for appending, with the last line ended."""
    cut_short = log.is_file() and not log.read_bytes().endswith(b"\n") and log.stat().st_size > 0
    file = log.open("a")
    if cut_short:
        file.write("\n")
    return file


# ----------------------------------------------------------------------------- workers


class EpisodePlayer:
    """Plays episodes of one task; keeps the environment and the last policy."""

    def __init__(self, task: Task):
        self.task = task
        self.env, self.adapter = make_env(task.env, task.adapter, task.env_options)
        self._policy: Any = None
        self._opened: tuple[Any, ...] = ()

    def play(self, variant: Variant, seed: int) -> Episode:
        what = (variant.target, variant.device, variant.dtype, variant.solver_steps, variant.engine)
        if what != self._opened:
            self.close_policy()
            self._policy, self._opened = self._open(variant), what
        conduct = Conduct(
            variant.replan,
            variant.latency,
            variant.handover,
            self.task.reset_options,
            self.task.noise,
            self.task.realtime,
            self.task.motion,
            self.task.future,
            variant.edge_adapter,
        )
        if variant.stream:
            if not isinstance(self._policy, InProcess):
                raise SinewError(
                    "stream: expected a bundle; a server streams by its own clock (`sinew stream`)"
                )
            costs = StreamCosts.parse(variant.stream)
            return run_stream_episode(self.env, self.adapter, self._policy.policy, conduct, seed, costs)
        return run_episode(self.env, self.adapter, self._policy, conduct, seed)

    def _open(self, variant: Variant) -> EvalPolicy:
        if variant.target == EXPERT and hasattr(self.env.unwrapped, "expert"):
            return EpisodePolicy(self.env.unwrapped.expert())
        policy = open_policy(variant, self.task.env)
        if isinstance(policy, (InProcess, ServerPolicy)) and hasattr(self.adapter, "fit"):
            self.adapter.fit(policy.served)
        return policy

    def close_policy(self) -> None:
        if self._policy is not None:
            self._policy.close()
        self._policy, self._opened = None, ()

    def close(self) -> None:
        self.close_policy()
        self.env.close()


def _play(
    task: Task,
    variants: Sequence[Variant],
    todo: Sequence[tuple[int, int]],
    workers: int,
    make: Callable[[Task], EpisodePlayer],
) -> Iterator[tuple[int, Episode]]:
    if not todo:
        return
    env, _ = make_env(task.env, task.adapter, task.env_options)
    env.close()  # what is wrong with it is said once, and here
    if workers == 1:
        player = make(task)
        try:
            with one_thread(variants):
                for index, seed in todo:
                    yield index, player.play(variants[index], seed)
        finally:
            player.close()
        return
    # spawn: torch and mujoco keep threads, which do not survive a fork
    with ProcessPoolExecutor(
        min(workers, len(todo)), multiprocessing.get_context("spawn"), _start_worker, (task,)
    ) as pool:
        try:
            jobs = iter(todo)
            pending: dict[Future[Episode], int] = {}
            for index, seed in _take(jobs, 2 * workers):
                pending[pool.submit(_work, variants[index], seed)] = index
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    index = pending.pop(future)
                    yield index, future.result()
                    for following, seed in _take(jobs, 1):
                        pending[pool.submit(_work, variants[following], seed)] = following
        except BrokenProcessPool as error:
            raise SinewError("a worker process died; finished episodes are kept with --out") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _take(jobs: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    for _, job in zip(range(count), jobs, strict=False):
        yield job


class one_thread:  # noqa: N801 - used as a context
    """One compute thread inside: as in workers, so that the same episode gives the same bits."""

    def __init__(self, variants: Sequence[Variant]):
        # A run that computes elsewhere, or without torch, should not import it for this.
        self.needed = any(
            "://" not in variant.target
            and variant.target != "expert"
            and (variant.engine is None or BACKENDS[variant.engine].needs_torch)
            and not Path(variant.target).is_dir()
            for variant in variants
        )

    def __enter__(self) -> None:
        if self.needed:
            import torch

            self.before = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, *exc_info: object) -> None:
        if self.needed:
            import torch

            torch.set_num_threads(self.before)


_worker: EpisodePlayer | None = None


def _start_worker(task: Task) -> None:
    global _worker  # noqa: PLW0603 - what an initializer of a process pool is for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers; Ctrl-C reaches them too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # torch is not imported yet
    _worker = EpisodePlayer(task)


def _end_with_parent() -> None:
    """A killed parent closes nothing; without this its workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(variant: Variant, seed: int) -> Episode:
    assert _worker is not None
    try:
        with one_thread([variant]):
            return _worker.play(variant, seed)
    except SinewError as error:
        raise SinewError(str(error)) from None  # subclasses with more arguments do not survive pickling

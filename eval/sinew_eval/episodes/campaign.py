"""Play many episodes in parallel processes, and continue after an interruption. The log has one JSON line per
episode.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from sinew.core import SinewError, scratch
from sinew_client.untrusted import open_regular, parse_json

from sinew_eval.episodes import episode_log
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.player import EpisodePlayer, groups, key, one_thread
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.episodes.watched import WatchedMoment

LOG = "episodes.jsonl"
# The module that plays episodes in several processes and on several hosts. This module imports it by name, on use.
FARM = "sinew_eval.farm.shards"
OnEpisode = Callable[[Variant, Episode], None]


class RemotePlayer(Protocol):
    """Interface of a player that plays episodes in another Python interpreter."""

    def play(
        self, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], workers: int
    ) -> Iterator[tuple[int, Episode]]:
        """Play episodes.

        Args:
            task: The task.
            variants: The variants.
            todo: Pairs of the index of a variant and a seed.
            workers: Number of episodes that are played at the same time.

        Yields:
            The index of the variant and its episode, in any order.
        """

    def watch(
        self, task: Task, variants: Sequence[Variant], todo: Sequence[tuple[int, int]], fps: float = 0.0
    ) -> Iterator[tuple[int, Episode, list[WatchedMoment]]]:
        """Play episodes and return their control steps. The arguments are those of
        :func:`sinew_eval.episodes.watched.watch`.
        """

    def control_hz(self, task: Task) -> float:
        """Return the control steps per second of a task."""


def run(
    task: Task,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    *,
    workers: int = 1,
    out: Path | None = None,
    on_episode: OnEpisode | None = None,
    on_todo: Callable[[int], None] | None = None,
    elsewhere: RemotePlayer | None = None,
    player: Callable[[Task], EpisodePlayer] | None = None,
    listen: str | None = None,
    hosts: str | None = None,
) -> list[list[Episode]]:
    """Play the episodes of every variant.

    Args:
        task: The task.
        variants: The variants.
        seeds: Seeds of the episodes.
        workers: Number of processes. 1 plays in this process. More start as many worker processes
            (:mod:`sinew_eval.farm`), each with one compute thread. With ``out``, other processes can join.
        out: Folder of the run. Finished episodes are appended to its ``episodes.jsonl`` and are not played again.
            None for no log.
        on_episode: Called for each episode, also for episodes from the log.
        on_todo: Called once with the number of episodes that are not in the log.
        elsewhere: Player in another interpreter. None to play in this interpreter.
        player: Makes the player in this process, for one worker.
        listen: HOST:PORT where other hosts can join (:mod:`sinew_eval.farm.hosts`), also with one worker.
        hosts: Address of a Ray cluster whose hosts play with ``workers`` processes instead of this machine
            (:mod:`sinew_eval.foreign.cluster`).

    Returns:
        The episodes of each variant, in the order of ``seeds``.

    Raises:
        SinewError: Another run uses ``out``. Errors of an episode are raised too. Finished episodes stay in the log.
    """
    keys = [key(task, variant) for variant in variants]
    done: dict[tuple[str, int], Episode] = {}
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        queue: Path | None = None
        farm: Any = import_module(FARM)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(episode_log.sole(out))
            log, queue = out / LOG, out / farm.FOLDER
            done = read_log(log)
            file = stack.enter_context(open_log(log))
            for (name, seed), episode in farm.left_over(queue).items():
                if (name, seed) not in done:
                    done[name, seed] = episode
                    _append(file, name, [episode])
        todo, missing = [], 0
        for index, variant in enumerate(variants):
            for together in groups(variant, seeds):
                before = [done.get((keys[index], seed)) for seed in together]
                missing += before.count(None)
                # Play the whole group again. If only the missing episodes were played, the batch would be smaller, and
                # its results would be rounded differently.
                if None in before:
                    todo += [(index, seed) for seed in together]
                for found in before:
                    if found is not None and on_episode is not None:
                        on_episode(variant, found)
        if on_todo is not None:
            on_todo(missing)
        for index, played in _play(
            task, variants, todo, workers, queue, elsewhere, player or EpisodePlayer, listen, hosts
        ):
            group = [episode for episode in played if (keys[index], episode.seed) not in done]
            if file is not None:
                _append(file, keys[index], group)
            for episode in group:
                done[keys[index], episode.seed] = episode
                if on_episode is not None:
                    on_episode(variants[index], episode)
        if queue is not None:
            # The log now contains every episode of the queue.
            farm.remove(queue)
    return [[done[k, seed] for seed in seeds] for k in keys]


def read_log(log: Path) -> dict[tuple[str, int], Episode]:
    """Read a log of episodes.

    Args:
        log: The file. It may be missing.

    Returns:
        A dict. The key is (key of the variant, seed), and the value is the episode. A line that is cut short is
        skipped, and its episode is played again.
    """
    return dict(episode_log.episodes_of(episode_log.read_log_file(log))) if log.exists() else {}


def batch_played(task: Task, variant: Variant, out: Path) -> int | None:
    """Find the batch size with which the episodes of a variant in a log were played.

    Args:
        task: The task.
        variant: The variant. Its own batch size is ignored.
        out: Folder of the run.

    Returns:
        The batch size. None if the log has no episode of this variant.
    """
    for name, _ in read_log(out / LOG):
        try:
            values = dict(parse_json(name))
        except (ValueError, TypeError):
            # Skip a key that another program wrote.
            continue
        batch = values.pop("batch", 1)
        if json.dumps(values, sort_keys=True) == key(task, replace(variant, batch=1)) and type(batch) is int:
            return batch
    return None


def _append(file: BinaryIO, key: str, group: Sequence[Episode]) -> None:
    """Append the episodes of a group to the log in a single write, so that the log has all or none of them if the
    process is killed.
    """
    episode_log.append(file, b"".join(episode_log.line(key, episode) for episode in group))


def open_log(log: Path) -> BinaryIO:
    """Open a log for appending. A last line that was cut short gets a line end.

    Args:
        log: The file, which may be missing.

    Returns:
        The unbuffered file.
    """
    cut_short = False
    # Check that an existing log is a regular file. Opening a FIFO for appending would block until it has a reader.
    if log.exists():
        with SinewError.at(log, OSError), open_regular(log) as old:
            size = old.seek(0, io.SEEK_END)
            old.seek(max(size - 1, 0))
            cut_short = old.read(1) not in (b"", b"\n")
    file = log.open("ab", buffering=0)
    if cut_short:
        file.write(b"\n")
    return file


def _play(
    task: Task,
    variants: Sequence[Variant],
    todo: Sequence[tuple[int, int]],
    workers: int,
    queue: Path | None,
    elsewhere: RemotePlayer | None,
    make: Callable[[Task], EpisodePlayer],
    listen: str | None,
    hosts: str | None,
) -> Iterator[tuple[int, Sequence[Episode]]]:
    """Play episodes with the chosen player.

    Args:
        queue: Folder of the queue for several workers. None to use a temporary folder.
        make: Makes the player in this process.

    Yields:
        The index of the variant and the episodes of a group.
    """
    if not todo:
        return
    if elsewhere is not None:
        yield from ((index, [episode]) for index, episode in elsewhere.play(task, variants, todo, workers))
        return
    env, _ = make_env(task.env, task.adapter, task.env_options)
    # Make and close an environment here, so that an error in its settings is reported once and not by every worker.
    env.close()
    if workers > 1 or listen is not None or hosts is not None:
        farm: Any = import_module(FARM)
        with contextlib.ExitStack() as stack:
            if queue is None:
                place = Path(tempfile.gettempdir()) / "sinew-eval"
                queue = stack.enter_context(scratch.beside(place)) / farm.FOLDER
            yield from farm.play(queue, task, variants, todo, workers, listen, hosts)
        return
    player = make(task)
    try:
        with one_thread(variants):
            for index, variant in enumerate(variants):
                for seeds in groups(variant, [seed for which, seed in todo if which == index]):
                    yield index, player.play_group(variant, seeds)
    finally:
        player.close()

"""Compiling ahead, on all cores, what tuning is about to try one by one.

A tile takes a third of a second to two seconds to compile and milliseconds to time, so tuning is compiling. Triton
keeps what it compiled on disk, and a launch that finds it there loads it. The compiler leaves Python's lock alone
most of the time: threads are enough.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from sinew.engine.cuda.kernels import tuning
from sinew.engine.cuda.kernels.launch import Specialised, Tile
from sinew.engine.cuda.kernels.tiles import candidates
from sinew.engine.cuda.tune.trials import TuningProblem, is_kept

log = logging.getLogger(__name__)
MOST_THREADS = 16


class CollectedTrials:
    """In place of :class:`.trials.Trials`, within ``collecting``: each tile of each problem that would be timed is
    asked for and not run."""

    def __init__(self, device: torch.device, again: bool = False):
        self.device, self.again = device, again
        self.seen: set[tuple[TuningProblem, bool]] = set()
        self.paused = False

    def begin(self, problem: TuningProblem, has_others: bool = False) -> bool:
        entry = problem, has_others
        if (
            self.paused
            or entry in self.seen
            or (not self.again and is_kept(problem, self.device, has_others))
        ):
            return False
        self.seen.add(entry)
        return True

    def time(
        self,
        problem: TuningProblem,
        kernel: Callable[[Tile, int], Any],
        wanted: Callable[[], Any],
        others: Mapping[str, Any] | None = None,
        sets: int = 8,
    ) -> None:
        for tile in candidates(*problem, tuning.capability(self.device), tuning.multiprocessors(self.device)):
            try:
                kernel(tile, 0)
            except Exception as error:  # noqa: BLE001 - a tile that does not fit; timing it will say so
                log.debug("%s, %s: %s", problem, tile, error)
        for name, way in (others or {}).items():  # for the passes between a library's products
            try:
                way(0)
            except Exception as error:  # noqa: BLE001 - the same
                log.debug("%s, %s: %s", problem, name, error)


def compile_all(
    found: Mapping[str, Specialised],
    capability: int,
    seconds: float | None = None,
    each: Callable[[int, int], None] | None = None,
) -> int:
    """Compile for ``capability`` and keep on disk, for at most ``seconds``; returns how many did. each: is told how
    many are done, and of how many. What is not compiled, or does not compile, is left to the launch."""
    good, pool = 0, ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compile")
    try:
        futures = [pool.submit(made.compile, capability) for made in found.values()]
        for done, future in enumerate(as_completed(futures, seconds), 1):
            error = future.exception()
            good += error is None
            if error is not None:
                log.debug("not compiled ahead: %s", error)
            if each is not None:
                each(done, len(futures))
    except TimeoutError:
        log.debug("compiled %d of %d ahead in %s s", good, len(found), seconds)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # those that have begun: a second or two
    return good

"""``sinew prepare``: build and verify faster engines for a bundle, and time all of its engines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from sinew.cli import terminal
from sinew.cli.options import Count, CountIfAny, Flag, PositiveIfAny
from sinew.core import machine, progress

SCHEMA = "sinew.prepare/1"


def prepare(
    bundle: Path,
    /,
    *,
    device: str = "auto",
    dtype: str | None = None,
    threads: CountIfAny = None,
    observations: Count = 4,
    memory_gib: PositiveIfAny = None,
    again: Flag = False,
    background: Flag = False,
) -> int:
    """Time every engine that can run a bundle. Before that, build and verify those that may be faster.

    Engines are verified against eager float32. `--engine auto` then takes the fastest one. `sinew serve` does the
    same in the background, unless you pass `--no-prepare`. Times are processor seconds of a chunk with one thread,
    or clock time with more threads or on a GPU. Each engine is measured in turn with the present one. The result is
    stored until the version of Sinew or its libraries, or the hardware, changes.

    Args:
        bundle: Policy to prepare: a bundle with weights, a checkpoint or training run, or a hub name.
        device: Device, as for `sinew serve`.
        dtype: Compute type, as for `sinew serve`.
        threads: Compute threads that the times are for. Default: 1.
        observations: Number of observations used to compare the two engines.
        memory_gib: Memory that a server has for the policy, in GiB. During a change of engine, the policy is
            in memory twice. If it does not fit twice, Sinew does not prepare it.
        again: Repeat the preparation even if a result is stored.
        background: Run at the lowest priority, end at the latest when standard input closes, and print
            progress as JSON.
    """
    from sinew.checks import judges, preparing
    from sinew.memory import memory_need

    if background:
        machine.step_back()
        progress.listen(_report)
    preparation = preparing.prepare(
        bundle, device, dtype, observations, memory_gib, again, memory_need, judges.observations, threads
    )
    shown = preparation.finding or preparation.kept
    then = f"; --engine auto takes {shown.engine} from now on" if shown is not None and shown.taken else ""
    terminal.console(markup=False).print(preparation.text + then, soft_wrap=True)
    record = {} if shown is None else {**asdict(shown), "seconds": dict(shown.seconds)}
    outcome = {
        "schema": SCHEMA,
        "text": preparation.text,
        "prepared": preparation.finding is not None,
        "need": preparation.need,
    }
    terminal.emit(outcome | record)
    sys.stdout.flush()
    return 0


@contextlib.contextmanager
def _report(text: str, _total: int | None) -> Iterator[Callable[[str], None]]:
    print(json.dumps({"progress": text}), flush=True)
    yield lambda _: None

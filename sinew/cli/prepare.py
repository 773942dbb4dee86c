"""``sinew prepare``: the faster form of a bundle is made, proved and measured before anything takes it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from sinew.cli import terminal
from sinew.cli.options import Count, Flag, PositiveIfAny
from sinew.core import machine, progress

SCHEMA = "sinew.prepare/1"


def prepare(
    bundle: Path,
    /,
    *,
    device: str = "auto",
    dtype: str | None = None,
    observations: Count = 4,
    memory_gib: PositiveIfAny = None,
    again: Flag = False,
    background: Flag = False,
) -> int:
    """Make the faster form of a bundle, prove it against eager fp32, measure it; `--engine auto` takes it if it wins.

    `sinew serve` does this by itself, beside its clients, unless it is told `--no-prepare`. Times are processor seconds
    of a chunk with one thread, or of the clock on a GPU, in turn with the engine that runs the bundle now. What was
    found is kept until versions of Sinew or its libraries, or the hardware, change (docs/engines.md).

    Args:
        bundle: a bundle with weights, a checkpoint or training run, or a name of the hub.
        device: as of `sinew serve`.
        dtype: as of `sinew serve`.
        observations: to compare.
        memory_gib: that a server has for the policy; one that does not fit twice, while they are exchanged, is not
            prepared.
        again: also where something was found before.
        background: at the lowest priority, to the end of standard input at most; progress as JSON.
    """
    from sinew.eval import preparing
    from sinew.memory import memory_need

    if background:
        machine.step_back()
        progress.listen(_report)
    found = preparing.prepare(bundle, device, dtype, observations, memory_gib, again, memory_need)
    shown = found.finding or found.kept
    then = f"; --engine auto takes {shown.engine} from now on" if shown is not None and shown.taken else ""
    terminal.console(markup=False).print(found.text + then, soft_wrap=True)
    record = {} if shown is None else {**asdict(shown), "seconds": dict(shown.seconds)}
    told = {"schema": SCHEMA, "text": found.text, "prepared": found.finding is not None, "need": found.need}
    terminal.emit(told | record)
    sys.stdout.flush()
    return 0


@contextlib.contextmanager
def _report(text: str, _total: int | None) -> Iterator[Callable[[str], None]]:
    print(json.dumps({"progress": text}), flush=True)
    yield lambda _: None

"""Records of `sinew serve --record` as episodes of a data set: one frame per request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from sinew.core import SinewError
from sinew.records import parts
from sinew.records.recorder import Record, read_record
from sinew_client.control.authority import HUMAN

from sinew_eval.dataset.writer import DatasetFrame

GAP = 2.5  # a pause of more periods without a request ends an episode


@dataclass(frozen=True, slots=True)
class _RecordedRequest:
    """What tells episodes apart; the frames stay on the disk until their episode is written."""

    path: Path
    when: float
    prompt: str


def episodes(records: Iterable[Record], hz: float, corrections: bool = False) -> Iterator[list[DatasetFrame]]:
    """Yield the frames of each episode: the requests of a session that follow each other at ``hz`` requests a second.

    A longer pause than 2.5 periods begins another episode, so does another instruction. The action of a frame is the
    first row of the answer; a request that was answered with an error ends an episode, too. Raises
    :class:`SinewError` where the requests did not come at that rate: a data set has one rate, and nothing here
    invents frames in between. corrections: only of control steps in which a human drove; what a policy did between two
    of them ends an episode. Each record is read twice, so that no more than one episode is in memory.
    """
    running: dict[str, list[_RecordedRequest]] = defaultdict(list)
    steps: list[float] = []
    # Control steps between any two requests of a session, also if one does not follow the other directly.
    apart: list[float] = []
    found: list[list[_RecordedRequest]] = []
    for record in records:
        session = running[str(record.observation.session or record.wire)]
        if corrections and record.by != HUMAN:
            found.append(session.copy())
            session.clear()
            continue
        request = _RecordedRequest(record.path, _when(record), record.observation.prompt)
        if session:
            before = session[-1]
            step = (request.when - before.when) * hz
            apart += [step] * (step > 0)
            other = request.prompt != before.prompt
            if other or record.actions is None or not 0 < step <= GAP:
                found.append(session.copy())
                session.clear()
            else:
                steps.append(step)
        if record.actions is not None:
            session.append(request)
    found += running.values()
    if corrections and not any(found):
        raise SinewError("--corrections: expected control steps in which a human drove, got none")
    if not (steps or apart):
        raise SinewError("records: expected two consecutive requests of one session, got none")
    if not 0.75 <= (step := float(np.median(steps or apart))) <= 1.25:
        raise SinewError(
            f"--hz: expected the rate of the requests, which came {hz / step:.3g} times a second, got {hz:g}; a policy"
            " is asked for chunks, and `sinew run --frames` keeps every control step"
        )
    for session in found:
        if len(session) > 1:
            yield [_frame(read_record(request.path)) for request in session]


def control_hz(records: Iterable[Record]) -> float | None:
    """Return the rate at which a robot of `sinew run --frames` was driven, whose records tell their control steps by
    the seconds of that rate; None of requests, which come when they come."""
    times = [_when(record) for record in islice(records, 32) if record.by]
    steps = [after - before for before, after in pairwise(times) if after > before]
    return round(1 / min(steps), 6) if steps else None


def _when(record: Record) -> float:
    """Return the moment of a request: the robot's own clock where it gave one."""
    own = record.observation.time
    return parts.seconds(record, "time", record.meta.get("recorded") if own is None else own)


def _frame(record: Record) -> DatasetFrame:
    """Return a request as a control step."""
    seen, rows = record.observation, parts.rows(record)
    images = {name: parts.pixels(record, name) for name in seen.images}
    assert rows is not None
    human = record.by == HUMAN if record.by else None
    return DatasetFrame(images, np.asarray(seen.state), rows[0], str(seen.prompt), human)

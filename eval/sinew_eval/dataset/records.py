"""Convert records of `sinew serve --record` to episodes of a data set, with one frame per request."""

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

GAP = 2.5  # a pause without a request that is longer than this many periods ends an episode


@dataclass(frozen=True, slots=True)
class _RecordedRequest:
    """The data that separates episodes. The frames stay on disk until their episode is written.

    Attributes:
        path: File of the record.
        when: Time of the request, in seconds.
        prompt: Instruction.
    """

    path: Path
    when: float
    prompt: str


def episodes(records: Iterable[Record], hz: float, corrections: bool = False) -> Iterator[list[DatasetFrame]]:
    """Group the requests of a recording into episodes.

    A new episode begins after a pause of more than 2.5 periods, with another instruction, and after a request that
    failed. The action of a frame is the first action of the answer. Each record is read twice, so that only one
    episode is in memory.

    Args:
        records: The records.
        hz: Requests per second. A data set has one rate, and no frames are interpolated.
        corrections: True to keep only the control steps in which a person drove. Steps of a policy between them end
            an episode.

    Yields:
        The frames of an episode.

    Raises:
        SinewError: The requests came at another rate, or there are no consecutive requests.
    """
    running: dict[str, list[_RecordedRequest]] = defaultdict(list)
    steps: list[float] = []
    # Numbers of control steps between any two requests of the same session, also if other requests are between them.
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
        raise SinewError(
            "--corrections: expected control steps in which a human drove, got none; omit --corrections for all steps"
        )
    if not (steps or apart):
        raise SinewError(
            "records: expected two consecutive requests of one session, got none; record at least two requests"
        )
    if not 0.75 <= (step := float(np.median(steps or apart))) <= 1.25:
        raise SinewError(
            f"--hz: expected the rate of the requests, which came {hz / step:.3g} times a second, got {hz:g}. These"
            " are requests for chunks; to record every control step, use `sinew run --frames FOLDER`"
        )
    for session in found:
        if len(session) > 1:
            yield [_frame(read_record(request.path)) for request in session]


def control_hz(records: Iterable[Record]) -> float | None:
    """Find the control rate of a recording by `sinew run`, whose records have control times at this rate.

    Args:
        records: The records.

    Returns:
        The rate in Hz. None for records of requests, which have no regular rate.
    """
    times = [_when(record) for record in islice(records, 32) if record.by]
    steps = [after - before for before, after in pairwise(times) if after > before]
    return round(1 / min(steps), 6) if steps else None


def _when(record: Record) -> float:
    """Return the time of a request in seconds: the robot's own clock if the request contains it, else the server's."""
    own = record.observation.time
    return parts.seconds(record, "time", record.meta.get("recorded") if own is None else own)


def _frame(record: Record) -> DatasetFrame:
    """Convert a request to a control step of a data set."""
    seen, rows = record.observation, parts.rows(record)
    images = {name: parts.pixels(record, name) for name in seen.images}
    assert rows is not None
    human = record.by == HUMAN if record.by else None
    return DatasetFrame(images, np.asarray(seen.state), rows[0], str(seen.prompt), human)

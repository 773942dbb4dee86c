"""Report and page of a session of trials: those of an evaluation, with the session's plan, and films of the stored
steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sinew.core import SinewError
from sinew.core.statistics import summarize
from sinew.records import parts
from sinew.records.recorder import open_record, read_meta, read_record, record_files

from sinew_eval.episodes import episode_log
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.watched import WatchedMoment
from sinew_eval.evidence import page, run_page
from sinew_eval.evidence.films import Film, film_of
from sinew_eval.evidence.repeat import REPORT
from sinew_eval.report.report import conditions, document, tables
from sinew_eval.trials.sitting import TrialSession

PICTURES = 60  # a film has at most this many frames


def write_report(sitting: TrialSession, control_hz: float, command: str) -> dict[str, Any] | None:
    """Write ``report.json`` of the trials so far.

    Args:
        sitting: The session.
        control_hz: Control steps per second.
        command: Command line of the session.

    Returns:
        The report. None until each policy has a trial that counts.
    """
    results = sitting.results()
    if not all(results):
        return None
    record = document(sitting.task, control_hz, sitting.variants, results, workers=1, command=command)
    record["outcomes"] = [
        [{**row, **_trial(each)} for row, each in zip(rows, played, strict=True)]
        for rows, played in zip(run_page.outcomes(results), results, strict=True)
    ]
    record["plan"] = sitting.plan([entry["label"] for entry in record["variants"]])
    for each in record["comparisons"]:
        each["p_anytime"] = record["plan"]["p_anytime"]
    episode_log.write_whole(sitting.out / REPORT, json.dumps(record, indent=2).encode() + b"\n")
    return record


def _trial(each: Episode) -> dict[str, Any]:
    return {
        "trial": each.trial,
        "prompt": each.prompt,
        "seconds": each.wall_s,
        "held": each.held,
        "clipped": each.clipped,
        "latency_p95_ms": summarize(each.latency_ms).get("p95"),
        "judge": each.judge,
        "note": each.note,
    }


def write_page(sitting: TrialSession, record: dict[str, Any], frames: Path | None) -> Path:
    """Write the page of a report.

    Args:
        sitting: The session.
        record: The report.
        frames: Folder in which ``sinew run --frames`` stored the steps. None for no films.

    Returns:
        Path of the page.
    """
    path = sitting.out / run_page.PAGE
    has_frames = frames is not None and any(frames.glob("*.npz"))
    film_list = [] if frames is None or not has_frames else films(sitting, frames, record["control_hz"])
    episode_log.write_whole(path, markup(record, film_list).encode())
    return path


def markup(record: dict[str, Any], films: Sequence[Film]) -> str:
    """Return the page of a report as HTML."""
    return page.page(f"Trials: {record['task']['env']}", _parts(record, films), record)


def _parts(record: dict[str, Any], films: Sequence[Film]) -> Iterator[str]:
    plan, first = record["plan"], record["seeds"]["first"]
    yield f'<p class="note">{page.text(conditions(record))}</p>'
    yield f'<p class="{"good" if plan["kept"] else "bad"}">{page.text(plan["said"])}</p>'
    for title, columns, rows in tables(record):
        yield f"<h2>{page.text(title)}</h2>"
        yield page.table([columns[0], *(f">{name}" for name in columns[1:])], rows)
    for seed in dict.fromkeys(film.episode.seed for film in films):
        pair = "".join(run_page.figure(record, film) for film in films if film.episode.seed == seed)
        yield f'<h2>Scene {seed - first + 1}</h2><div class="films">{pair}</div>'
    yield from run_page.trials_of(record)
    lost = [[each["trial"], str(each["seed"]), each["label"], each["note"]] for each in plan["discarded"]]
    lost += [[name, "", "", "interrupted"] for name in plan["interrupted"]]
    yield f"<h2>Not counted, and played again: {len(lost)}</h2>"
    yield page.table(["trial", ">seed", "policy", "why"], lost) if lost else ""
    yield from run_page.how_run(record)


def films(sitting: TrialSession, frames: Path, control_hz: float) -> list[Film]:
    """Make a film of each trial whose control steps were stored, scene by scene."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path in record_files(frames):
        with open_record(path) as npz:
            places[str(read_meta(npz)["session"])].append(path)
    trials = [
        (each.seed, index, each) for index, episodes in enumerate(sitting.results()) for each in episodes
    ]
    film_list = []
    for _, index, each in sorted(trials, key=lambda trial: trial[:2]):
        paths = places.get(sitting.take(each.trial), [])
        if not paths:
            continue
        chosen = sorted({round(at) for at in np.linspace(0, len(paths) - 1, PICTURES)})
        moments = [_moment(paths[at], control_hz) for at in chosen]
        steps = (moments[-1].step - moments[0].step) / max(1, len(moments) - 1)
        film_list.append(film_of(index, each, moments, max(steps, 1) / control_hz))
    return film_list


def _moment(path: Path, control_hz: float) -> WatchedMoment:
    """Read a stored control step of a trial. Its number counts from the start of the control loop."""
    record = read_record(path)
    seen = record.observation
    images = {name: parts.pixels(record, name) for name in seen.images}
    rows = parts.rows(record)
    if rows is None or not images:
        raise SinewError(f"{path}: expected a record with a frame and a command; omit this file")
    step = round(control_hz * parts.seconds(record, "time", seen.time or 0.0))
    return WatchedMoment(step, images, np.asarray(seen.state), rows[0], str(seen.prompt))

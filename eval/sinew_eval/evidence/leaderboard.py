"""Rank the reports of several evaluations: one board for each task, with differences over common seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sinew.convert.sources.card import MAX_BYTES
from sinew.core import SinewError
from sinew_client.typed_names import file_name, portable
from sinew_client.untrusted import named, read_text, shown

from sinew_eval.episodes.settings import distinct_names
from sinew_eval.evidence import page
from sinew_eval.evidence.repeat import (
    MAX_EPISODES,
    MAX_SEED,
    REPORT,
    checked_outcomes,
    load,
    policy_of,
    variant_entries,
)
from sinew_eval.report.stats import mcnemar, paired_difference, pairs_needed, success

SCHEMA = "sinew.leaderboard/1"
MAX_REPORTS = 1000
MAX_STANDINGS = 200  # largest number of rows on a board, because every pair of rows is compared
MAX_TASKS = 10_000  # largest number of tasks of a variant
MAX_NUMBER = 1e18  # largest measured number in a report
FEW = 10  # a page folds the table of pairs (shows it only after a click) if it has more pairs than this
# Fields of a variant that appear in the name of a row if rows of the same policy differ in them.
DISTINGUISHING_FIELDS = (
    "replan",
    "latency",
    "handover",
    "solver_steps",
    "engine",
    "device",
    "stream",
    "edge_adapter",
    "batch",
)


@dataclass(frozen=True)
class Standing:
    """One variant of one report, as a row of a board.

    ``entry`` contains, among others: ``chunk`` (actions in a chunk), ``step_ms`` (milliseconds of inference per
    executed action), ``inference_ms`` (median per chunk), ``seconds_to_success`` (mean of the successful episodes, in
    the robot's time), ``peak_bytes`` (largest memory of the policy's process, including the simulator if it is the
    same process), and ``size_bytes`` (size of the bundle).

    Attributes:
        name: Name of the policy.
        file: File name of the bundle, or address of the server.
        variant: Fields of the variant.
        wins: For each seed, True if its episode succeeded.
        entry: The row, ready for JSON.
    """

    name: str
    file: str
    variant: Mapping[str, Any]
    wins: Mapping[int, bool]
    entry: Mapping[str, Any]

    @property
    def rate(self) -> float:
        return sum(self.wins.values()) / len(self.wins)


def reports(paths: Sequence[Path]) -> list[Path]:
    """Find the reports at several paths.

    Args:
        paths: Reports (JSON or page), or folders whose ``report.json`` files all count.

    Returns:
        The reports.

    Raises:
        SinewError: A folder contains no report, or there are too many reports.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob(REPORT))
            if not inside:
                raise SinewError(f"{path}: expected a folder of `sinew eval --out`, got no {REPORT} in it")
            found += inside
        else:
            found.append(path)
    if len(found) > MAX_REPORTS:
        raise SinewError(f"expected at most {MAX_REPORTS} reports, got {len(found)}; pass fewer reports")
    return list(dict.fromkeys(found))


def named_reports(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the reports at several paths by their short names, which omit common folders."""
    files = reports(paths)
    return dict(zip(distinct_names([str(path) for path in files]), files, strict=True))


def boards(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Build a board for each task of the reports.

    ``entries`` are ranked by success, then by milliseconds per step. Entries with equal success have the same rank.
    ``pairs`` compares each two entries over the seeds that both played: the difference of success with its 95 %
    interval (Newcombe's method 10), McNemar's exact test, and the number of additional pairs that would show a
    difference of this size. ``p_anytime`` is the p-value of a sequential session of trials. For trials on a robot,
    ``trials`` contains for each seed the success of each label.

    Args:
        paths: Reports, or folders with reports.

    Returns:
        The boards, in the order in which their tasks appear.

    Raises:
        SinewError: A file is not a report.
    """
    tasks: dict[str, list[Standing]] = {}
    titles: dict[str, dict[str, Any]] = {}
    for name, path in named_reports(paths).items():
        record = load(path)
        with SinewError.at(f"{path}: expected a report of `sinew eval --out`", SinewError):
            task = _task(record)
            standings = list(_standings(name, record))
        key = json.dumps(task, sort_keys=True)
        titles.setdefault(key, task)
        board = tasks.setdefault(key, [])
        board.extend(standings)
        if len(board) > MAX_STANDINGS:
            raise SinewError(
                f"{path}: expected at most {MAX_STANDINGS} variants of one task; pass fewer reports"
            )
    return [_board(titles[key], board) for key, board in tasks.items()]


def _task(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task of a report.

    Raises:
        SinewError: A field is wrong.
    """
    task = _object("task", record.get("task"))
    return {
        "env": _text("task.env", task.get("env")),
        **{
            name: None if task.get(name) is None else portable(_object(f"task.{name}", task[name]))
            for name in ("env_options", "reset_options")
        },
        "adapter": portable(_text("task.adapter", task.get("adapter"))),
        "realtime": _flag("task.realtime", task.get("realtime")),
        "control_hz": _number_of("control_hz", record.get("control_hz"), above=True),
    }


def _standings(name: str, record: Mapping[str, Any]) -> Iterator[Standing]:
    """Yield the standing of each variant in a report. Older reports list failed seeds in place of outcomes.

    Args:
        name: Name of the report on the board.
        record: Its content. Each used field is checked.

    Raises:
        SinewError: A field is wrong.
    """
    entries = variant_entries(record)
    outcomes = checked_outcomes(record, len(entries)) if "outcomes" in record else None
    plan = None if "plan" not in record else _plan(record["plan"])
    for index, entry in enumerate(entries):
        with SinewError.at(f"variants[{index}]", SinewError):
            played = None if outcomes is None else outcomes[index]
            yield _standing(name, record, entry, played, plan)


def _standing(
    name: str,
    record: Mapping[str, Any],
    entry: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]] | None,
    plan: dict[str, Any] | None,
) -> Standing:
    if outcomes is None:
        wins = _wins_of_failures(record, entry)
    else:
        wins = {each["seed"]: each["success"] for each in outcomes}
    if not wins:
        raise SinewError("outcomes: expected at least one episode, got none")
    variant = _object("variant", entry.get("variant"))
    bundle = _object("bundle", entry.get("bundle", {}))
    target = file_name(_text("variant.target", variant.get("target")))
    latency = _object("latency_ms", entry.get("latency_ms"))
    p50 = _number_of("latency_ms.p50", latency.get("p50")) if latency else None
    per_chunk = _number_of("actions_per_chunk", entry.get("actions_per_chunk"))
    step = p50 / per_chunk if p50 is not None and per_chunk else None
    steps = _number_or_none("mean_steps_to_success", entry.get("mean_steps_to_success"))
    hz = _number_of("control_hz", record.get("control_hz"), above=True)
    by_task = _object("by_task", entry.get("by_task"))
    if len(by_task) > MAX_TASKS:
        raise SinewError(f"by_task: expected at most {MAX_TASKS} tasks, got {len(by_task)}")
    row = {
        "report": name,
        "policy": policy_of(entry)["id"],
        "backbone": _text("bundle.backbone", bundle.get("backbone", "")),
        "dtype": _text("dtype", entry.get("dtype")),
        "hardware": _text("hardware", record.get("hardware")),
        "chunk": int(_number_of("chunk_size", entry.get("chunk_size"))),
        **success(list(wins.values())),
        "by_task": {task: _task_success(task, each) for task, each in by_task.items() if task},
        "step_ms": None if step is None else round(step, 4),
        "inference_ms": p50,
        "seconds_to_success": None if steps is None else round(steps / hz, 3),
        "peak_bytes": _number_or_none("peak_bytes", entry.get("peak_bytes")),
        "size_bytes": _number_or_none("bundle.bytes", bundle.get("bytes")),
        "plan": plan,
        # Two simulated scenes can be compared by their digest. A scene that a person set up is the same only within one
        # session, so use the name of the session.
        "sitting": name if plan and outcomes is not None and not outcomes[0]["digest"] else "",
    }
    label = _text("bundle.name", bundle.get("name", "")) or target
    return Standing(label, target, variant, wins, row)


def _wins_of_failures(record: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[int, bool]:
    seeds, failed = _object("seeds", record.get("seeds")), entry.get("failed_seeds")
    first = _whole_of("seeds.first", seeds.get("first"), MAX_SEED)
    count = _whole_of("seeds.count", seeds.get("count"), MAX_EPISODES)
    if not isinstance(failed, list) or not all(isinstance(seed, int) for seed in failed):
        raise SinewError(f"failed_seeds: expected whole numbers, got {shown(failed)}")
    lost = set(failed)
    return {seed: seed not in lost for seed in range(first, first + count)}


def _plan(values: Any) -> dict[str, Any]:
    """Check the field ``plan`` of a report of trials, and return it."""
    plan = _object("plan", values)
    always = _number_or_none("plan.p_anytime", plan.get("p_anytime"))
    return {**plan, "said": _text("plan.said", plan.get("said")), "p_anytime": always}


def _task_success(task: str, values: Any) -> dict[str, Any]:
    place = f"by_task.{named(task, 40)}"
    each = _object(place, values)
    interval = each.get("interval")
    if not isinstance(interval, list) or len(interval) != 2:
        raise SinewError(f"{place}.interval: expected two numbers, got {shown(interval)}")
    counts = {name: int(_number_of(f"{place}.{name}", each.get(name))) for name in ("wins", "episodes")}
    return {**counts, "interval": [_number_of(f"{place}.interval", end) for end in interval]}


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SinewError(f"{name}: expected an object, got {shown(value)}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SinewError(f"{name}: expected a text, got {shown(value)}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SinewError(f"{name}: expected true or false, got {shown(value)}")
    return value


def _whole_of(name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise SinewError(f"{name}: expected a whole number from 0 to {most}, got {shown(value)}")
    return value


def _number_of(name: str, value: Any, above: bool = False) -> float:
    """Check a number that must be at least 0.

    Args:
        name: Name of the field, for messages.
        value: The value.
        above: True to reject 0 too.

    Raises:
        SinewError: The value is not such a number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_NUMBER or (above and not value):
        raise SinewError(f"{name}: expected a number {'above' if above else 'from'} 0, got {shown(value)}")
    return float(value)


def _number_or_none(name: str, value: Any) -> float | None:
    return None if value is None else _number_of(name, value)


def _board(task: Mapping[str, Any], standings: Sequence[Standing]) -> dict[str, Any]:
    def place(each: Standing) -> tuple[float, bool, float]:
        step = each.entry["step_ms"]
        return -each.rate, step is None, step or 0.0

    ranked = sorted(standings, key=place)
    labels = _labels(ranked)
    entries = [
        {"rank": 1 + sum(other.rate > each.rate for other in ranked), "label": label, **each.entry}
        for label, each in zip(labels, ranked, strict=True)
    ]
    pairs = []
    for (first, a), (second, b) in combinations(zip(labels, ranked, strict=True), 2):
        difference, low, high = paired_difference(a.wins, b.wins)
        test = mcnemar(a.wins, b.wins)
        if test.pairs and a.entry["sitting"] == b.entry["sitting"]:
            needed = pairs_needed(test.pairs, test.only_first, test.only_second)
            plan = a.entry["plan"] if a.entry["report"] == b.entry["report"] else None
            pairs.append(
                {
                    "first": first,
                    "second": second,
                    "pairs": test.pairs,
                    "difference": round(difference, 4),
                    "interval": [round(low, 6), round(high, 6)],
                    "only_first": test.only_first,
                    "only_second": test.only_second,
                    "p_value": round(test.p_value, 6),
                    "p_anytime": plan["p_anytime"] if plan else None,
                    "more_pairs": None if needed is None else max(0, needed - test.pairs),
                }
            )
    trials = {
        label: dict(each.wins) for label, each in zip(labels, ranked, strict=True) if each.entry["plan"]
    }
    return {"task": dict(task), "entries": entries, "pairs": pairs, "trials": trials}


def _labels(ranked: Sequence[Standing]) -> list[str]:
    """Return a unique name for each row.

    The name consists of the policy's name and the fields in which rows with this name differ. If rows are still
    equal, the report's name and then a number are added.
    """
    labels = []
    for each in ranked:
        same = [other for other in ranked if other.name == each.name]
        differences = [
            f"{name} {'full' if name == 'replan' and value == 0 else value}"
            for name in DISTINGUISHING_FIELDS
            if len({str(other.variant.get(name)) for other in same}) > 1
            and (value := each.variant.get(name)) is not None
        ]
        if len({other.entry["dtype"] for other in same}) > 1:
            differences.append(each.entry["dtype"])
        if len({other.file for other in same}) > 1:
            differences.append(each.file)
        if len({other.entry["policy"] for other in same}) > 1:
            differences.append(each.entry["policy"][:8])
        labels.append(", ".join([each.name, *differences]))
    labels = [
        f"{label} ({each.entry['report']})" if labels.count(label) > 1 else label
        for label, each in zip(labels, ranked, strict=True)
    ]
    return [
        f"{label} #{labels[:index].count(label) + 1}" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]


COLUMNS = (
    ">rank",
    "policy",
    ">wins",
    ">success, % (95 %)",
    "backbone",
    ">chunk",
    ">step, ms",
    ">inference, ms",
    ">to success, s",
    ">memory, MiB",
    ">size, MB",
)


def rows(board: Mapping[str, Any]) -> list[list[str]]:
    """Return one row of cells for each entry, in the order of ``COLUMNS``."""
    cells = []
    for entry in board["entries"]:
        low, high = entry["interval"]
        cells.append(
            [
                str(entry["rank"]),
                entry["label"],
                f"{entry['wins']}/{entry['episodes']}",
                f"{100 * entry['success']:.1f} ({100 * low:.0f} to {100 * high:.0f})",
                entry["backbone"] or "-",
                str(entry["chunk"]),
                _number(entry["step_ms"], 2),
                _number(entry["inference_ms"], 1),
                _number(entry["seconds_to_success"], 1),
                _number(entry["peak_bytes"] and entry["peak_bytes"] / 2**20, 0),
                _number(entry["size_bytes"] and entry["size_bytes"] / 1e6, 1),
            ]
        )
    return cells


PAIR_COLUMNS = (
    "first",
    "second",
    ">pairs",
    ">difference, points",
    ">only first",
    ">only second",
    ">p (McNemar)",
    ">more pairs for 80 %",
)


def pair_rows(board: Mapping[str, Any], first: str | None = None) -> list[list[str]]:
    """Return one row of cells for each pair with common seeds, in the order of ``PAIR_COLUMNS``.

    Args:
        board: The board.
        first: Only pairs whose first entry has this label. None for all pairs.
    """
    table = []
    for pair in board["pairs"]:
        low, high = (100 * end for end in pair["interval"])
        if first in (None, pair["first"]):
            more, always = pair["more_pairs"], pair["p_anytime"]
            p = f"{pair['p_value']:.3g}" if always is None else f"{always:.3g} (anytime-valid)"
            counts = [
                str(pair["only_first"]),
                str(pair["only_second"]),
                p,
                "-" if more is None else str(more),
            ]
            points = f"{100 * pair['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
            table.append([pair["first"], pair["second"], str(pair["pairs"]), points, *counts])
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def task_columns(board: Mapping[str, Any]) -> list[str]:
    return ["task", *(f">{entry['label']}" for entry in board["entries"])]


def task_rows(board: Mapping[str, Any]) -> list[list[str]]:
    """Return one row for each task, with the success of each entry and its interval. Empty for a single task."""
    names = list(dict.fromkeys(name for entry in board["entries"] for name in entry["by_task"]))
    if len(names) < 2:
        return []
    table = []
    for name in names:
        cells = []
        for entry in board["entries"]:
            task = entry["by_task"].get(name)
            low, high = task["interval"] if task else (0, 1)
            cells.append(
                f"{task['wins']}/{task['episodes']} [{100 * low:.0f}, {100 * high:.0f}]" if task else "-"
            )
        table.append([name, *cells])
    return table


def plans(board: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each session of trials: its plan, and whether it was followed."""
    sentences = {
        entry["report"]: f"{entry['report']}: {entry['plan']['said']}"
        for entry in board["entries"]
        if entry["plan"]
    }
    return list(sentences.values())


def _scenes(board: Mapping[str, Any]) -> str:
    """Return a table of the trials, one row for each scene. Scenes at which the policies disagree come first."""
    trials = board["trials"]
    rows = []
    for seed in sorted({seed for wins in trials.values() for seed in wins}):
        outcomes = [wins.get(seed) for wins in trials.values()]
        cells = [
            "-" if each is None else ("success", "good") if each else ("no success", "bad")
            for each in outcomes
        ]
        rows.append((len(set(outcomes) - {None}) < 2, [str(seed), *cells]))
    rows.sort(key=lambda row: row[0])
    return page.table([">scene", *trials], [cells for _, cells in rows])


def _films(board: Mapping[str, Any], paths: Mapping[str, Path]) -> Iterator[str]:
    """Yield the HTML of the films on the pages of the sessions of trials. Films of the same scene are side by side."""
    for report in dict.fromkeys(entry["report"] for entry in board["entries"] if entry["plan"]):
        path = paths[report].with_suffix(".html")
        try:
            text = read_text(path, MAX_BYTES)
        except (OSError, ValueError):
            # Skip a session that has no page.
            continue
        films = page.FILMS.findall(text)
        yield page.folded(f"films of {report}", "".join(films)) if films else ""


def title(board: Mapping[str, Any]) -> str:
    task = board["task"]
    options = {name: task[name] for name in ("env_options", "reset_options", "adapter") if task[name]}
    clock = ", real time" if task["realtime"] else ""
    return f"{task['env']} at {task['control_hz']:g} Hz{clock}" + (
        f", {json.dumps(options)}" if options else ""
    )


def markup(record: Mapping[str, Any], paths: Mapping[str, Path]) -> str:
    """Return the HTML page of a leaderboard.

    Args:
        record: The boards and the date.
        paths: The file of each report, by its short name (:func:`named_reports`).
    """
    return page.page("Leaderboard", _parts(record, paths), record)


def _parts(record: Mapping[str, Any], paths: Mapping[str, Path]) -> Iterator[str]:
    yield (
        '<p class="note">Success with its 95 % Wilson interval. Differences are paired, over seeds that both played,'
        " with their 95 % interval (Newcombe 1998, method 10), McNemar's exact p, and the number of further pairs that"
        " would show a difference of that size with a power of 80 % (Connor 1987). Step: milliseconds of inference"
        " (p50) for each executed action. Memory: the peak of the policy's process. It includes the simulator if"
        " the simulator runs in the same process.</p>"
    )
    for board in record["boards"]:
        yield f"<h2>{page.text(title(board))}</h2>"
        yield page.table(COLUMNS, rows(board), best=0)
        if by_task := task_rows(board):
            yield page.folded("by task", page.table(task_columns(board), by_task))
        if pairs := pair_rows(board):
            shown = page.table(PAIR_COLUMNS, pairs)
            yield shown if len(pairs) <= FEW else page.folded("each two over common seeds", shown)
        yield from (f"<p>{page.text(said)}</p>" for said in plans(board))
        if board["trials"]:
            yield page.folded("trials, scene by scene", _scenes(board))
        yield from _films(board, paths)
        machines = {entry["hardware"] for entry in board["entries"]}
        rest = [
            [entry["label"], entry["dtype"] or "-", entry["hardware"], entry["policy"], entry["report"]]
            for entry in board["entries"]
        ]
        yield page.folded(
            "reports", page.table(("policy", "precision", "machine", "SHA-256", "report"), rest)
        )
        if len(machines) > 1:
            yield (
                '<p class="note">The entries were measured on several machines, so their milliseconds cannot be'
                " compared.</p>"
            )
    yield f'<p class="note">{page.text(record["date"])}, sinew {page.text(record["sinew"])}</p>'

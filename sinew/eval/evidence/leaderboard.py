"""Reports of several evaluations side by side: a board for each task, ranked, with differences over common seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sinew.core import SinewError
from sinew.eval.evidence import page
from sinew.eval.evidence.repeat import MAX_BYTES, REPORT, load
from sinew.eval.report.stats import mcnemar, paired_difference, pairs_needed, success

SCHEMA = "sinew.leaderboard/1"
MAX_REPORTS = 1000
FEW = 10  # pairs that a page shows unfolded
# What a row's name says where rows of one policy differ in it.
TOLD = (
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
    """One variant of one report.

    file: of the bundle, or a server's address. wins: seed -> whether it succeeded there. entry: what a board says of
    it. chunk: actions of a chunk. step_ms: milliseconds of inference for each executed action; inference_ms: of a
    chunk, p50. seconds_to_success: of the robot's own time, mean of the successes. peak_bytes: the most memory of the
    policy's process, the simulator's included where they share one. size_bytes: of the bundle.
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
    """Return the reports that paths name: a report itself (JSON or page), or all ``report.json`` in a folder.

    Raises :class:`SinewError` for a folder without any.
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
        raise SinewError(f"expected at most {MAX_REPORTS} reports, got {len(found)}")
    return list(dict.fromkeys(found))


def boards(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a board for each task of the reports in ``paths``, in the order in which they come.

    ``entries`` are ranked by success, then by milliseconds a step; those of equal success have one rank. ``pairs``
    compares each two over the seeds that both played: the difference of success with its 95 % interval (Newcombe's
    method 10), McNemar's exact test, and how many more pairs would show a difference of that size; of a sequential
    sitting of trials ``p_anytime``, which is its test. ``trials``: seed -> success by label, of trials on a robot.
    Raises :class:`SinewError` for what is no report.
    """
    tasks: dict[str, list[Standing]] = {}
    titles: dict[str, dict[str, Any]] = {}
    for path in reports(paths):
        record = load(path)
        try:
            task = {name: record["task"][name] for name in ("env", "env_options", "reset_options", "adapter")}
            task |= {"realtime": record["task"]["realtime"], "control_hz": record["control_hz"]}
            key = json.dumps(task, sort_keys=True)
            titles.setdefault(key, task)
            tasks.setdefault(key, []).extend(_standings(path, record))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise SinewError(
                f"{path}: expected a report of `sinew eval --out`, got {type(error).__name__}: {str(error)[:200]}"
            ) from None
    return [_board(titles[key], found) for key, found in tasks.items()]


def _standings(path: Path, record: Mapping[str, Any]) -> Iterator[Standing]:
    """Of each variant. Reports of before there were outcomes say which seeds failed."""
    first, count = int(record["seeds"]["first"]), int(record["seeds"]["count"])
    for index, entry in enumerate(record["variants"]):
        if "outcomes" in record:
            wins = {int(each["seed"]): bool(each["success"]) for each in record["outcomes"][index]}
        else:
            failed = set(entry["failed_seeds"])
            wins = {seed: seed not in failed for seed in range(first, first + count)}
        if not wins:
            raise ValueError("a variant without episodes")
        bundle, steps = entry.get("bundle", {}), entry["mean_steps_to_success"]
        target = str(entry["variant"]["target"]).replace("\\", "/").rsplit("/", 1)[-1]
        latency, per_chunk = entry["latency_ms"], entry["actions_per_chunk"]
        step = latency["p50"] / per_chunk if latency and per_chunk else None
        seconds = None if steps is None else round(float(steps) / float(record["control_hz"]), 3)
        told = {
            "report": str(path),
            "policy": str(entry["policy"]["id"]),
            "backbone": str(bundle.get("backbone", "")),
            "dtype": str(entry["dtype"]),
            "hardware": str(record["hardware"]),
            "chunk": int(entry["chunk_size"]),
            **success(list(wins.values())),
            "by_task": {str(name): dict(each) for name, each in entry["by_task"].items() if name},
            "step_ms": None if step is None else round(float(step), 4),
            "inference_ms": float(latency["p50"]) if latency else None,
            "seconds_to_success": seconds,
            "peak_bytes": entry.get("peak_bytes"),
            "size_bytes": bundle.get("bytes"),
            "plan": record.get("plan"),
            # A scene that a person set up is the same in one sitting alone; what was simulated has a digest.
            "sitting": str(path) if "plan" in record and not record["outcomes"][index][0]["digest"] else "",
        }
        yield Standing(str(bundle.get("name") or target), target, entry["variant"], wins, told)


def _board(task: Mapping[str, Any], found: Sequence[Standing]) -> dict[str, Any]:
    def place(each: Standing) -> tuple[float, bool, float]:
        step = each.entry["step_ms"]
        return -each.rate, step is None, step or 0.0

    ranked = sorted(found, key=place)
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
                    "interval": [round(low, 4), round(high, 4)],
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
    """Return a name for each row, of its own: the policy's, and in what it differs from the others of that name; its
    report, and at last a number, where nothing else tells two apart."""
    found = []
    for each in ranked:
        same = [other for other in ranked if other.name == each.name]
        told = [
            f"{name} {'full' if name == 'replan' and value == 0 else value}"
            for name in TOLD
            if len({str(other.variant.get(name)) for other in same}) > 1
            and (value := each.variant.get(name)) is not None
        ]
        if len({other.entry["dtype"] for other in same}) > 1:
            told.append(each.entry["dtype"])
        if len({other.file for other in same}) > 1:
            told.append(each.file)
        if len({other.entry["policy"] for other in same}) > 1:
            told.append(each.entry["policy"][:8])
        found.append(", ".join([each.name, *told]))
    found = [
        f"{label} ({each.entry['report']})" if found.count(label) > 1 else label
        for label, each in zip(found, ranked, strict=True)
    ]
    return [
        f"{label} #{found[:index].count(label) + 1}" if found.count(label) > 1 else label
        for index, label in enumerate(found)
    ]


# ----------------------------------------------------------------------------- tables

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
    """Return the cells of ``COLUMNS``, an entry each."""
    found = []
    for entry in board["entries"]:
        low, high = entry["interval"]
        found.append(
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
    return found


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
    """Return the cells of ``PAIR_COLUMNS`` for each two with common seeds. first: of those with this label alone."""
    found = []
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
            found.append([pair["first"], pair["second"], str(pair["pairs"]), points, *counts])
    return found


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def task_columns(board: Mapping[str, Any]) -> list[str]:
    return ["task", *(f">{entry['label']}" for entry in board["entries"])]


def task_rows(board: Mapping[str, Any]) -> list[list[str]]:
    """Return success with its interval by task, a task each; nothing where there is one task alone."""
    names = list(dict.fromkeys(name for entry in board["entries"] for name in entry["by_task"]))
    if len(names) < 2:
        return []
    found = []
    for name in names:
        cells = []
        for entry in board["entries"]:
            task = entry["by_task"].get(name)
            low, high = task["interval"] if task else (0, 1)
            cells.append(
                f"{task['wins']}/{task['episodes']} [{100 * low:.0f}, {100 * high:.0f}]" if task else "-"
            )
        found.append([name, *cells])
    return found


def plans(board: Mapping[str, Any]) -> list[str]:
    """Return what each sitting of trials had planned, and whether that was kept, a sentence each."""
    found = {
        entry["report"]: f"{entry['report']}: {entry['plan']['said']}"
        for entry in board["entries"]
        if entry["plan"]
    }
    return list(found.values())


def _scenes(board: Mapping[str, Any]) -> str:
    """Return the trials in pairs: a row for each scene, those about which policies disagree first."""
    trials = board["trials"]
    rows = []
    for seed in sorted({seed for wins in trials.values() for seed in wins}):
        found = [wins.get(seed) for wins in trials.values()]
        cells = [
            "-" if each is None else ("success", "good") if each else ("no success", "bad") for each in found
        ]
        rows.append((len(set(found) - {None}) < 2, [str(seed), *cells]))
    rows.sort(key=lambda row: row[0])
    return page.table([">scene", *trials], [cells for _, cells in rows])


def _films(board: Mapping[str, Any]) -> Iterator[str]:
    """Yield the films that stand on the pages of sittings, those of a scene side by side."""
    for report in dict.fromkeys(entry["report"] for entry in board["entries"] if entry["plan"]):
        path = Path(report).with_suffix(".html")
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            found = page.FILMS.findall(path.read_text(encoding="utf-8", errors="replace"))
            yield page.folded(f"films of {report}", "".join(found)) if found else ""


def title(board: Mapping[str, Any]) -> str:
    task = board["task"]
    options = {name: task[name] for name in ("env_options", "reset_options", "adapter") if task[name]}
    clock = ", real time" if task["realtime"] else ""
    return f"{task['env']} at {task['control_hz']:g} Hz{clock}" + (
        f", {json.dumps(options)}" if options else ""
    )


def markup(record: Mapping[str, Any]) -> str:
    """Return the page of a record: ``boards`` and ``date``."""
    return page.page("Leaderboard", _parts(record), record)


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    yield (
        '<p class="note">Success with its 95 % Wilson interval. Differences are paired, over seeds that both played,'
        " with their 95 % interval (Newcombe 1998, method 10), McNemar's exact p, and how many more pairs would show a"
        " difference of that size four times of five (Connor 1987). Step: milliseconds of inference"
        " (p50) for each executed action. Memory: the most that the policy's process held, simulator included where"
        " they share one.</p>"
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
        yield from _films(board)
        machines = {entry["hardware"] for entry in board["entries"]}
        rest = [
            [entry["label"], entry["dtype"] or "-", entry["hardware"], entry["policy"], entry["report"]]
            for entry in board["entries"]
        ]
        yield page.folded(
            "reports", page.table(("policy", "precision", "machine", "SHA-256", "report"), rest)
        )
        if len(machines) > 1:
            yield '<p class="note">Entries are of several machines: their milliseconds do not compare.</p>'
    yield f'<p class="note">{page.text(record["date"])}, sinew {page.text(record["sinew"])}</p>'

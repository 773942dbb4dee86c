"""Convert episodes to numbers, and numbers to a JSON report, Markdown and terminal tables."""

from __future__ import annotations

import contextlib
import itertools
import platform
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from sinew import __version__
from sinew.core import machine, statistics
from sinew.core.registry import backbone
from sinew_client.typed_names import file_name, portable

from sinew_eval import suites
from sinew_eval.episodes.policies import chosen, identity
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.report import stats

SCHEMA = "sinew.eval/1"


def document(
    task: Task,
    control_hz: float,
    variants: Sequence[Variant],
    results: Sequence[Sequence[Episode]],
    *,
    workers: int,
    command: str = "",
    simulator: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the report of a run.

    Args:
        task: The task.
        control_hz: Control steps per second.
        variants: The variants. The first one is the baseline of comparisons.
        results: The episodes of each variant.
        workers: Number of processes that played.
        command: Command line of the run.
        simulator: Versions of the packages in the interpreter that played, if it is another one.

    Returns:
        The report, ready for JSON.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(portable, shlex.split(command))),
        "sinew": __version__,
        "versions": versions(simulator),
        "hardware": f"{machine.cpu_model()}, {machine.cores().physical} cores, {platform.system()}",
        "workers": workers,
        "task": task.record(),
        "control_hz": control_hz,
        "seeds": {"first": results[0][0].seed, "count": max(map(len, results))},
        "variants": [
            row(variant, episodes, control_hz, variant.label(variants))
            for variant, episodes in zip(variants, results, strict=True)
        ],
        "comparisons": [comparison(variants, results, index) for index in range(1, len(variants))],
    }


def row(variant: Variant, episodes: Sequence[Episode], control_hz: float, label: str) -> dict[str, Any]:
    """Summarise the episodes of one variant.

    Some fields of the result: ``chunk_rate_hz`` is the rate of inferences without a pause. ``control_rate_hz`` is
    this rate times the actions executed per chunk. ``step_ms`` is the median latency divided by the actions executed
    per chunk. ``age_ms`` is the time from a frame to the execution of an action.

    Args:
        variant: The variant.
        episodes: Its episodes.
        control_hz: Control steps per second.
        label: Short name of the variant.

    Returns:
        The entry of the variant in the report.
    """
    latency = statistics.summarize([ms for episode in episodes for ms in episode.latency_ms])
    delays = [d for episode in episodes for d in episode.delays]
    chunks, executed = sum(e.chunks for e in episodes), sum(e.executed for e in episodes)
    misses = sum(e.misses for e in episodes)
    per_chunk = executed / chunks if chunks else 0.0
    won = [e.steps for e in episodes if e.success]
    ages = sum((Counter(e.ages) for e in episodes), Counter())
    return {
        "label": label,
        "variant": variant.record(),
        "policy": identity(variant.target),
        **edge(variant),
        "bundle": facts(variant),
        "dtype": dtype_of(variant),
        **stats.success([e.success for e in episodes]),
        "mean_steps_to_success": round(sum(won) / len(won), 2) if won else None,
        "chunks": chunks,
        "chunk_size": episodes[0].chunk_size,
        "actions_per_chunk": round(per_chunk, 2),
        "delay_steps": round(sum(delays) / len(delays), 3) if delays else 0.0,
        "delay_ms": round(variant.latency.milliseconds(control_hz), 3),
        "age_ms": statistics.summarize([1e3 * int(age) / control_hz for age in ages.elements()]),
        "latency_ms": latency,
        "chunk_rate_hz": round(stats.amortized_rate(1, latency["p50"]), 2) if latency else None,
        "control_rate_hz": round(stats.amortized_rate(per_chunk, latency["p50"]), 2) if latency else None,
        "step_ms": round(latency["p50"] / per_chunk, 4) if latency and per_chunk else None,
        "peak_bytes": max(e.peak_bytes for e in episodes) or None,
        "deadline_misses": misses,
        "deadline_miss_rate": round(misses / chunks, 4) if chunks else 0.0,
        "held_steps": sum(e.held for e in episodes),
        "late_ticks": sum(e.late_ticks for e in episodes),
        "by_task": by_task(episodes),
        "failed_seeds": [e.seed for e in episodes if not e.success],
    }


def edge(variant: Variant) -> dict[str, Any]:
    """Return the file name and the SHA-256 of the edge adapter, for a report. The dict is empty without an edge
    adapter.
    """
    if not variant.edge_adapter:
        return {}
    return {
        "edge_adapter": {"file": file_name(variant.edge_adapter), "id": identity(variant.edge_adapter)["id"]}
    }


# The report lists the versions of these packages, because they may change the actions.
PACKAGES = ("numpy", "torch", "onnxruntime")


def versions(simulator: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that may change an outcome.

    Args:
        simulator: Versions in the interpreter that plays, if it is another one. Their names get the prefix
            "simulator", and the simulation packages of this interpreter are left out, because they are not used.

    Returns:
        The version of each package, by the package's name.
    """
    here = {"python": platform.python_version()}
    for name in (*PACKAGES, *suites.SIMULATION) if simulator is None else PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            here[name] = metadata.version(name)
    return here | {f"simulator {name}": version for name, version in (simulator or {}).items()}


def facts(variant: Variant) -> dict[str, Any]:
    """Return facts about a variant's policy.

    Args:
        variant: The variant.

    Returns:
        For a bundle: name, architecture, backbone, file name, bytes and parameters. For a server: name, architecture
        and backbone. For an expert: nothing.
    """
    about = identity(variant.target)
    if about["kind"] != "bundle":
        server_facts = {name: about[name] for name in ("name", "architecture") if name in about}
        return server_facts | ({"backbone": backbone(server_facts["architecture"])} if server_facts else {})
    from sinew.policy import open_bundle

    path, bundle = Path(variant.target), open_bundle(variant.target)
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return {
        "name": bundle.manifest.name,
        "architecture": bundle.manifest.architecture,
        "backbone": backbone(bundle.manifest.architecture, bundle.manifest.config),
        "file": path.name,
        "bytes": sum(each.stat().st_size for each in files),
        "parameters": sum(map(bundle.parameters, bundle.infos.values())),
    }


def dtype_of(variant: Variant) -> str:
    """Return the number formats of a variant's components. "" for an expert."""
    about = identity(variant.target)
    if about["kind"] != "bundle":
        return str(about.get("dtype", ""))
    return chosen(variant).precision_text


def by_task(episodes: Sequence[Episode]) -> dict[str, dict[str, Any]]:
    """Summarise the success by task.

    Parts of a task's name, such as "red" in "red/left", also get an entry. A last part that only one task has
    ("easy/reach") is left out, because its entry would repeat that of the task.

    Args:
        episodes: The episodes.

    Returns:
        The success of each task or part, by name, in alphabetical order. Whole tasks come first.
    """
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        parts = episode.task.split("/")
        for name in {episode.task, *(parts if len(parts) > 1 else ())}:
            groups[name].append(episode)
    for name in [name for name, members in groups.items() if len({e.task for e in members}) == 1]:
        (task,) = {episode.task for episode in groups[name]}
        if task != name and task.endswith(f"/{name}"):
            del groups[name]
    summaries = {}
    for name in sorted(groups, key=lambda name: (name.count("/") == 0, name)):
        won = [e.steps for e in groups[name] if e.success]
        mean = round(sum(won) / len(won), 2) if won else None
        summaries[name] = {**stats.success([e.success for e in groups[name]]), "mean_steps_to_success": mean}
    return summaries


def comparison(
    variants: Sequence[Variant], results: Sequence[Sequence[Episode]], index: int
) -> dict[str, Any]:
    """Compare one variant with the first one over common seeds.

    Args:
        variants: The variants.
        results: The episodes of each variant.
        index: Index of the compared variant.

    Returns:
        McNemar's exact test, and the difference with its interval: success of the variant minus success of the first
        one.
    """
    first, second = ({e.seed: e.success for e in results[i]} for i in (0, index))
    test = stats.mcnemar(first, second)
    difference, low, high = stats.paired_difference(second, first)
    return {
        "baseline": variants[0].label(variants),
        "variant": variants[index].label(variants),
        "pairs": test.pairs,
        "only_baseline": test.only_first,
        "only_variant": test.only_second,
        "p_value": round(test.p_value, 6),
        "difference": round(difference, 6),
        "difference_interval": [round(low, 6), round(high, 6)],
    }


SUCCESS_COLUMNS = ("variant", ">success", ">95 % interval, %", ">steps to success")
RATE_COLUMNS = (
    "variant",
    ">delay, steps",
    ">deadline misses",
    ">p50, ms",
    ">p95",
    ">p99",
    ">age p95",
    ">chunks/s",
    ">actions/chunk",
    ">control, Hz",
)
TASK_COLUMNS = ("task", *SUCCESS_COLUMNS[1:])
COMPARISON_COLUMNS = (
    "against the first",
    ">pairs",
    ">only first",
    ">only this",
    ">difference, points (95 %)",
    ">p (McNemar)",
    ">reads as",
)
# A difference with a smaller p-value than this is marked as shown (statistically significant).
SHOWN_AT = 0.05


def rate_cells(entry: dict[str, Any]) -> list[str]:
    latency = entry["latency_ms"]
    return [
        entry["label"],
        f"{entry['delay_steps']:.3g}",
        f"{entry['deadline_misses']}/{entry['chunks']}",
        *(_number(latency.get(p)) for p in ("p50", "p95", "p99")),
        _number(entry.get("age_ms", {}).get("p95")),
        _number(entry["chunk_rate_hz"]),
        _number(entry["actions_per_chunk"]),
        _number(entry["control_rate_hz"]),
    ]


def success_cells(entry: dict[str, Any]) -> list[str]:
    low, high = entry["interval"]
    percent = f" ({100 * entry['success']:.1f} %)" if entry["episodes"] else ""
    return [
        f"{entry['wins']}/{entry['episodes']}{percent}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        _number(entry["mean_steps_to_success"]),
    ]


def comparison_cells(entry: dict[str, Any]) -> list[str]:
    counts = [str(entry[name]) for name in ("pairs", "only_baseline", "only_variant")]
    low, high = (100 * each for each in entry["difference_interval"])
    difference = f"{100 * entry['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
    p, always = entry["p_value"], entry.get("p_anytime")
    shown = f"{p:.3g}" if always is None else f"{always:.3g} (anytime-valid)"
    if (p if always is None else always) < SHOWN_AT:
        verdict = "better" if entry["difference"] > 0 else "worse"
    else:
        verdict = f"no difference shown; {max(0.0, -low):.0f} points worse are not excluded"
    return [entry["variant"], *counts, difference, shown, verdict]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def tables(report: dict[str, Any]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Build the tables of a report.

    Args:
        report: The report.

    Returns:
        (title, columns, rows) of each table. A column whose name begins with ``>`` is aligned to the right.
    """
    variants = report["variants"]
    found: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("Success", SUCCESS_COLUMNS, [[v["label"], *success_cells(v)] for v in variants]),
        ("Inference latency and rates", RATE_COLUMNS, [rate_cells(v) for v in variants]),
    ]
    first = report["variants"][0]
    if len(first["by_task"]) > 1:
        rows = [[name, *success_cells(entry)] for name, entry in first["by_task"].items()]
        found.append((f"Tasks, {first['label']}", TASK_COLUMNS, rows))
    if suites.find(report["task"]["env"]) and (rows := suite_rows(variants)):
        columns = ["suite", *(f">{v['label']}" for v in variants)]
        found.append(("Success by suite, % [95 % interval]", columns, rows))
    if report["comparisons"]:
        cells = [comparison_cells(entry) for entry in report["comparisons"]]
        found.append(("Paired comparison", COMPARISON_COLUMNS, cells))
    return found


def suite_rows(variants: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Build the table of success by suite, as papers print it.

    Args:
        variants: Entries of the variants in the report.

    Returns:
        One row for each first part of the tasks' names, which is the benchmark or the difficulty, then one row for
        all tasks. One column for each variant. Empty if the tasks' names have no parts.
    """
    groups = sorted({name.partition("/")[0] for name in variants[0]["by_task"] if "/" in name})
    suite_cells = [[group, *(_suite_cell(each["by_task"][group]) for each in variants)] for group in groups]
    return [*suite_cells, ["all", *map(_suite_cell, variants)]] if len(groups) > 1 else suite_cells


def _suite_cell(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{100 * entry['success']:.1f} [{100 * low:.1f}, {100 * high:.1f}] of {entry['episodes']}"


def conditions(report: dict[str, Any]) -> str:
    """Return one paragraph that states what was run, where and how."""
    task, seeds = report["task"], report["seeds"]
    variant, policy = report["variants"][0]["variant"], report["variants"][0]["policy"]
    ran = f"{variant['device']}, engine {variant.get('engine', 'eager')}"
    ran = ran if policy["kind"] == "bundle" else policy["kind"]
    clock = "real time" if task["realtime"] else "simulated latency"
    dtype = report["variants"][0]["dtype"] or "scripted"
    return (
        f"{task['env']} at {report['control_hz']:g} Hz, seeds {seeds['first']} to"
        f" {seeds['first'] + seeds['count'] - 1}, {clock}, chunk merging {variant['handover']};"
        f" {variant['target']} ({dtype}, {ran},"
        f" solver steps {variant['solver_steps'] or 'of the bundle'});"
        f" {report['workers']} workers on {report['hardware']}; sinew {report['sinew']}, {report['date'][:10]}."
    )


def markdown(report: dict[str, Any]) -> str:
    lines = [f"# {report['task']['env']}", "", conditions(report), ""]
    if report["command"]:
        lines += ["```", report["command"], "```", ""]
    for title, columns, rows in tables(report):
        head = [column.removeprefix(">") for column in columns]
        lines += [f"## {title}", "", _markdown_row(head), _markdown_row(["---"] * len(head))]
        lines += [_markdown_row(cells) for cells in rows] + [""]
    for verdict in report.get("gate", {}).get("verdicts", []):
        lines.append(f"* gate, {verdict['label']}: {verdict['text']}")
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def swept(report: dict[str, Any]) -> list[str]:
    """Return the names of the settings in which the variants of a report differ, in the order of their first change."""
    variants = [entry["variant"] for entry in report["variants"]]
    names = [name for name in variants[0] if all(name in variant for variant in variants)]
    changed = []
    for a, b in itertools.pairwise(report["variants"]):
        changed += [n for n in names if a["variant"][n] != b["variant"][n] and n not in changed]
    return changed

"""The report page of a run, with a record of every episode from which the run can be repeated."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinew_eval.episodes.outside import task_names
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task
from sinew_eval.evidence import page, repeat
from sinew_eval.report.report import conditions, tables

if TYPE_CHECKING:
    from sinew_eval.evidence.films import Film

PAGE = "report.html"
# A page folds the list of trials (shows it only after a click) if it has more trials than this.
MAX_UNFOLDED = 400


def outcomes(results: Sequence[Sequence[Episode]]) -> list[list[dict[str, Any]]]:
    """Return the outcome of each episode of each variant, with the fields by which episodes are compared."""
    names = ("seed", "task", "success", "steps", "digest")
    return [[{name: getattr(each, name) for name in names} for each in episodes] for episodes in results]


def write_page(record: Mapping[str, Any], films: Sequence[Film]) -> str:
    """Return the HTML page of a run.

    Args:
        record: Report with its ``outcomes``. The page contains it as JSON.
        films: Films of the run.
    """
    return page.page(f"Evaluation: {record['task']['env']}", _parts(record, films), record)


def _parts(record: Mapping[str, Any], films: Sequence[Film]) -> Iterator[str]:
    report = dict(record)
    yield f'<p class="note">{page.text(conditions(report))}</p>'
    for title, columns, rows in tables(report):
        yield f"<h2>{page.text(title)}</h2>"
        yield page.table(columns, rows)
    for verdict in record.get("gate", {}).get("verdicts", []):
        kind = "good" if verdict["passed"] else "bad"
        yield f'<p class="{kind}">gate, {page.text(verdict["label"])}: {page.text(verdict["text"])}</p>'
    if "repeat" in record:
        comparison = record["repeat"]
        yield f"<h2>Played again: {page.text(comparison['record'])}</h2>"
        yield page.table(repeat.COLUMNS, repeat.rows(comparison))
        yield "".join(f"<p>{page.text(said)}</p>" for said in repeat.sentences(comparison))
    yield from _films(record, films)
    yield from trials_of(record)
    yield from how_run(record)


def _films(record: Mapping[str, Any], films: Sequence[Film]) -> Iterator[str]:
    yield "<h2>Films</h2>"
    if not films:
        live = record["task"]["realtime"] or any(each["variant"].get("stream") for each in record["variants"])
        can = (
            "films need chunks in simulated time" if live else "<code>sinew eval --films 2</code> makes them"
        )
        yield f'<p class="note">No films: {can}.</p>'
        return
    other = sum(not film.same for film in films)
    batches = [each["variant"].get("batch", 1) for each in record["variants"]]
    why = (
        " The run computed several episodes in one batch, which rounds differently."
        if max(batches) > 1
        else ""
    )
    yield (
        '<p class="note">Each episode was played once more for its film; '
        + (
            f"{other} of {len(films)} films differ from the run in the bits of a command.{why}"
            if other
            else "every command was the same as in the run."
        )
        + " The camera images of the policy are at the right.</p>"
    )
    yield '<div class="films">'
    yield from (figure(record, film) for film in films)
    yield "</div>"


def figure(record: Mapping[str, Any], film: Film) -> str:
    label = record["variants"][film.variant]["label"]
    outcome = "success" if film.episode.success else "no success"
    caption = f"{label}: seed {film.episode.seed}, {film.episode.task or 'one task'}: "
    after = f" after {film.episode.steps} steps{'' if film.same else ', different from the run'}"
    kind = "good" if film.episode.success else "bad"
    return (
        '<figure><picture><source media="(prefers-reduced-motion: reduce)"'
        f' srcset="{page.webp(film.still)}"><img alt="{page.text(caption + outcome + after)}"'
        f' src="{page.webp(film.webp)}"></picture><figcaption>{page.text(caption)}'
        f'<span class="{kind}">{outcome}</span>{page.text(after)}</figcaption></figure>'
    )


def trials_of(record: Mapping[str, Any]) -> Iterator[str]:
    labels = [entry["label"] for entry in record["variants"]]
    columns = [">seed", "task", *labels]
    rows = []
    for trials in zip(*record["outcomes"], strict=True):
        cells = [
            (
                f"{'success' if t['success'] else 'no success'}, {t['steps']}{_said(t)}",
                "good" if t["success"] else "bad",
            )
            for t in trials
        ]
        rows.append(
            (len({t["success"] for t in trials}) > 1, [str(trials[0]["seed"]), trials[0]["task"], *cells])
        )
    disputed = [row for differs, row in rows if differs]
    yield "<h2>Trials</h2>"
    row = "one scene, set up for each policy" if "plan" in record else "one trial with one seed"
    met = "" if "plan" in record else ". All variants got the same world and the same noise"
    yield f'<p class="note">Each row is {row}{met}. The number is the count of control steps.</p>'
    if len(labels) > 1:
        yield f"<p>The variants have different outcomes in {len(disputed)} of {len(rows)} trials.</p>"
        yield page.table(columns, disputed) if disputed else ""
    whole = page.table(columns, [row for _, row in rows])
    yield (
        page.folded(f"all {len(rows)} trials", whole)
        if len(labels) > 1 or len(rows) > MAX_UNFOLDED
        else whole
    )


def _said(trial: Mapping[str, Any]) -> str:
    """Return a text with the judge and the judge's note for a trial on a robot. "" for a simulated episode."""
    note = f": {trial['note']}" if trial.get("note") else ""
    return f" ({trial['judge']}{note})" if "judge" in trial else ""


def how_run(record: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>How it was run</h2>"
    yield page.commands([record["command"] or "from Python"])
    # Trials on a robot do not follow from their seeds, so they cannot be repeated.
    if "plan" not in record:
        yield (
            "<p>This command repeats the same episodes, here or in another laboratory. Type the paths of the policies,"
            " and the names that are not Sinew's own, because this page does not contain them.</p>"
        )
        yield page.commands([_again(record)])
    rows: list[list[str]] = []
    for entry in record["variants"]:
        bundle, policy = entry["bundle"], entry["policy"]
        size = f"{bundle['bytes']:,}" if "bytes" in bundle else ""
        cells = [entry["label"], bundle.get("file", entry["variant"]["target"]), size, policy["id"]]
        if cells[1:] not in [row[1:] for row in rows]:
            rows.append(cells)
    yield page.table(["variant", "policy", ">bytes", "SHA-256, or the server's description"], rows)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield page.facts(
        [
            ("sinew", record["sinew"]),
            ("other packages", versions),
            ("machine", record["hardware"]),
            ("workers", record["workers"]),
            ("date", record["date"]),
        ]
    )


def _again(record: Mapping[str, Any]) -> str:
    """Return the command that repeats a record, with all names that a person has to type."""
    targets = [
        entry["variant"]["target"] for entry in record["variants"] if entry["policy"]["kind"] != "expert"
    ]
    first, *others = dict.fromkeys(targets) or [""]
    words = ["sinew", "eval", *([first] if first else []), *(f"--compare={name}" for name in others)]
    for name in task_names(Task.from_dict(record["task"])):
        words += [name.flag, name.value if isinstance(name.value, str) else json.dumps(name.value)]
    edges = (entry["variant"].get("edge_adapter") for entry in record["variants"])
    for edge in dict.fromkeys(filter(None, edges)):
        words += ["--edge-adapter", edge]
    return shlex.join([*words, "--repeat", PAGE])

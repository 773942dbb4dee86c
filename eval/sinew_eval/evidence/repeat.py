"""Repeat a recorded evaluation, perhaps on another machine: read what to play, and compare the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinew.convert.sources import resolve
from sinew.convert.sources.card import MAX_BYTES, MAX_VALUES
from sinew.core import SinewError
from sinew_client.target import LOCAL, Target
from sinew_client.typed_names import portable
from sinew_client.untrusted import named, parse_json, read_text, shown

from sinew_eval.episodes.outside import PolicyFacts, TypedNames, allowed
from sinew_eval.episodes.policies import file_hash, identity
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.evidence.page import record_in
from sinew_eval.report.report import SCHEMA
from sinew_eval.report.stats import mcnemar

REPORT = "report.json"  # name of the report that `sinew eval --out` writes
MAX_EPISODES = 1_000_000  # largest number of episodes of a variant
MAX_VARIANTS = 1000
MAX_SEED = 1 << 63
KINDS = ("bundle", "server", "expert")


@dataclass(frozen=True)
class Recorded:
    """A recorded run.

    Attributes:
        path: File of the report.
        record: Its content. Seeds, successes, steps and digests of the outcomes have been checked.
        task: The task in the record. It may name code and files, see :meth:`local`.
        variants: The variants in the record. They may name files and addresses, see :meth:`local`.
        facts: Facts about each variant's policy.
        seeds: Seeds of the episodes.
    """

    path: Path
    record: Mapping[str, Any]
    task: Task
    variants: tuple[Variant, ...]
    facts: tuple[PolicyFacts, ...]
    seeds: tuple[int, ...]

    def local(self, typed: TypedNames) -> tuple[Task, list[Variant]]:
        """Return the task and the variants with the names and policies of this machine.

        Recorded names are replaced by: policies of this package and typed policies with the recorded SHA-256, the
        typed address, and other typed names.

        Args:
            typed: Names that the person typed.

        Returns:
            The task and the variants to play.

        Raises:
            UntypedNameError: The record uses a name that is neither built in nor typed.
            SinewError: A typed policy is not in the record.
        """
        files = {each: _place(each) for each in typed.policies}
        hashes = {about.sha256 for about in self.facts if about.kind == "bundle"}
        for each, place in files.items():
            if Target.parse(place).kind == LOCAL and (sha256 := file_hash(place)) not in hashes:
                ids = ", ".join(sorted(each[:16] for each in hashes)) or "none"
                raise SinewError(
                    f"{each}: expected a policy of {self.path} (SHA-256 {ids}), got {sha256[:16]}; pass a recorded"
                    " policy"
                )
        here = replace(typed, policies=tuple(files.values()))
        return allowed(self.path, self.task, self.variants, self.facts, here)


def load(path: Path) -> dict[str, Any]:
    """Read the record in ``report.json`` or ``report.html`` of ``sinew eval --out``.

    Args:
        path: The file.

    Returns:
        The record.

    Raises:
        SinewError: The file is not a report, or is too large.
    """
    try:
        text = read_text(path, MAX_BYTES)
        if text.lstrip()[:1] == "<":
            inside = record_in(text)
            if inside is None:
                raise SinewError(f"{path}: expected a page of `sinew eval --out`, got one without a record")
            text = inside
        record = parse_json(text, max_values=MAX_VALUES)
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SinewError(f"{path}: expected a report of `sinew eval --out`, got {error}") from None
    schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if schema != SCHEMA:
        raise SinewError(f"{path}: expected schema {SCHEMA}, got {shown(schema, 60)}")
    return dict(record)


def check_place(out: Path, task: Task, variants: Sequence[Variant]) -> None:
    """Check that a new report does not replace the report of another evaluation.

    Args:
        out: Folder of the run.
        task: The task.
        variants: The variants.

    Raises:
        SinewError: The folder contains the report of another evaluation, or another kind of file with this name.
    """
    if not (out / REPORT).exists():
        return
    before = load(out / REPORT)
    try:
        labels = ", ".join(named(each["label"]) for each in before["variants"])
        had = [{**portable(each["variant"]), "target": each["policy"]["id"]} for each in before["variants"]]
        env = named(before["task"]["env"])
    except (KeyError, TypeError) as error:
        raise SinewError(
            f"{out / REPORT}: expected a report of `sinew eval --out`, got none ({error})"
        ) from None
    new_records = [{**each.record(), "target": identity(each.target)["id"]} for each in variants]
    now = {"task": portable(task.record()), "variants": portable(new_records)}
    if portable(before.get("task")) != now["task"] or any(each not in now["variants"] for each in had):
        raise SinewError(
            f"--out {out}: the folder contains the report of another evaluation ({labels} on {env}), which would be"
            " replaced; choose a new folder"
        )


def read(path: Path) -> Recorded:
    """Read the run of a report. No other file is opened.

    Args:
        path: The report.

    Returns:
        The run.

    Raises:
        SinewError: The file is not a report, or contains no outcomes.
    """
    record = load(path)
    with SinewError.at(path, SinewError):
        return _recorded(path, record)


def _recorded(path: Path, record: dict[str, Any]) -> Recorded:
    if "plan" in record:
        raise SinewError(
            "expected an evaluation in simulation, got trials on a robot, which cannot be repeated"
        )
    if "outcomes" not in record:
        raise SinewError("expected the outcome of each episode, got none; repeat the run with --out")
    task = Task.from_dict(record.get("task"))
    variants, facts = [], []
    for index, entry in enumerate(variant_entries(record)):
        with SinewError.at(f"variants[{index}]", SinewError):
            variants.append(Variant.from_dict(entry.get("variant")))
            facts.append(_facts(entry))
    outcomes = checked_outcomes(record, len(variants))
    seeds = [tuple(each["seed"] for each in trials) for trials in outcomes]
    if len(set(seeds)) != 1 or len(set(seeds[0])) != len(seeds[0]) or not seeds[0]:
        raise SinewError(
            f"outcomes: expected the same seeds, each once, for each of the {len(variants)} variants, got other seeds"
        )
    return Recorded(path, record, task, tuple(variants), tuple(facts), seeds[0])


def variant_entries(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the variants in a report.

    Raises:
        SinewError: A variant has no label.
    """
    entries = record.get("variants")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_VARIANTS:
        raise SinewError(f"variants: expected a list of 1 to {MAX_VARIANTS}, got {shown(entries)}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("label"), str):
            raise SinewError(f"variants[{index}]: expected an object with a label, got {shown(entry)}")
    return entries


def checked_outcomes(record: Mapping[str, Any], count: int) -> list[list[dict[str, Any]]]:
    """Check the outcomes of a report.

    Args:
        record: The report.
        count: Number of variants.

    Returns:
        The episodes of each variant.

    Raises:
        SinewError: The outcomes have another form, or an episode has no seed, success, steps or digest.
    """
    outcomes = record["outcomes"]
    if not isinstance(outcomes, list) or len(outcomes) != count:
        raise SinewError(f"outcomes: expected a list for each of {count} variants, got {shown(outcomes)}")
    for trials in outcomes:
        if not isinstance(trials, list) or len(trials) > MAX_EPISODES:
            raise SinewError(f"outcomes: expected a list of at most {MAX_EPISODES}, got {shown(trials)}")
        for each in trials:
            fits = (
                isinstance(each, dict)
                and _is_whole(each.get("seed"), MAX_SEED)
                and isinstance(each.get("success"), bool)
                and _is_whole(each.get("steps"), MAX_SEED)
                and isinstance(each.get("digest"), str)
                and isinstance(each.get("task", ""), str)
            )
            if not fits:
                raise SinewError(
                    "outcomes: expected episodes with a seed from 0, success, steps and digest, got"
                    f" {shown(each)}"
                )
    return outcomes


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most


def _facts(entry: Mapping[str, Any]) -> PolicyFacts:
    about = policy_of(entry)
    edge = entry.get("edge_adapter")
    edge_id = edge.get("id", "") if isinstance(edge, dict) else ""
    if not isinstance(edge_id, str):
        raise SinewError(f"edge_adapter.id: expected a text, got {shown(edge_id)}")
    return PolicyFacts(about["kind"], about["id"] if about["kind"] == "bundle" else "", edge_id)


def policy_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind and the id of a variant's policy in a report.

    Raises:
        SinewError: The kind or the id is missing.
    """
    about = entry.get("policy")
    if not isinstance(about, dict) or about.get("kind") not in KINDS or not isinstance(about.get("id"), str):
        raise SinewError(
            f"policy: expected an object with a kind of {', '.join(KINDS)} and an id, got {shown(about)}"
        )
    return about


def _place(name: str) -> str:
    return name if Target.parse(name).kind != LOCAL else str(resolve(name))


def compare(
    recorded: Recorded, report: Mapping[str, Any], results: Sequence[Sequence[Episode]]
) -> dict[str, Any]:
    """Compare a recorded run with its repetition.

    Args:
        recorded: The recorded run.
        report: Report of the repetition.
        results: Episodes of the repetition, for each variant.

    Returns:
        A dict with three fields:

        * ``conditions``: each condition that differs, as name -> (recorded value, present value).
        * ``variants``: for each variant the episodes with equal commands, the episodes with the same outcome after
          the same steps, the episodes with the same outcome, and the trials whose outcome changed.
        * ``passed``: True if no outcome changed.
    """
    variants = []
    for index, (entry, episodes) in enumerate(zip(report["variants"], results, strict=True)):
        there = {each["seed"]: each for each in recorded.record["outcomes"][index]}
        here = {each.seed: each for each in episodes}
        changed = [
            {
                "seed": seed,
                "there": {"success": bool(old["success"]), "steps": old["steps"]},
                "here": {"success": here[seed].success, "steps": here[seed].steps},
            }
            for seed, old in there.items()
            if bool(old["success"]) != here[seed].success
        ]
        steps = sum(
            bool(old["success"]) == here[seed].success and old["steps"] == here[seed].steps
            for seed, old in there.items()
        )
        bits = sum(bool(old["digest"]) and old["digest"] == here[seed].digest for seed, old in there.items())
        test = mcnemar(
            {seed: bool(old["success"]) for seed, old in there.items()},
            {seed: each.success for seed, each in here.items()},
        )
        variants.append(
            {
                "label": entry["label"],
                "episodes": len(there),
                "equal_commands": bits,
                "equal_steps": steps,
                "equal_outcomes": len(there) - len(changed),
                "there": sum(bool(old["success"]) for old in there.values()),
                "here": sum(each.success for each in here.values()),
                "p_value": round(test.p_value, 6),
                "changed": changed,
            }
        )
    return {
        "record": recorded.path.name,
        "conditions": {name: [a, b] for name, a, b in _conditions(recorded.record, report) if a != b},
        "variants": variants,
        "passed": not any(each["changed"] for each in variants),
    }


def _conditions(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, recorded value, present value) for each condition on which the outcome of an episode may depend.
    Recorded values are cut to a maximum length.
    """

    def bounded(value: Any) -> Any:
        return value if value is None or isinstance(value, (bool, int, float)) else named(value, 200)

    for name in ("sinew", "hardware", "control_hz"):
        yield name, bounded(there.get(name)), here[name]
    recorded, new = there.get("versions"), here["versions"]
    old = recorded if isinstance(recorded, dict) else {}
    for name in sorted({*new, *list(old)[:100]}):
        yield named(name), bounded(old.get(name)), new.get(name)
    for before, now in zip(there["variants"], here["variants"], strict=True):
        yield f"policy of {now['label']}", bounded(before["policy"]["id"]), now["policy"]["id"]
        yield f"precision of {now['label']}", bounded(before.get("dtype")), now["dtype"]
        for name in ("engine", "device", "handover"):
            yield f"{name} of {now['label']}", bounded(before["variant"].get(name)), now["variant"].get(name)


COLUMNS = (
    "repeated",
    ">episodes",
    ">every command equal",
    ">same steps",
    ">same outcome",
    ">wins there",
    ">here",
    ">p (McNemar)",
)


def rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Return one row of cells for each variant, in the order of ``COLUMNS``."""
    names = ("episodes", "equal_commands", "equal_steps", "equal_outcomes", "there", "here")
    return [
        [each["label"], *(str(each[name]) for name in names), f"{each['p_value']:.3g}"]
        for each in comparison["variants"]
    ]


def sentences(comparison: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each difference. If there is no difference, return one sentence that states this."""
    lines = [
        f"differs: {name}: {was} there, {now} here" for name, (was, now) in comparison["conditions"].items()
    ]
    for each in comparison["variants"]:
        for trial in each["changed"]:
            there, here = (
                f"{'success' if side['success'] else 'no success'} after {side['steps']} steps"
                for side in (trial["there"], trial["here"])
            )
            lines.append(f"differs: {each['label']}, seed {trial['seed']}: {there} there, {here} here")
    if comparison["passed"]:
        bits = all(each["equal_commands"] == each["episodes"] for each in comparison["variants"])
        lines.append(f"equal: {'every command' if bits else 'the outcome'} of every episode")
    return lines

"""A recorded evaluation played again, perhaps on another machine: what to play, and what came out equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sinew.convert.sources import ASSETS, resolve
from sinew.core import SinewError
from sinew.eval.evidence.page import record_in
from sinew.eval.policies import EXPERT, identity
from sinew.eval.report.report import SCHEMA
from sinew.eval.report.stats import mcnemar
from sinew.eval.runner import Episode
from sinew.eval.settings import Task, Variant

REPORT = "report.json"  # of `sinew eval --out`
MAX_BYTES = 1 << 28  # of a record, a page's films included


@dataclass(frozen=True)
class Recorded:
    """A run that was recorded. record: its report with the outcomes. variants: as recorded, their targets included."""

    path: Path
    record: Mapping[str, Any]
    task: Task
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]

    def found(self, given: Sequence[str]) -> list[Variant]:
        """Return the variants with the policies that are here: of a bundle the file whose SHA-256 is the recorded one,
        among ``given``, where it was, beside the record, and the embedded ones.

        given: bundles or addresses, in any order. Raises :class:`SinewError` for a bundle that is nowhere, or a target
        that nothing is played with.
        """
        places = {name: _place(name) for name in given}
        used: set[str] = set()
        variants = []
        for variant, entry in zip(self.variants, self.record["variants"], strict=True):
            policy = entry["policy"]
            if policy["kind"] == "bundle":
                target = self._file(variant.target, policy["id"], places, used)
            elif policy["kind"] == "server":
                addresses = [name for name in given if "://" in name]
                target = addresses[0] if addresses else variant.target
                used.update(addresses[:1])
            else:
                target = EXPERT
            variants.append(replace(variant, target=target))
        if left := [name for name in given if name not in used]:
            ids = ", ".join(sorted({entry["policy"]["id"][:16] for entry in self.record["variants"]}))
            got = _id(places[left[0]])
            raise SinewError(f"{left[0]}: expected a policy of {self.path} (SHA-256 {ids}), got {got[:16]}")
        return variants

    def _file(self, recorded: str, wanted: str, places: Mapping[str, str], used: set[str]) -> str:
        name = recorded.replace("\\", "/").rsplit("/", 1)[-1]
        fitting = {
            given: place for given, place in places.items() if "://" not in place and _id(place) == wanted
        }
        used.update(fitting)
        if fitting:  # of several with the same bytes that of the same name
            return next(
                (each for each in fitting.values() if Path(each).name == name), next(iter(fitting.values()))
            )
        for path in (Path(recorded), self.path.parent / name, ASSETS / name):
            if path.exists() and _id(str(path)) == wanted:
                return str(path)
        raise SinewError(
            f"{self.path}: expected the bundle {name} (SHA-256 {wanted[:16]}) as it was recorded, got none with these"
            f" bytes: sinew eval BUNDLE --repeat {self.path.name}"
        )


def load(path: Path) -> dict[str, Any]:
    """Return the record in ``report.json`` or ``report.html`` of ``sinew eval --out``. Raises :class:`SinewError`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SinewError(f"{path}: expected at most {MAX_BYTES} bytes, got {path.stat().st_size}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SinewError(
            f"{path}: expected a report of `sinew eval --out`, got bytes that are no text"
        ) from None
    if text.lstrip()[:1] == "<":
        found = record_in(text)
        if found is None:
            raise SinewError(f"{path}: expected a page of `sinew eval --out`, got one without a record")
        text = found
    try:
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SinewError(f"{path}: expected a report of `sinew eval --out`, got {str(error)[:200]}") from None
    schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if schema != SCHEMA:
        raise SinewError(f"{path}: expected schema {SCHEMA}, got {str(schema)[:60]!r}")
    return dict(record)


def check_place(out: Path, task: Task, variants: Sequence[Variant]) -> None:
    """Raise :class:`SinewError` where a folder has a report of what the new one would not show: that of another
    evaluation, or of something else."""
    if not (out / REPORT).exists():
        return
    before = load(out / REPORT)
    had = [{**each["variant"], "target": each["policy"]["id"]} for each in before.get("variants", [])]
    asked = [{**each.to_dict(), "target": identity(each.target)["id"]} for each in variants]
    now = json.loads(json.dumps({"task": task.to_dict(), "variants": asked}))
    if before.get("task") != now["task"] or any(each not in now["variants"] for each in had):
        labels = ", ".join(each["label"] for each in before["variants"])
        raise SinewError(
            f"--out {out}: expected a new folder, or that of the same evaluation, got one with the report of {labels}"
            f" on {before['task']['env']}, which would be replaced"
        )


def read(path: Path) -> Recorded:
    """Return the run of a report. Raises :class:`SinewError` for what is none, or holds no outcomes."""
    record = load(path)
    try:
        return _recorded(path, record)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SinewError(
            f"{path}: expected a report of `sinew eval --out`, got {type(error).__name__}: {str(error)[:200]}"
        ) from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant}, which is no number")


def _recorded(path: Path, record: Any) -> Recorded:
    if "plan" in record:
        raise SinewError(
            f"{path}: expected episodes that follow from their seeds, got trials on a robot in real time"
        )
    if "outcomes" not in record:
        raise SinewError(
            f"{path}: expected the outcome of each episode, got none; play the run anew with --out"
        )
    task = Task(**_known(path, "task", record["task"], Task))
    variants = []
    for entry in record["variants"]:
        values = _known(path, "variant", entry["variant"], Variant)
        variants.append(Variant.from_dict({"latency": "0", **values}))
        entry["policy"]["kind"], entry["policy"]["id"] = (
            str(entry["policy"]["kind"]),
            str(entry["policy"]["id"]),
        )
    outcomes = record["outcomes"]
    seeds = [tuple(int(each["seed"]) for each in trials) for trials in outcomes]
    if (
        len(outcomes) != len(variants)
        or not seeds
        or len(set(seeds)) != 1
        or len(set(seeds[0])) != len(seeds[0])
    ):
        raise SinewError(
            f"{path}: expected the same seeds of each of {len(variants)} variants, each once, got others"
        )
    if not seeds[0] or min(seeds[0]) < 0:
        raise SinewError(f"{path}: expected seeds from 0, got {seeds[0][:1]}")
    for trials in outcomes:
        for each in trials:
            bool(each["success"]), int(each["steps"]), str(each["digest"])
    return Recorded(path, record, task, tuple(variants), seeds[0])


def _known(path: Path, name: str, values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise SinewError(
            f"{path}: {name}: expected fields that this version knows, got {', '.join(unknown)[:100]}"
        )
    return dict(values)


def _place(name: str) -> str:
    return name if "://" in name or name == EXPERT else str(resolve(name))


def _id(target: str) -> str:
    return str(identity(target)["id"])


# ----------------------------------------------------------------------------- comparison


def compare(
    recorded: Recorded, report: Mapping[str, Any], results: Sequence[Sequence[Episode]]
) -> dict[str, Any]:
    """Return what is equal and what differs between a recorded run and its repetition.

    conditions: name -> what it was there and is here, where the two differ. variants: of each the episodes whose every
    command was equal, those with the same outcome after as many steps, those with the same outcome, and the trials
    whose outcome changed. passed: no outcome changed.
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
        "record": str(recorded.path),
        "conditions": {name: [a, b] for name, a, b in _conditions(recorded.record, report) if a != b},
        "variants": variants,
        "passed": not any(each["changed"] for each in variants),
    }


def _conditions(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What an outcome may depend on, recorded and present."""
    for name in ("sinew", "hardware", "control_hz"):
        yield name, there.get(name), here[name]
    old, new = there.get("versions", {}), here["versions"]
    for name in sorted({*old, *new}):
        yield name, old.get(name), new.get(name)
    for before, now in zip(there["variants"], here["variants"], strict=True):
        yield f"policy of {now['label']}", before["policy"]["id"], now["policy"]["id"]
        yield f"precision of {now['label']}", before.get("dtype"), now["dtype"]
        for name in ("engine", "device", "handover"):
            yield f"{name} of {now['label']}", before["variant"].get(name), now["variant"].get(name)


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


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of ``COLUMNS`` for each variant."""
    names = ("episodes", "equal_commands", "equal_steps", "equal_outcomes", "there", "here")
    return [
        [each["label"], *(str(each[name]) for name in names), f"{each['p_value']:.3g}"]
        for each in found["variants"]
    ]


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Return what differs, a line each, and that nothing does where that is so."""
    said = [f"differs: {name}: {was} there, {now} here" for name, (was, now) in found["conditions"].items()]
    for each in found["variants"]:
        for trial in each["changed"]:
            there, here = (
                f"{'success' if side['success'] else 'no success'} after {side['steps']} steps"
                for side in (trial["there"], trial["here"])
            )
            said.append(f"differs: {each['label']}, seed {trial['seed']}: {there} there, {here} here")
    if found["passed"]:
        bits = all(each["equal_commands"] == each["episodes"] for each in found["variants"])
        said.append(f"equal: {'every command' if bits else 'the outcome'} of every episode")
    return said

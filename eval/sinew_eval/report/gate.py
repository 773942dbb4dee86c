"""The success gate: a recorded run of a reference policy, and the rule with which later runs are compared.

A gate file fixes the protocol (environment, seeds, replan rule, latency, chunk merging). It also contains the seeds
at which the reference failed, so any part of its seeds allows a paired comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinew.core import SinewError, statistics
from sinew_client.control import AS_IS
from sinew_client.typed_names import comparable
from sinew_client.untrusted import read_json, shown

from sinew_eval.episodes.outside import TypedNames, allowed_task
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, checked_protocol
from sinew_eval.report import stats

SCHEMA = "sinew.gate/1"
# The protocol of a gate contains these fields of the task.
TASK = ("env", "env_options", "reset_options", "adapter", "noise")
MAX_BYTES = 1 << 24  # largest file of a gate, in bytes
MAX_EPISODES = 1_000_000
MAX_SEED = 1 << 63
GATES = Path(__file__).parents[1] / "gates"  # gates of the built-in tasks


@dataclass(frozen=True, slots=True)
class GateRule:
    """The rule by which a gate (a recorded run of a reference policy) judges later runs. A run fails if any of the
    conditions is true.

    Attributes:
        floor: The run fails if the upper end of its 95 % interval is below this success rate.
        max_drop: The run fails if its success is lower than the reference's by more than this, and the p-value of
            McNemar's test is below ``alpha``.
        alpha: Level of significance for ``max_drop``.
        inside: True to fail a run whose success is below the lower end of the reference's interval over the same
            seeds.
    """

    floor: float = 0.85
    max_drop: float = 0.05
    alpha: float = 0.01
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Gate:
    """A recorded run with its protocol and rule.

    Attributes:
        protocol: Fields of the task and the variant, by name.
        first_seed: First seed of the run.
        episodes: Number of episodes.
        failed_seeds: Seeds at which the reference failed.
        reference: Policy, date and machine of the recorded run.
        rule: The rule.
        path: The file, for messages. None if the gate was not read from a file.
    """

    protocol: dict[str, Any]
    first_seed: int
    episodes: int
    failed_seeds: tuple[int, ...]
    reference: dict[str, Any]
    rule: GateRule = GateRule()

    path: Path | None = field(default=None, compare=False)

    def task(self, typed: TypedNames | None = None) -> Task:
        """Return the task to play. Actions are executed unchanged.

        Args:
            typed: Names that the person typed. None if there is none.

        Returns:
            The task.

        Raises:
            UntypedNameError: The gate uses an environment, an adapter or options that are neither built in nor typed.
        """
        task = Task(**{name: self.protocol[name] for name in TASK}, motion=dict(AS_IS))
        return allowed_task(self.path or "gate", task, typed or TypedNames())

    @property
    def outcomes(self) -> dict[int, bool]:
        failed = set(self.failed_seeds)
        return {seed: seed not in failed for seed in range(self.first_seed, self.first_seed + self.episodes)}

    def judge(self, episodes: Sequence[Episode]) -> tuple[bool, str]:
        """Judge a run.

        Args:
            episodes: Episodes of the run. Their seeds must be in the record.

        Returns:
            True if the run passes, and the reason.

        Raises:
            SinewError: A seed is not in the record.
        """
        run = {e.seed: e.success for e in episodes}
        recorded = self.outcomes
        if foreign := sorted(run.keys() - recorded.keys()):
            last = self.first_seed + self.episodes - 1
            raise SinewError(
                f"gate: the record has seeds {self.first_seed} to {last}, the run has {foreign[0]}; choose --seed and"
                " --episodes in this range"
            )
        wins, count = sum(run.values()), len(run)
        reference_wins = sum(recorded[seed] for seed in run)
        low, high = statistics.wilson(reference_wins, count)
        test = stats.mcnemar({seed: recorded[seed] for seed in run}, run)
        text = (
            f"{wins}/{count} against {reference_wins}/{count} recorded"
            f" (interval {100 * low:.1f} to {100 * high:.1f} %), McNemar p = {test.p_value:.3g}"
        )
        faults = self._faults(wins, count, reference_wins, test.p_value)
        if self.fails_from(run):
            text += f"; of {count} episodes, at most {self.fails_from(run) - 1} may be lost"
        return not faults, f"{'fails' if faults else 'passes'}: {'; '.join([text, *faults])}"

    def fails_from(self, seeds: Iterable[int]) -> int:
        """Return how many episodes a run must lose to fail the gate.

        Only episodes that the reference won count. The run is assumed to win all others.

        Args:
            seeds: Seeds of the run.

        Returns:
            The number of lost episodes. 0 if the run cannot fail, because it has too few episodes.
        """
        recorded = self.outcomes
        outcomes = [recorded[seed] for seed in seeds]
        count, won = len(outcomes), sum(outcomes)

        def fails(lost: int) -> bool:
            # Assume that the run wins the episodes that the reference lost. These episodes, whose outcomes differ,
            # count in favour of the run.
            p_value = stats.binomial_p(lost, count - won)
            return bool(self._faults(count - lost, count, won, p_value))

        # Use a binary search: a run that loses one more episode still fails every part of the rule that it
        # failed before.
        low, high = 1, won + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle + 1, high)
        return low if low <= won else 0

    def _faults(self, wins: int, count: int, reference_wins: int, p_value: float) -> list[str]:
        """List the parts of the rule that a run breaks.

        Args:
            wins: Successful episodes of the run.
            count: Episodes of the run.
            reference_wins: Successful episodes of the reference over the same seeds.
            p_value: P-value of McNemar's test.

        Returns:
            One text for each broken part.
        """
        low = statistics.wilson(reference_wins, count)[0]
        upper = statistics.wilson(wins, count)[1]
        drop = (reference_wins - wins) / count
        faults = []
        if upper < self.rule.floor:
            faults.append(
                f"the upper end of the interval, {100 * upper:.1f} %, is below {100 * self.rule.floor:g} %"
            )
        if drop > self.rule.max_drop and p_value < self.rule.alpha:
            faults.append(f"{100 * drop:.1f} points below the reference at p < {self.rule.alpha:g}")
        if self.rule.inside and wins / count < low:
            faults.append("below the recorded interval")
        return faults

    def held(
        self, task: Task, typed_fields: Mapping[str, Any], flags: Mapping[str, Any]
    ) -> tuple[Task, dict[str, Any]]:
        """Combine this gate with what the user typed. Return the gate's task, and the fields of the variant that is
        compared with the gate.

        The task is always the gate's. Fields of the variant may differ, because they may be the subject of the test.

        Args:
            task: The task that was typed.
            typed_fields: Fields of the variant. None for a field that was not typed.
            flags: Fields of the task. None for a field that was not typed.

        Returns:
            The task, and the fields of the variant.

        Raises:
            SinewError: Another task was typed.
            UntypedNameError: See :meth:`task`.
        """
        for name, flag in flags.items():
            typed = getattr(task, name)
            if flag is not None and comparable(typed) != comparable(self.protocol[name]):
                raise SinewError(
                    f"--{name.replace('_', '-')}: the gate requires {shown(self.protocol[name])}, got {flag!r}"
                )
        if task.realtime:
            raise SinewError("a gate is judged with simulated latency, not in real time; omit --realtime")
        if task.motion is not None:
            raise SinewError("--motion: a gate executes actions unchanged; omit --motion")
        own = {name: self.protocol[name] if value is None else value for name, value in typed_fields.items()}
        names = {name: getattr(task, name) for name, flag in flags.items() if flag and name != "noise"}
        return self.task(TypedNames(**names)), own

    def judge_report(self, report: dict[str, Any]) -> bool:
        """Judge every variant of a report, and store the verdicts under ``gate``.

        Args:
            report: A report that contains its episodes.

        Returns:
            True if all variants pass.
        """
        verdicts = []
        for entry, episodes in zip(report["variants"], report["episodes"], strict=True):
            passed, text = self.judge(episodes)
            verdicts.append({"label": entry["label"], "passed": passed, "text": text})
        report["gate"] = {"passed": all(v["passed"] for v in verdicts), "verdicts": verdicts}
        return bool(report["gate"]["passed"])

    def write(self, path: Path) -> None:
        low, high = statistics.wilson(self.episodes - len(self.failed_seeds), self.episodes)
        values = {
            "schema": SCHEMA,
            "protocol": self.protocol,
            "first_seed": self.first_seed,
            "episodes": self.episodes,
            "failed_seeds": list(self.failed_seeds),
            # The rate is for readers. A gate is judged from the seeds.
            "success": round(1 - len(self.failed_seeds) / self.episodes, 4),
            "interval": [round(low, 4), round(high, 4)],
            "rule": {name: getattr(self.rule, name) for name in GateRule.__slots__},
            "reference": self.reference,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n")


def read_gate(path: Path) -> Gate:
    """Read a gate.

    Args:
        path: A file, or the name of a built-in task for the gate of this package.

    Returns:
        The gate.

    Raises:
        SinewError: The file is missing or is not a gate.
    """
    if not path.exists() and path.parent == Path() and not path.suffix:
        names = sorted(each.stem for each in GATES.glob("*.json"))
        if path.name not in names:
            raise SinewError(f"{path}: expected a gate's file, or one of {', '.join(names)}")
        path = GATES / f"{path.name}.json"
    try:
        values = read_json(path, MAX_BYTES)
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SinewError(
            f"{path}: not a gate file ({error}); record one with `sinew eval --record-gate`"
        ) from None
    with SinewError.at(f"{path}: not a gate file", SinewError):
        return _gate(path, values)


def _gate(path: Path, values: Any) -> Gate:
    schema = values.get("schema") if isinstance(values, dict) else values
    if schema != SCHEMA:
        raise SinewError(
            f"expected schema {SCHEMA}, got {shown(schema)}; record the gate again with this version of Sinew"
        )
    first = _whole("first_seed", values.get("first_seed"), 0, MAX_SEED)
    count = _whole("episodes", values.get("episodes"), 1, MAX_EPISODES)
    failed = values.get("failed_seeds")
    if not isinstance(failed, list):
        raise SinewError(f"failed_seeds: expected a list, got {shown(failed)}")
    for seed in failed:
        _whole("failed_seeds", seed, first, first + count - 1)
    reference = values.get("reference")
    if not isinstance(reference, dict):
        raise SinewError(f"reference: expected an object, got {shown(reference)}")
    protocol = checked_protocol(values.get("protocol"))
    return Gate(protocol, first, count, tuple(failed), reference, _rule(values.get("rule")), path)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SinewError(f"{name}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def _rule(values: Any) -> GateRule:
    if not isinstance(values, dict) or values.keys() - set(GateRule.__slots__):
        raise SinewError(
            f"rule: expected an object with the keys {', '.join(GateRule.__slots__)}, got {shown(values)}"
        )
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (isinstance(value, bool) if name == "inside" else number and 0 <= value <= 1):
            expected = "true or false" if name == "inside" else "a number from 0 to 1"
            raise SinewError(f"rule.{name}: expected {expected}, got {shown(value)}")
    return GateRule(**values)


def record(report: dict[str, Any]) -> Gate:
    """Build a gate from the first variant of a report.

    Raises:
        SinewError: The run was in real time.
    """
    entry = report["variants"][0]
    task, variant = report["task"], entry["variant"]
    if task["realtime"]:
        raise SinewError(
            "a gate needs simulated latency, because real time depends on the machine; omit --realtime"
        )
    protocol = {
        **{name: task[name] for name in TASK},
        **{name: variant[name] for name in ("replan", "latency", "handover", "solver_steps")},
    }
    reference = {
        "policy": entry["policy"],
        "dtype": entry["dtype"],
        "date": report["date"],
        "sinew": report["sinew"],
        "hardware": report["hardware"],
        "command": report["command"],
    }
    return Gate(
        protocol, report["seeds"]["first"], report["seeds"]["count"], tuple(entry["failed_seeds"]), reference
    )

"""A session: blind trials of policies on one robot, in an order that is drawn in advance. Every trial survives a
kill.

    sitting.json     the plan, written before the first trial
    episodes.jsonl   a line when a trial is prepared, and its episode when it ends, written to disk at once
    report.json      the report for `sinew leaderboard`, rewritten after each trial

The design is a randomised complete block design, and a scene is a block. Every policy gets one trial in each scene,
in an order that is drawn per scene. The k-th chunk of each policy has the noise of (scene, k). A trial that was
interrupted or discarded does not count and is repeated.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from sinew.core import SinewError
from sinew_client.untrusted import named, parse_json, read_json, shown

from sinew_eval.episodes import campaign, episode_log
from sinew_eval.episodes.player import key
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.report.stats import anytime_p

PLAN, FORMAT = "sitting.json", 1
# Matches the name of a trial: its number, and the number of a later attempt.
TRIAL = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?")
SHOWN_AT = 0.05  # a sequential session ends at this p-value


@dataclass(frozen=True, slots=True)
class PendingTrial:
    """The next trial of a session.

    Attributes:
        number: Number of the trial, from 1.
        total: Number of trials in the session.
        scene: Number of the scene, from 1.
        seed: Seed of the scene.
        variant: Index of the policy.
        name: Name of the trial's files, with the number of the attempt.
        again: True if the scene was set up before.
    """

    number: int
    total: int
    scene: int
    seed: int
    variant: int
    name: str
    again: bool


class TrialSession:
    """The trials in a folder: those that were played, and the next one.

    Args:
        out: The folder.
        task: The task.
        variants: The policies.
        scenes: Number of scenes.
        seed: Seed of the first scene.
        order: Number that determines the order of the trials. None to draw one.
        sequential: True to end as soon as a sequential test shows a difference between two policies
            (:func:`anytime_p`).
        rules: Values of the options that define how each trial is driven and ends, by the option's name.

    Raises:
        SinewError: The folder contains another plan.
    """

    def __init__(
        self,
        out: Path,
        task: Task,
        variants: Sequence[Variant],
        scenes: int,
        seed: int,
        order: int | None = None,
        sequential: bool = False,
        rules: Mapping[str, Any] = MappingProxyType({}),
    ):
        if sequential and len(variants) != 2:
            raise SinewError(f"--sequential: expected two policies to compare, got {len(variants)}")
        self.out, self.task, self.variants = out, task, list(variants)
        self.scenes, self.seed, self.sequential = scenes, seed, sequential
        # Two servers with the same name have the same key, so the next line adds a number.
        names = [key(task, variant) for variant in variants]
        self.keys = [f"{name} #{names[:at].count(name) + 1}" for at, name in enumerate(names)]
        self.order = self._planned(order, rules)
        self._schedule = [
            (scene, int(policy))
            for scene in range(scenes)
            for policy in np.random.default_rng([self.order, scene]).permutation(len(variants))
        ]
        # Key: number of a trial; value: names of its attempts.
        self._begun: dict[int, list[str]] = defaultdict(list)
        log = out / campaign.LOG
        data = episode_log.read_log_file(log) if log.exists() else b""
        for line in data.splitlines():
            if line.startswith(b'{"begun"') and line.endswith(b"}"):
                name = _begun(log, line)
                self._begun[int(name.partition("-")[0])].append(name)
        self.episodes = []
        for (name, _), each in episode_log.episodes_of(data):
            if name not in self.keys:
                raise SinewError(f"{log}: expected trials of the planned policies, got one of {named(name)}")
            self.episodes.append((self.keys.index(name), each))

    def _planned(self, order: int | None, rules: Mapping[str, Any]) -> int:
        """Write the plan, or check the plan of a session that continues.

        Args:
            order: Number that determines the order of the trials. None for the number in the plan, or a random one.
            rules: Options that define how each trial is driven and ends.

        Returns:
            The number that determines the order.

        Raises:
            SinewError: The folder contains another plan.
        """
        asked: dict[str, Any] = {"format": FORMAT, "scenes": self.scenes, "seed": self.seed}
        asked |= {"sequential": self.sequential, "policies": self.keys, **rules}
        path = self.out / PLAN
        if path.exists():
            try:
                before = read_json(path)
            except (OSError, ValueError) as error:
                raise SinewError(f"{path}: expected the plan of a session, got {error}") from None
            if not isinstance(before, dict):
                raise SinewError(f"{path}: expected the plan of a session, got {shown(before)}")
            asked["order"] = before.get("order") if order is None else order
            for name, value in asked.items():
                if (planned := before.get(name)) != value:
                    if name == "policies" and isinstance(planned, list):
                        name, planned, value = _unlike(path, planned, value)
                    raise SinewError(
                        f"--out {self.out}: the session in this folder was planned with {name} {named(planned)}, got"
                        f" {value!r}; use the planned value, or choose a new folder"
                    )
        elif (self.out / campaign.LOG).exists():
            raise SinewError(
                f"--out {self.out}: this folder contains a run of `sinew eval`; choose a new folder"
            )
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            asked["order"] = secrets.randbits(32) if order is None else order
            episode_log.write_whole(path, json.dumps(asked, indent=2).encode() + b"\n")
        if not _is_order(asked["order"]):
            raise SinewError(f"{path}: order: expected a whole number from 0, got {shown(asked['order'])}")
        return int(asked["order"])

    def results(self) -> list[list[Episode]]:
        """Return the trials that count, for each variant in the order of the scenes."""
        return [
            sorted(
                (each for at, each in self.episodes if at == index and each.counted),
                key=lambda each: each.seed,
            )
            for index in range(len(self.variants))
        ]

    def pairs(self) -> list[tuple[bool, ...]]:
        """Return the outcomes of the trials, scene by scene, for the scenes that every policy has completed."""
        wins = [{each.seed: each.success for each in episodes} for episodes in self.results()]
        met = sorted(set.intersection(*(set(each) for each in wins)))
        return [tuple(each[seed] for each in wins) for seed in met]

    @property
    def p(self) -> float:
        """Return the p-value of equal success of two policies, which is valid at any time."""
        return anytime_p([first for first, second in self.pairs() if first != second])

    def due(self) -> PendingTrial | None:
        """Return the next trial. None if the plan is complete."""
        done = {(each.seed - self.seed, index) for index, each in self.episodes if each.counted}
        for number, (scene, variant) in enumerate(self._schedule, 1):
            if (scene, variant) not in done:
                first = 1 + scene * len(self.variants)
                if self.sequential and number == first and self.p <= SHOWN_AT:
                    return None
                attempt = len(self._begun[number]) + 1
                again = any(self._begun[each] for each in range(first, number + 1))
                name = f"{number:03}" if attempt == 1 else f"{number:03}-{attempt}"
                total = len(self._schedule)
                return PendingTrial(number, total, scene + 1, self.seed + scene, variant, name, again)
        return None

    def begin(self, turn: PendingTrial) -> None:
        """Log that a trial is prepared, so that an interrupted trial is known."""
        self._append(json.dumps({"begun": turn.name, "seed": turn.seed}).encode() + b"\n")
        self._begun[turn.number].append(turn.name)

    def end(self, turn: PendingTrial, episode: Episode) -> None:
        """Store the episode of a finished trial."""
        self._append(episode_log.line(self.keys[turn.variant], episode))
        self.episodes.append((turn.variant, episode))

    def take(self, trial: str) -> str:
        """Return the name under which a trial's frames are stored. The folder may also contain frames of other
        sessions.
        """
        return f"trial {trial} of {self.order}"

    def _append(self, line: bytes) -> None:
        with campaign.open_log(self.out / campaign.LOG) as file:
            episode_log.append(file, line)
            os.fsync(file.fileno())

    def plan(self, labels: Sequence[str]) -> dict[str, Any]:
        """Describe the plan.

        Args:
            labels: Short names of the policies.

        Returns:
            The plan, whether it was followed, and the trials that do not count.
        """
        ended = {each.trial for _, each in self.episodes}
        played, complete = len(self.pairs()), self.due() is None
        if self.sequential:
            text = (
                f"Sequential: a test after each scene, at most {self.scenes}; {played} were played. The p-value is"
                " valid"
                f" whenever the session stops (Ville 1939, Robbins 1970): p = {self.p:.3g}."
            )
        else:
            text = f"Fixed before the first trial: {self.scenes} scenes; {played} were played."
        kept_text = (
            "The plan was kept."
            if complete
            else "The plan was NOT kept: p-values and intervals assume its end."
        )
        return {
            "scenes": self.scenes,
            "played": played,
            "order": self.order,
            "kept": complete,
            "said": text if self.sequential else f"{text} {kept_text}",
            "p_anytime": round(self.p, 6) if self.sequential else None,
            "discarded": [
                {"trial": each.trial, "seed": each.seed, "label": labels[index], "note": each.note}
                for index, each in self.episodes
                if not each.counted
            ],
            "interrupted": [name for names in self._begun.values() for name in names if name not in ended],
        }


def _is_order(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _begun(log: Path, line: bytes) -> str:
    """Read the name of a trial from a line of the log.

    Raises:
        SinewError: The line is invalid.
    """
    try:
        name = parse_json(line).get("begun")
    except ValueError as error:
        raise SinewError(f"{log}: {error}") from None
    if not isinstance(name, str) or not TRIAL.fullmatch(name):
        raise SinewError(f"{log}: expected the name of a trial, as 007-2, got {shown(name)}")
    return name


def _unlike(path: Path, planned: Sequence[Any], requested: Sequence[str]) -> tuple[str, Any, Any]:
    """Find the first difference between the planned policies and the policies that the user requests.

    Args:
        path: File of the plan, for messages.
        planned: Keys of the planned policies.
        requested: Keys of the requested policies.

    Returns:
        Name of the differing field, planned value, requested value.
    """
    for number, keys in enumerate(zip(planned, requested, strict=False), 1):
        try:
            before, now = (parse_json(key.rpartition(" #")[0]) for key in keys)
            before, now = dict(before), dict(now)
        except (ValueError, TypeError, AttributeError) as error:
            raise SinewError(
                f"{path}: policies: expected the policies as `sinew trials` wrote them, got a text that cannot be"
                f" read ({error})"
            ) from None
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                return f"{name} of policy {number}", before.get(name), now.get(name)
    return "policies", len(planned), len(requested)

"""A sitting: trials of policies on one robot, blind, in an order drawn before, each a line that no kill can lose.

    sitting.json     what was planned before the first trial
    episodes.jsonl   a line when a trial is set up, and its episode when it ends, on the disk before anything goes on
    report.json      what `sinew leaderboard` reads, anew after each trial

A scene is a block of a randomised complete block design: every policy meets it, in an order of its own, and the k-th
chunk of both has the noise of (scene, k). A trial that was interrupted, or discarded for a written reason, is not
counted and comes again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import SinewError
from sinew.eval import campaign, farm
from sinew.eval.player import key
from sinew.eval.report.stats import anytime_p
from sinew.eval.runner import Episode
from sinew.eval.settings import Task, Variant

PLAN, FORMAT = "sitting.json", 1
SHOWN_AT = 0.05  # p at which a sequential sitting ends


@dataclass(frozen=True, slots=True)
class Turn:
    """A trial that is due: the number-th of ``total``, of a variant's index in a scene (counted from 1). name: of its
    files, with the attempt. again: the scene was played before."""

    number: int
    total: int
    scene: int
    seed: int
    variant: int
    name: str
    again: bool


def schedule(scenes: int, policies: int, order: int) -> list[tuple[int, int]]:
    """Return (scene, policy) of each trial: scene by scene, in each the policies in an order that ``order`` gives."""
    return [
        (scene, int(policy))
        for scene in range(scenes)
        for policy in np.random.default_rng([order, scene]).permutation(policies)
    ]


class Sitting:
    """The trials of a folder: those that were played, and which is next.

    scenes: that each policy meets. seed: of the first. order: what the order follows from; drawn if absent.
    sequential: end also once the difference of the two policies is shown (:func:`stats.anytime_p`). Raises
    :class:`SinewError` for a folder of another plan, and one that somebody plays into.
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
    ):
        if sequential and len(variants) != 2:
            raise SinewError(f"--sequential: expected two policies to compare, got {len(variants)}")
        self.out, self.task, self.variants = out, task, list(variants)
        self.scenes, self.seed, self.sequential = scenes, seed, sequential
        names = [key(task, variant) for variant in variants]
        # Servers of one name are one policy by what they say of themselves.
        self.keys = [f"{name} #{names[:at].count(name) + 1}" for at, name in enumerate(names)]
        self.order = self._planned(order)
        self._schedule = schedule(scenes, len(variants), self.order)
        self._begun: dict[str, list[str]] = defaultdict(list)  # number of a trial -> its attempts
        self._left: set[str] = set()  # attempts that somebody ended before they had begun to move
        self.episodes: list[tuple[int, Episode]] = []  # variant's index, in the order of the log
        self._read()

    def _planned(self, order: int | None) -> int:
        """Write the plan, or read that of a sitting that goes on; return what its order follows from."""
        asked = {
            "format": FORMAT, "scenes": self.scenes, "seed": self.seed, "sequential": self.sequential,
            "policies": self.keys,
        }  # fmt: skip
        path = self.out / PLAN
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            given = asked if order is None else {**asked, "order": order}
            for name, value in given.items():
                if before.get(name) != value:
                    raise SinewError(
                        f"--out {self.out}: expected the sitting that was planned there ({name}"
                        f" {str(before.get(name))[:200]}), or a new folder, got {name} {str(value)[:200]}"
                    )
            return int(before["order"])
        if (self.out / campaign.LOG).exists():
            raise SinewError(f"--out {self.out}: expected a new folder, got one of `sinew eval`")
        self.out.mkdir(parents=True, exist_ok=True)
        drawn = secrets.randbits(32) if order is None else order
        farm.write_whole(path, json.dumps({**asked, "order": drawn}, indent=2).encode() + b"\n")
        return drawn

    def _read(self) -> None:
        log = self.out / campaign.LOG
        text = log.read_text(encoding="utf-8") if log.is_file() else ""
        for line in text.splitlines():
            for event in ("begun", "left"):
                if line.startswith(f'{{"{event}"') and line.endswith("}"):
                    self._note(event, json.loads(line)[event])
        self.episodes = [(self.keys.index(name), each) for (name, _), each in farm.episodes_of(text)]

    def _note(self, event: str, name: str) -> None:
        if event == "begun":
            self._begun[name[:3]].append(name)
        else:
            self._left.add(name)

    def results(self) -> list[list[Episode]]:
        """Return the trials that count, of each variant by scene."""
        counted = [(index, each) for index, each in self.episodes if each.counted]
        return [
            sorted((each for at, each in counted if at == index), key=lambda each: each.seed)
            for index in range(len(self.variants))
        ]

    def pairs(self) -> list[list[Episode]]:
        """Return the scenes that every policy has met, in their order: an episode of each."""
        by_seed = [{each.seed: each for each in episodes} for episodes in self.results()]
        seeds = range(self.seed, self.seed + self.scenes)
        return [[each[seed] for each in by_seed] for seed in seeds if all(seed in each for each in by_seed)]

    @property
    def p(self) -> float:
        """Return the p-value of equal success that holds at any time, of the first two policies."""
        if len(self.variants) < 2:
            return 1.0
        return anytime_p([pair[0].success for pair in self.pairs() if pair[0].success != pair[1].success])

    def due(self) -> Turn | None:
        """Return the next trial; None where the plan is done."""
        done = {(each.seed, index) for index, each in self.episodes if each.counted}
        begun = {int(name) for name, attempts in self._begun.items() if attempts}
        for number, (scene, variant) in enumerate(self._schedule, 1):
            if (self.seed + scene, variant) in done:
                continue
            first = number - (number - 1) % len(self.variants)  # of its scene
            if self.sequential and number == first and self.p <= SHOWN_AT:
                return None
            name = f"{number:03}"
            attempt = len(self._begun[name]) + 1
            return Turn(
                number, len(self._schedule), scene + 1, self.seed + scene, variant,
                name if attempt == 1 else f"{name}-{attempt}", any(each in begun for each in range(first, number + 1)),
            )  # fmt: skip
        return None

    def note(self, event: str, turn: Turn) -> None:
        """Note that a trial is "begun", so that one that is killed is known, or was "left" before anything moved."""
        self._append(json.dumps({event: turn.name, "seed": turn.seed}).encode() + b"\n")
        self._note(event, turn.name)

    def end(self, turn: Turn, episode: Episode) -> None:
        """Keep how a trial ended."""
        self._append(farm.line(self.keys[turn.variant], episode))
        self.episodes.append((turn.variant, episode))

    def _append(self, line: bytes) -> None:
        with campaign.open_log(self.out / campaign.LOG) as file:
            file.write(line)
            os.fsync(file.fileno())

    def plan(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return what was planned, whether that was kept, and what does not count and why."""
        ended = {each.trial for _, each in self.episodes} | self._left
        discarded = [
            {"trial": each.trial, "seed": each.seed, "label": labels[index], "note": each.note}
            for index, each in self.episodes
            if not each.counted
        ]
        p = self.p
        return {
            "kind": "sequential" if self.sequential else "fixed",
            "scenes": self.scenes,
            "played": len(self.pairs()),
            "order": self.order,
            "kept": self.due() is None,
            "p_anytime": round(p, 6) if self.sequential else None,
            "discarded": discarded,
            "interrupted": sorted(
                each for names in self._begun.values() for each in names if each not in ended
            ),
        }

"""``sinew recording advise``: which settings would have suited a recorded run better, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.control import is_journal, parse_handover
from sinew_client.control.what_if import Played, RunLog, alternatives, read_run

from sinew.cli import terminal
from sinew.cli.options import CAMERAS, RUNS, Cameras, Count, Runs, changed
from sinew.core import SinewError, progress

if TYPE_CHECKING:
    from sinew_client.policy import Policy as AnyPolicy

    from sinew.checks.advice import Advised
    from sinew.checks.plan_age import PlanAges
    from sinew.core import PolicySpec
    from sinew.records.recorder import Record

MAX_AGE = 100  # largest age of a plan that is compared, in actions
AGES_SHOWN = tuple(sorted({2**power for power in range(16)} | {3 * 2**power for power in range(1, 16)}))
EPISODES = 12  # episodes whose observations are computed again, unless the user sets another number


def advise(
    recording: Path,
    /,
    *,
    frames: Path | None = None,
    policy: str = "",
    draws: Count = 4,
    episodes: Count = EPISODES,
    plot: Path | None = None,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
) -> int:
    """Print which chunk merging, replan interval, rate and limits would have suited a recorded run better, and why.

    Sinew replays the run's requests with other settings and the recorded latencies. This shows how often the robot
    would hold, and how old its commands would be. With --frames and --policy, it also computes the recorded
    observations again, each with the same seeds. This shows after which time a plan is outdated, and whether the scene
    changes abruptly. The output ends with what the recording cannot determine.

    Args:
        recording: Decision log of `sinew run --record`.
        frames: Folder of `sinew run --frames` of the same run.
        policy: Policy that computes the observations again, as for `sinew infer`, or the address of a server.
            Use the policy of the run.
        draws: Number of seeds for each observation. More seeds separate noise better and take longer. For a policy
            without noise, one seed is used.
        episodes: Largest number of episodes whose observations are computed again.
        plot: File for a figure: outdated plans over their age.
    """
    from sinew.checks.advice import TARGETS
    from sinew.checks.advice import advise as collect

    if not is_journal(recording):
        raise SinewError(
            f"{recording}: expected a decision log; write one with `sinew run ... --record FILE`"
        )
    if (frames is None) != (not policy):
        missing = "--policy POLICY" if frames is not None else "--frames FOLDER"
        raise SinewError(f"{missing}: --frames and --policy are needed together; add it, or omit both")
    if not policy and (flag := changed(runs) or changed(cameras)):
        raise SinewError(
            f"{flag}: expected --policy, because this flag is for the policy's engine; pass both"
        )
    if plot is not None and frames is None:
        raise SinewError("--plot: the figure shows the age of plans; pass --frames and --policy too")
    if plot is not None:
        from sinew.core import figures

        figures.check()  # The check runs before the observations are computed, because that may take hours.
    log = read_run(recording)
    own, motion = log.settings.choice.handover, log.settings.choice.motion or {}
    continues = not parse_handover(own).timed and motion.get("kind") in TARGETS
    outcomes = alternatives(log, (own, "aligned") if continues else (own,))
    plans, policy_hz = None, None
    if frames is not None:
        plans, policy_hz = _plans(log, frames, policy, draws, episodes, cameras, runs)
    advised = collect(log, outcomes, plans, policy_hz)
    _print(log, outcomes, plans, advised)
    if plot is not None and plans is not None:
        _draw(plans, log.settings.period, plot)
    terminal.emit(_record(recording, log, outcomes, plans, advised))
    return 0


def _plans(
    log: RunLog, frames: Path, policy: str, draws: int, episodes: int, cameras: Cameras, runs: Runs
) -> tuple[PlanAges, float | None]:
    """Compute the recorded observations again, to measure after which time a plan (a chunk that is being executed) is
    outdated.

    Returns:
        The ages of plans, and the control rate of the policy.
    """
    from sinew.checks.plan_age import compare, plan_again
    from sinew.records.recorder import record_files

    count = len(record_files(frames))
    opened, spec = _open(policy, cameras, runs)
    if spec is not None and not spec.noise_dim:
        draws = 1  # The policy uses no noise, so each seed would give the same plan.
    try:
        what = f"computing up to {_counted(count, 'observation')} with {_counted(draws, 'seed')}"
        with progress.task(what, count) as advance:
            oldest = max((age for _, age in log.waits), default=0)
            records = _first_episodes(frames, episodes)
            plans = plan_again(opened.infer, records, log.settings.hz, draws, oldest, lambda: advance(""))
    finally:
        opened.close()
    hz = None if spec is None else spec.control_hz
    return compare(plans, range(1, min(plans[0].plans.shape[2], MAX_AGE))), hz


def _first_episodes(frames: Path, episodes: int) -> Iterator[Record]:
    """Read the records of the first episodes, one at a time, because the frames of an episode may fill the memory."""
    from sinew.records.recorder import read_records

    names: set[str] = set()
    for record in read_records(frames):
        names.add(str(record.meta.get("session", "")))
        if len(names) > episodes:
            return
        yield record


def _open(policy: str, cameras: Cameras, runs: Runs) -> tuple[AnyPolicy, PolicySpec | None]:
    """Open a policy on this machine, or connect to a server. Return it with its specification, if that is known."""
    from sinew_client.target import addresses_of, connect

    if addresses_of(policy):
        if (flag := changed(runs) or changed(cameras)) is not None:
            raise SinewError(f"{flag}: expected a policy that runs on this machine, got the server {policy}")
        opened: Any = connect(policy)
    else:
        from sinew.engine.capability import Capability
        from sinew.policy import Policy, open_bundle

        with progress.task(f"loading {policy}"):
            opened = Policy(open_bundle(policy), **runs.keywords(), **cameras.keywords())
        # The seeds of an observation differ in their noise only, so the model reads the frames and the prompt once.
        if not opened.capabilities.why_not(Capability.REUSE):
            opened.start.enable_reuse()
    return opened, getattr(opened, "spec", None)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _print(log: RunLog, outcomes: Sequence[Played], plans: PlanAges | None, advised: Advised) -> None:
    console = terminal.console()
    period = 1e3 * log.settings.period
    waits = period * np.array(log.latencies)
    console.print(
        f"{len(log.steps)} control steps at {log.settings.hz:g} Hz, {log.requests} requests, answered after"
        f" {np.percentile(waits, 50):.0f} ms (median), {np.percentile(waits, 95):.0f} ms (95 %) and"
        f" {waits.max():.0f} ms (largest), in whole control steps",
        markup=False,
    )
    own = outcomes[0]
    recorded = sum(log.held.values())
    if own.holds != recorded:
        console.print(
            f"the replay with the run's own settings holds for {own.holds} control steps, and the run held for"
            f" {recorded}: limits, failed requests or a person caused the difference",
            markup=False,
        )
    columns = (
        "chunk merging", "replan", ">held, %", ">age p50, ms", ">p95", ">reaction mean, ms", ">largest", ">requests/s",
    )  # fmt: skip
    table = terminal.table("the same requests with other settings", *columns)
    for each in outcomes:
        ages = period * np.sort(list(each.ages.elements()))
        marks = [f"{np.percentile(ages, q):.0f}" for q in (50, 95)] if len(ages) else ["-", "-"]
        reaction = period * np.array(each.reaction)
        spans = [f"{reaction.mean():.0f}", f"{reaction.max():.0f}"] if len(reaction) else ["-", "-"]
        rate = each.requests / each.steps * log.settings.hz
        name = f"{each.handover} (the run)" if each is own else each.handover
        table.add_row(
            name, each.replan, f"{100 * each.holds / each.steps:.1f}", *marks, *spans, f"{rate:.1f}"
        )
    console.print(table)
    if plans is not None:
        title = (
            f"old plans compared with new ones: {_counted(plans.observations, 'observation')},"
            f" {_counted(plans.draws, 'seed')}, {_counted(plans.episodes, 'episode')}"
        )
        table = terminal.table(
            title, ">age, ms", ">actions", ">outdated, %", ">episodes with one", ">typical change"
        )
        for age in (each for each in plans.ages if each.age in AGES_SHOWN):
            share = f"{100 * age.outdated / age.compared:.1f}"
            episodes = f"{age.outdated_episodes} of {age.episodes}"
            table.add_row(f"{period * age.age:.0f}", str(age.age), share, episodes, f"{age.typical:.2f}")
        console.print(table)
        console.print(
            f"noise of the policy: {plans.noise:.2f} standard deviations of its actions; abrupt changes:"
            f" {len(plans.abrupt)} in {plans.abrupt_episodes} of {_counted(plans.episodes, 'episode')}",
            markup=False,
        )
    console.print("advice:" if advised.advice else "advice: none", markup=False)
    for each_advice in advised.advice:
        flags = f"{each_advice.flags}: " if each_advice.flags else ""
        console.print(f"* {each_advice.topic}: {flags}{each_advice.reason}", markup=False)
    console.print("cannot be determined:", markup=False)
    for text in advised.unknown:
        console.print(f"* {text}", markup=False)


def _draw(plans: PlanAges, period: float, path: Path) -> None:
    """Write a figure: the share of episodes with an outdated plan over the age of the plan.

    Args:
        plans: Old plans compared with new ones.
        period: Seconds between two control steps.
        path: The file.
    """
    from sinew.core import figures
    from sinew.core.statistics import wilson

    figure, axes = figures.new(height=3.6)
    ages = [1e3 * period * each.age for each in plans.ages]
    spans = [wilson(each.outdated_episodes, each.episodes) for each in plans.ages]
    low, high = zip(*spans, strict=True)
    shares = [each.outdated_episodes / each.episodes for each in plans.ages]
    style = {"color": figures.COLORS[0], "marker": figures.MARKERS[0]}
    bars = figures.wilson_bars(
        axes, ages, shares, low, high, label="episodes with an outdated plan, 95 % interval", **style
    )
    steps = [100 * each.outdated / each.compared for each in plans.ages]
    (line,) = axes.plot(
        ages, steps, label="outdated plans", color=figures.COLORS[1], marker=figures.MARKERS[1], markersize=4
    )
    axes.set_xlabel("age of the plan, ms")
    axes.set_ylabel("share, %")
    axes.set_ylim(0, 103)
    figures.legend(figure, [bars, line])
    figures.save(figure, path)


def _record(
    recording: Path, log: RunLog, outcomes: Sequence[Played], plans: PlanAges | None, advised: Advised
) -> dict[str, Any]:
    """Return the advice and the numbers behind it as a JSON-ready dict, for --json."""
    period = 1e3 * log.settings.period
    rows = []
    for each in outcomes:
        ages = period * np.sort(list(each.ages.elements()))
        rows.append(
            {
                "handover": each.handover,
                "replan": each.replan,
                "steps": each.steps,
                "held": dict(each.held),
                "requests": each.requests,
                "age_ms": {f"p{q}": float(np.percentile(ages, q)) for q in (50, 95)} if len(ages) else {},
                "reaction_ms": {
                    "mean": period * float(np.mean(each.reaction)),
                    "max": period * float(max(each.reaction)),
                }
                if each.reaction
                else {},
            }
        )
    return {
        "schema": "sinew.advice/1",
        "command": terminal.typed(),
        "recording": str(recording),
        "held": dict(log.held),
        "skipped": log.skipped,
        "clipped": {name: asdict(each) for name, each in log.clipped.items()},
        "settings": rows,
        "plans": None if plans is None else asdict(plans),
        "advice": [asdict(each) for each in advised.advice],
        "unknown": advised.unknown,
    }

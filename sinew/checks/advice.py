"""Advice for the settings of a run, from a recorded run: chunk merging, replan interval, rate and limits, each with
its reason.

The module gives only advice that improved runs of the built-in tasks (research/log/2026-11-29.md). Other questions
are listed as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sinew_client.control.controller import LATE, STARVED
from sinew_client.control.handover import parse_handover
from sinew_client.control.replan import parse_rule
from sinew_client.control.what_if import Played, RunLog

from sinew.checks.plan_age import PlanAges
from sinew.core.statistics import wilson

OFTEN = 0.01  # A problem that occurs in at least this share of the control steps gets advice.
# Plans of an age are outdated if the 95 % interval of the share of episodes with an outdated plan is above this share.
MAJORITY = 0.5
# The advice accepts at most this part of a chunk between two requests, and recommends this part if no age of plans is
# valid. Sinew's default is as long. All built-in tasks succeed with it. A longer interval may fail although plans are
# valid in a recording, because the comparison does not show the small corrections that a grasp needs.
QUARTER = 0.25
# If a limit changed more than this share of the commands, the robot did not follow its plans. Newer plans then differ
# from older ones, although they are not outdated.
LIMITED = 0.25
TARGETS = ("absolute", "relative")


@dataclass(frozen=True)
class Advice:
    """One recommendation for the next run of the robot, such as another way to merge chunks.

    Attributes:
        topic: chunk merging, replan interval, rate, limits or requests.
        flags: Flags of ``sinew run`` to pass; "" if the advice is to keep the setting, or if no flag helps.
        reason: Reason for the advice, with the measured numbers.
    """

    topic: str
    flags: str
    reason: str


@dataclass(frozen=True)
class Advised:
    """The advice for a recorded run.

    Attributes:
        advice: The pieces of advice.
        unknown: Sentences about settings that the recording cannot determine.
    """

    advice: list[Advice]
    unknown: list[str]


def advise(
    log: RunLog,
    outcomes: Sequence[Played],
    plans: PlanAges | None,
    policy_hz: float | None = None,
) -> Advised:
    """Collect the advice for a run.

    Args:
        log: The recorded run.
        outcomes: Replays with other settings, the run's own first (:func:`~sinew_client.control.what_if.alternatives`).
        plans: Old plans compared with new ones; None without frames or without a policy.
        policy_hz: Control rate of the policy; None if unknown.
    """
    advice = [*_requests(log), *_rate(log, policy_hz), *_limits(log)]
    unknown = [
        "Success. The log states what the robot did, and not whether the task succeeded with other settings."
    ]
    if policy_hz is None:
        unknown.append(
            "The control rate. "
            + ("Pass --frames and --policy." if plans is None else "The policy does not state its rate.")
            + " Compare --hz with the rate of the training data."
        )
    merging = _merging(log, outcomes, unknown)
    method = merging.flags.removeprefix("--handover ") if merging and merging.flags else outcomes[0].handover
    advice += [merging] if merging else []
    if _other_rate(log, policy_hz):
        # At another rate, the actions of a plan do not belong to the control steps with which they are compared.
        unknown.append(
            "The replan interval, because the actions were not played at the policy's rate. Record a run with"
            f" --hz {policy_hz:g}."
        )
    elif (limited := _limited(log)) > LIMITED:
        unknown.append(
            f"The replan interval, because limits changed {100 * limited:.0f} % of the commands. The robot did not"
            " follow its plans, so newer plans differ. Record a run in which the limits change few commands."
        )
    elif (replan := _replan(log, outcomes, method, plans, unknown)) is not None:
        advice.append(replan)
    return Advised(advice, unknown)


def _requests(log: RunLog) -> list[Advice]:
    failed = sum(log.failed.values())
    if not failed:
        return []
    reason, count = log.failed.most_common(1)[0]
    slowest = 1e3 * log.settings.period * max(log.latencies)
    text = (
        f"{failed} of {log.requests} requests failed, {count} of them: {reason}. The slowest answer took"
        f" {slowest:.0f} ms. Find the cause first, because the replays below contain only answered requests."
    )
    return [Advice("requests", "", text)]


def _rate(log: RunLog, policy_hz: float | None) -> list[Advice]:
    hz, count = log.settings.hz, len(log.steps) + log.skipped
    advice = []
    late = float(np.percentile(log.late_ms, 95)) if log.late_ms else 0.0
    if log.skipped > OFTEN * count or late > 500.0 / hz:
        text = (
            f"the loop had no time for {log.skipped} of {count} control steps at {hz:g} Hz, and steps with a request"
            f" began up to {late:.1f} ms late (95 %). Find the slow part: `sinew doctor POLICY --observe ROBOT` times"
            " the robot's methods."
        )
        if not _other_rate(log, policy_hz):
            text += " A lower --hz is no remedy, because it makes each motion slower than in training."
        advice.append(Advice("rate", "", text))
    if _other_rate(log, policy_hz):
        played = _played_hz(log)
        slowed = "" if log.settings.speed == 1.0 else f" with speed={log.settings.speed:g}"
        text = (
            f"the policy was trained at {policy_hz:g} Hz and the run played its actions at {hz:g} Hz{slowed}, so each"
            f" motion was {played / (policy_hz or played):.2f} times as fast as in training."
        )
        advice.append(Advice("rate", f"--hz {policy_hz:g}", text))
    return advice


def _played_hz(log: RunLog) -> float:
    """Return the number of a chunk's actions that the run played per second. A speed below 1 stretches chunks."""
    return log.settings.hz * log.settings.speed


def _other_rate(log: RunLog, policy_hz: float | None) -> bool:
    """Return True if the actions were played at another rate than the rate of the policy.

    A run at the policy's rate with a speed below 1 is not another rate, because the user has chosen a slower motion.
    """
    if policy_hz is None:
        return False
    return all(abs(hz - policy_hz) > 0.01 * policy_hz for hz in (log.settings.hz, _played_hz(log)))


def _limited(log: RunLog) -> float:
    """Return the share of the commands that the limit with the most changes has changed."""
    most = max((each.commands for each in log.clipped.values()), default=0)
    return most / max(1, sum(log.ages.values()))


def _limits(log: RunLog) -> list[Advice]:
    executed = max(1, sum(log.ages.values()))
    advice = []
    for name, each in sorted(log.clipped.items(), key=lambda item: -item[1].commands):
        if each.commands < OFTEN * executed:
            continue
        text = (
            f"{name} changed {each.commands} of {executed} commands, by up to {each.largest:.3g}; the policy requested"
            f" {each.furthest:.3g}. Raise this limit in the file of --limits only if the robot allows it."
        )
        advice.append(Advice("limits", "", text))
    return advice


def _merging(log: RunLog, outcomes: Sequence[Played], unknown: list[str]) -> Advice | None:
    own = outcomes[0]
    method = parse_handover(own.handover)
    motion: Mapping[str, object] = log.settings.choice.motion or {}
    kind = str(motion.get("kind", "as is"))
    waits = own.held.get(LATE, 0)
    late = 1e3 * log.settings.period * float(np.mean(log.latencies))
    if method.timed:
        if method.method != "aligned":
            unknown.append(
                f"Chunk merging. {own.handover} and aligned both skip actions that are too late. The log does not show"
                " with which of them the task succeeds more often."
            )
        return None
    if kind not in TARGETS:
        if waits > OFTEN * own.steps:
            unknown.append(
                f"Chunk merging. The robot stood still for {waits} of {own.steps} control steps while it waited. The"
                " log does not state that actions are targets, so a method that continues may execute them wrongly."
            )
        elif not method.stops and late:
            unknown.append(
                f"Chunk merging. {own.handover} executes each action {late:.0f} ms too late on average. The log does"
                " not state that actions are targets, so it does not show whether the robot should continue or wait"
                " (freeze)."
            )
        return None
    if max(log.latencies) == 0 and not waits:
        return None
    aligned = min(
        (each for each in outcomes if each.handover == "aligned"), key=lambda each: each.holds, default=None
    )
    if aligned is None:
        return None
    if method.stops:
        text = (
            f"actions are {kind} targets, and the robot stood still for {waits} of {own.steps} control steps while it"
            f" waited for a chunk. With aligned, it holds for {aligned.holds} of {aligned.steps} control steps."
        )
    else:
        text = (
            f"actions are {kind} targets, and {own.handover} executes each of them {late:.0f} ms too late on average,"
            " because it starts a chunk at its first action, however old its frame is."
        )
    return Advice("chunk merging", "--handover aligned", text)


def _replan(
    log: RunLog, outcomes: Sequence[Played], method: str, plans: PlanAges | None, unknown: list[str]
) -> Advice | None:
    own = outcomes[0]
    period = 1e3 * log.settings.period
    same = [each for each in outcomes if each.handover == method]
    full = [each for each in same if not each.held.get(STARVED, 0)]
    starved = own.held.get(STARVED, 0)
    if plans is None:
        unknown.append(
            "How old an action may be. Record with --frames FOLDER as well, and pass --frames and --policy."
        )
    else:
        valid, outdated = _ages(plans)
        p95 = _quantile(own, 95)
        quarter = max(1, int(QUARTER * plans.size))
        horizon = parse_rule(own.replan).horizon(plans.size)
        frequent = [each for each in full if parse_rule(each.replan).horizon(plans.size) <= quarter]
        sign = _sign(own, plans, period, p95, valid, outdated)
        if sign and (horizon > quarter or p95 > valid):
            young = [each for each in full if _quantile(each, 95) <= valid]
            best = min(young or frequent, key=lambda each: each.requests, default=own)
            if not young and (valid or (best is own and horizon > quarter)):
                wait = period * float(np.median(log.latencies))
                missed = f"reaches {period * valid:.0f} ms" if valid else "leaves the robot enough actions"
                text = (
                    f"{sign}. No replan interval {missed}, because an answer takes {wait:.0f} ms. Make the policy or"
                    " the link faster: `sinew perf gains` and `sinew perf scenario` list ways."
                )
                return Advice("replan interval", "", text)
            if not young:
                unknown.append(
                    "How fast the robot must react. Even the newest plans were outdated in some episodes of this"
                    " recording, so an interval below a quarter of a chunk may be better."
                )
            if horizon <= quarter and not young:
                return Advice("replan interval", "", f"keep {own.replan}, or request sooner: {sign}.")
            after = f"With this interval, 5 % are {period * _quantile(best, 95):.0f} ms old or older, and"
            text = f"{sign}. {after} {_reacts(best, period)} ({_cost(own, best)})."
            return Advice("replan interval", f"--replan {best.replan}", text)
        if p95 <= valid and horizon <= quarter:
            text = f"keep {own.replan}: 95 % of the commands are younger than {period * valid:.0f} ms"
            return Advice(
                "replan interval", "", f"{text}, and plans of that age are outdated in few or no episodes."
            )
        old = (
            "are outdated in some episodes and not in others"
            if p95 > valid
            else "are outdated in few or no episodes"
        )
        unknown.append(
            f"The replan interval. Plans that are {period * p95:.0f} ms old {old}. A task may tolerate outdated plans,"
            " and it may need small corrections that this comparison does not show. `sinew eval --sweep replan=...` or"
            " `sinew trials` measure the success."
        )
    if starved > OFTEN * own.steps and full:
        best = min(full, key=lambda each: each.requests)
        text = (
            f"the robot ran out of actions in {starved} of {own.steps} control steps, because the next chunk was"
            f" requested too late. With this interval, it holds for {best.holds} ({_cost(own, best)})."
        )
        return Advice("replan interval", f"--replan {best.replan}", text)
    return None


def _sign(own: Played, plans: PlanAges, period: float, p95: int, valid: int, outdated: int | None) -> str:
    """Return a sentence with the evidence that the run's commands were too old; "" without such evidence.

    Args:
        own: The run, with its own settings.
        plans: Old plans compared with new ones.
        period: Milliseconds between two control steps.
        p95: Age that 5 % of the commands reached, in control steps.
        valid: Largest age up to which plans are valid, in control steps.
        outdated: Smallest age at which plans are outdated, in control steps.
    """
    old = f"5 % of the commands were {period * p95:.0f} ms old or older, and {_reacts(own, period)}"
    if wilson(plans.abrupt_episodes, plans.episodes)[0] > MAJORITY:
        return (
            f"the scene changed abruptly in {plans.abrupt_episodes} of {plans.episodes} episodes: from one observation"
            f" to the next, the plan changed by more than the spread of the policy's actions. {old}"
        )
    if outdated is None or p95 < outdated:
        return ""
    worst = next(each for each in plans.ages if each.age == outdated)
    few = f", and plans of {period * valid:.0f} ms in few or none" if valid else ""
    return (
        f"plans that are {period * outdated:.0f} ms old were outdated in {worst.outdated_episodes} of"
        f" {worst.episodes} episodes{few}. {old}"
    )


def _reacts(played: Played, period: float) -> str:
    mean, largest = period * np.mean(played.reaction or [0]), period * max(played.reaction, default=0)
    return f"the robot reacts after {mean:.0f} ms on average and {largest:.0f} ms at most"


def _ages(plans: PlanAges) -> tuple[int, int | None]:
    """Return the largest age up to which plans are valid, and the smallest age at which they are outdated.

    An age is valid or outdated if the 95 % interval (Wilson) of the share of episodes with an outdated plan is
    completely below or above MAJORITY. For ages between the two results, the recording is too short to decide, or the
    episodes differ.
    """
    valid, outdated = 0, None
    still = True
    for each in plans.ages:
        low, high = wilson(each.outdated_episodes, each.episodes)
        still = still and high < MAJORITY
        valid = each.age if still else valid
        if low > MAJORITY and outdated is None:
            outdated = each.age
    return valid, outdated


def _quantile(played: Played, percent: float) -> int:
    ages = np.sort(list(played.ages.elements()))
    return int(np.percentile(ages, percent, method="lower")) if len(ages) else 0


def _cost(own: Played, other: Played) -> str:
    return (
        f"{other.requests} requests in place of {own.requests}, {other.holds} holds in place of {own.holds}"
    )

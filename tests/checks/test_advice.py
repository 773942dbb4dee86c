"""Advice from a recorded run: what a policy plans again from equal noise, and which settings follow from it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Settings
from sinew_client.control.controller import LATE, STARVED
from sinew_client.control.what_if import Clipped, RunLog, alternatives

from sinew.checks.advice import Advised, advise
from sinew.checks.plan_age import Age, Episode, PlanAges, compare, plan_again
from sinew.core import ActionChunk, Observation, SinewError
from sinew.records.recorder import Record

SIZE, HZ = 32, 20.0
FRAME = np.zeros((2, 2, 3), np.uint8)


def record(
    step: int, state: float, episode: str = "episode 0", by: Any = "policy", frame: Any = FRAME
) -> Record:
    seen = Observation({"front": frame}, np.array([state], np.float32), time=step / HZ)
    return Record(Path(f"{step}.npz"), "run", seen, None, "", {"session": episode}, {}, by=by)


def planner(noise: float) -> Any:
    """A policy that approaches its state's target along a line, with noise of its seed."""

    def infer(observation: Observation) -> ActionChunk:
        rng = np.random.default_rng(observation.seed)
        assert observation.time is not None
        steps = round(observation.time * HZ) + np.arange(SIZE)
        plan = np.sin(steps / 20.0) + observation.state[0]
        return ActionChunk((plan + noise * rng.standard_normal(SIZE))[:, None].astype(np.float32))

    return infer


def ages_of(states: dict[str, list[float]], noise: float = 0.5, draws: int = 6) -> PlanAges:
    records = [record(step, state, name) for name, own in states.items() for step, state in enumerate(own)]
    return compare(plan_again(planner(noise), records, HZ, draws, 0), range(1, SIZE))


def test_noise_alone_makes_no_plan_outdated() -> None:
    ages = ages_of({f"{number}": [0.0] * 40 for number in range(5)})
    sines = np.sin((np.arange(40)[:, None] + np.arange(SIZE)) / 20.0)
    assert ages.noise == pytest.approx(0.5 / np.hypot(0.5, sines.std()), rel=0.1)
    assert not ages.abrupt
    assert all(each.outdated == 0 for each in ages.ages)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_an_abrupt_change_is_found_at_its_step(noise: float) -> None:
    states = {f"{number}": [0.0] * (10 + number) + [4.0] * 25 for number in range(4)}
    ages = ages_of(states, noise)
    assert ages.abrupt == [(name, 10 + int(name)) for name in states]
    assert ages.abrupt_episodes == 4
    assert [each.outdated_episodes for each in ages.ages[:8]] == [4] * 8


def test_a_slow_drift_outdates_old_plans_alone() -> None:
    ages = ages_of({f"{number}": list(np.linspace(0.0, 12.0, 60)) for number in range(4)}, noise=0.2)
    first = next(each.age for each in ages.ages if each.outdated)
    assert 4 < first < 24
    assert not ages.abrupt


def test_a_plan_that_is_early_is_not_outdated() -> None:
    wave = np.sign(np.sin(np.arange(80) / 6.0))
    plans = [wave[step : step + SIZE] for step in range(20)]
    plans[10:] = [wave[step + 2 : step + 2 + SIZE] for step in range(10, 20)]  # the robot gained two steps
    stack = np.array(plans, np.float32)[:, None, :, None]
    ages = compare([Episode("0", list(range(20)), list(range(20)), stack)], [1, 2, 4])
    assert all(each.outdated == 0 for each in ages.ages)


def test_an_age_that_only_the_first_frames_reach_is_left_out() -> None:
    """At the largest age, plans end before late frames. The first frames of an episode show a still scene."""
    states = {f"{number}": list(np.linspace(0.0, 12.0, 60)) for number in range(4)}
    records = [record(step, state, name) for name, own in states.items() for step, state in enumerate(own)]
    episodes = plan_again(planner(0.2), records, HZ, 4, 0)
    late = [replace(each, frames=[0, *range(len(each.frames) - 1)]) for each in episodes]
    ages = compare(late, range(1, SIZE)).ages
    assert [each.age for each in ages] == list(range(1, SIZE - SIZE // 8))
    assert all(each.outdated_episodes == 4 for each in ages[-5:])


def test_an_episode_that_is_shorter_than_an_age_is_not_counted() -> None:
    ages = ages_of({"long": [0.0] * 40, "short": [0.0] * 6})
    assert [each.episodes for each in ages.ages[:8]] == [2] * 5 + [1] * 3


def test_frames_that_repeat_are_as_old_as_their_first() -> None:
    frames = [np.full((2, 2, 3), step // 2, np.uint8) for step in range(6)]
    records = [record(step, 0.0, frame=frames[step]) for step in range(6)]
    (episode,) = plan_again(planner(0.0), records, HZ, 1, 1)
    assert episode.frames == [0, 0, 2, 2, 4, 4]
    (episode,) = plan_again(planner(0.0), records, HZ, 1, 0)
    assert episode.frames == list(range(6))


def test_steps_that_a_human_drove_divide_an_episode() -> None:
    records = [record(step, 0.0, by="human" if step in (3, 4) else "policy") for step in range(8)]
    assert [each.steps for each in plan_again(planner(0.0), records, HZ, 1, 0)] == [[0, 1, 2], [5, 6, 7]]


def test_only_one_earlier_frame_stays_in_memory() -> None:
    """The frames of a minute of a real robot are gigabytes."""
    frames: list[Any] = []

    def lazily() -> Iterator[Record]:
        for step in range(8):
            frame = np.full((2, 2, 3), step, np.uint8)
            frames.append(weakref.ref(frame))
            yield record(step, 0.0, frame=frame)
            del frame
            gc.collect()
            assert sum(each() is not None for each in frames) <= 3

    assert len(plan_again(planner(0.0), lazily(), HZ, 1, 1)) == 1


def test_a_run_that_a_human_drove_has_no_plans() -> None:
    records = [record(step, 0.0, by="human") for step in range(3)]
    with pytest.raises(
        SinewError, match="expected control steps in which the policy drove the robot, got none"
    ):
        plan_again(planner(0.0), records, HZ, 1, 0)


def test_records_of_a_server_are_rejected() -> None:
    seen = Observation({"front": FRAME}, np.zeros(1, np.float32))
    served = Record(Path("1.npz"), "native", seen, None, "", {}, {})
    with pytest.raises(SinewError, match="Pass the folder of --frames"):
        plan_again(planner(0.0), [served], HZ, 1, 0)


def log_of(
    handover: str = "aligned", replan: str = "full", motion: str = "absolute", **changes: Any
) -> RunLog:
    settings = Settings(HZ, handover, replan, motion={"kind": motion})
    log = RunLog(settings, "blocks", 1, list(range(200)), latencies=[2] * 9, waits=[(2, 0)] * 9, size=SIZE)
    for name, value in changes.items():
        object.__setattr__(log, name, value)
    return log


def plans_of(outdated: dict[int, int], abrupt: int = 0, episodes: int = 12) -> PlanAges:
    ages = [Age(age, 500, count, episodes, count, 0.1) for age, count in outdated.items()]
    return PlanAges(ages, 0.4, [(str(number), 9) for number in range(abrupt)], episodes, 500, 4, SIZE)


def advised(log: RunLog, plans: PlanAges | None = None, **options: Any) -> Advised:
    own = log.settings.choice.handover
    return advise(log, alternatives(log, (own,) if own == "aligned" else (own, "aligned")), plans, **options)


def flags(result: Advised) -> list[str]:
    return [each.flags for each in result.advice]


def test_without_frames_the_replan_interval_is_unknown() -> None:
    result = advised(log_of(replan="8"))
    assert result.advice == []
    assert any("How old an action may be" in text for text in result.unknown)


def test_plans_that_get_outdated_ask_for_a_shorter_interval() -> None:
    """As of the pen: 133 ms are valid, 200 ms are outdated."""
    plans = plans_of({age: 0 if age <= 8 else 5 if age < 12 else 12 for age in range(1, 24)})
    assert flags(advised(log_of(), plans)) == [
        "--replan 4"
    ]  # 4 and a latency of 2 are at most 6, 8 and 2 are 10
    kept = advised(log_of(replan="2"), plans)
    assert flags(kept) == [""]
    assert kept.advice[0].reason.startswith("keep 2:")


def test_a_slow_policy_is_named_where_no_interval_helps() -> None:
    plans = plans_of({age: 0 if age <= 4 else 12 for age in range(1, 24)})
    (advice,) = advised(log_of(latencies=[9] * 9, waits=[(9, 0)] * 9), plans).advice
    assert advice.flags == ""
    assert "No replan interval reaches 200 ms, because an answer takes 450 ms" in advice.reason


def test_a_run_does_not_get_its_own_interval_as_advice() -> None:
    """Answers take almost a whole chunk, so that the robot runs out of actions with every interval."""
    slow = log_of(latencies=[30] * 9, waits=[(30, 0)] * 9)
    (advice,) = advised(slow, plans_of(dict.fromkeys(range(1, 24), 12), abrupt=12)).advice
    assert advice.flags == ""
    assert "leaves the robot enough actions, because an answer takes 1500 ms" in advice.reason


def test_abrupt_changes_ask_for_a_quarter_of_a_chunk() -> None:
    plans = plans_of(dict.fromkeys(range(1, 24), 12), abrupt=12)
    assert flags(advised(log_of(), plans)) == ["--replan 8"]
    assert flags(advised(log_of(replan="4"), plans)) == [""]


def test_episodes_that_differ_give_no_advice() -> None:
    """As of blocks, which succeeds with old plans."""
    result = advised(log_of(replan="16"), plans_of({1: 2, 2: 3, 4: 5, 8: 5, 16: 6, 24: 5}, abrupt=2))
    assert result.advice == []
    assert any(text.startswith("The replan interval.") for text in result.unknown)


def test_a_long_interval_is_not_confirmed_by_valid_plans() -> None:
    """As of blocks with whole chunks, which loses 17 points of success although few plans are outdated."""
    result = advised(log_of(replan="24"), plans_of(dict.fromkeys(range(1, 32), 0)))
    assert result.advice == []
    assert any("few or no episodes. A task may" in text for text in result.unknown)


@pytest.mark.parametrize("motion", ["absolute", "as is"])
def test_a_robot_that_waits_continues_only_if_actions_are_targets(motion: str) -> None:
    result = advised(log_of("freeze", "8", motion))
    targets = motion == "absolute"
    assert flags(result) == (["--handover aligned"] if targets else [])
    assert any(text.startswith("Chunk merging.") for text in result.unknown) != targets


def test_late_actions_of_an_unknown_kind_are_named() -> None:
    """As of blocks with naive: a log without a motion does not show whether waiting or continuing is right."""
    result = advised(log_of("naive", "8", "as is"))
    assert flags(result) == []
    assert any(
        text.startswith("Chunk merging. naive executes each action 100 ms too late")
        for text in result.unknown
    )
    at_once = advised(log_of("naive", "8", "as is", latencies=[0] * 9, waits=[(0, 0)] * 9))
    assert not any(text.startswith("Chunk merging.") for text in at_once.unknown)


def test_targets_that_are_executed_late_are_aligned() -> None:
    result = advised(log_of("naive", "8"))
    assert flags(result) == ["--handover aligned"]
    assert "100 ms too late" in result.advice[0].reason


@pytest.mark.parametrize(
    ("method", "unknown"), [("ensemble", True), ("aggregate:average", True), ("aligned", False)]
)
def test_methods_that_mix_chunks_are_not_judged(method: str, unknown: bool) -> None:
    result = advised(log_of(method, "8"))
    assert flags(result) == []
    assert any(text.startswith(f"Chunk merging. {method} and aligned") for text in result.unknown) == unknown


def test_a_robot_that_runs_out_of_actions_requests_sooner() -> None:
    log = log_of("aligned", "full")
    outcomes = alternatives(log, ("aligned",))
    assert outcomes[0].held[STARVED] > 0
    assert flags(advise(log, outcomes, None)) == ["--replan 16"]


def test_the_rate_of_training_and_skipped_steps_are_named() -> None:
    log = log_of(replan="8", steps=[step for step in range(200) if step % 10])
    result = advised(log, policy_hz=10.0)
    assert [each.topic for each in result.advice] == ["rate", "rate"]
    assert flags(result) == ["", "--hz 10"]
    assert "19 of 199" in result.advice[0].reason
    assert "2.00 times as fast" in result.advice[1].reason
    assert "no remedy" not in result.advice[0].reason
    assert "A lower --hz is no remedy" in advised(log_of(steps=list(range(0, 200, 2)))).advice[0].reason


def test_at_another_rate_the_replan_interval_is_unknown() -> None:
    """As of the pen at 30 in place of 60 Hz: its plans looked valid for 33 ms, and they are valid for 133 ms."""
    plans = plans_of({age: 0 if age <= 8 else 12 for age in range(1, 24)})
    result = advised(log_of(), plans, policy_hz=40.0)
    assert flags(result) == ["--hz 40"]
    assert "0.50 times as fast" in result.advice[0].reason
    assert any("Record a run with --hz 40." in text for text in result.unknown)


def test_if_limits_held_the_robot_back_the_replan_interval_is_unknown() -> None:
    """As of the blocks with a velocity limit of 0.5 per second. Their plans looked outdated after one action, and
    without the limit, 98 of 100 episodes succeed with the interval of the run."""
    plans = plans_of({age: 0 if age <= 8 else 12 for age in range(1, 24)})
    for commands, limited in ((20, False), (150, True)):
        log = log_of(clipped={"x.velocity": Clipped(commands, 0.5, 2.5)}, ages=Counter({1: 190}))
        result = advised(log, plans)
        assert [each.topic for each in result.advice] == ["limits", *([] if limited else ["replan interval"])]
        words = "The replan interval, because limits changed 79 % of the commands."
        assert any(text.startswith(words) for text in result.unknown) == limited


@pytest.mark.parametrize(("policy_hz", "speed"), [(10.0, 0.5), (20.0, 0.5), (20.1, 1.0)])
def test_a_speed_that_the_user_chose_is_no_wrong_rate(policy_hz: float, speed: float) -> None:
    """At 20 Hz and half the speed, a policy of 10 Hz moves as in training, and one of 20 Hz as slowly as requested."""
    settings = Settings(HZ, "aligned", "8", motion={"kind": "absolute"}, speed=speed)
    assert flags(advised(log_of(settings=settings), policy_hz=policy_hz)) == []


def test_without_a_stated_rate_the_rate_is_unknown() -> None:
    assert any(text.startswith("The control rate.") for text in advised(log_of(replan="8")).unknown)
    plans = plans_of(dict.fromkeys(range(1, 24), 0))
    assert any("does not state its rate" in text for text in advised(log_of(replan="8"), plans).unknown)


def test_limits_that_change_few_commands_are_no_advice() -> None:
    clipped = {"x.range": Clipped(50, 0.5, 2.5), "y.range": Clipped(1, 0.1, 1.1)}
    log = log_of(replan="8", clipped=clipped, ages=Counter({1: 190}))
    (limits,) = advised(log).advice
    assert limits.topic == "limits"
    assert "x.range changed 50 of 190 commands, by up to 0.5; the policy requested 2.5" in limits.reason


def test_failed_requests_come_first() -> None:
    log = log_of(replan="8", failed=Counter({"no answer within 2 s": 3}), requests=12)
    assert "3 of 12 requests failed, 3 of them: no answer within 2 s" in advised(log).advice[0].reason


def test_waiting_is_a_reason_that_the_controller_gives() -> None:
    assert alternatives(log_of("freeze", "8"), ("freeze",))[0].held[LATE] > 0

"""What takes part in a loop beside its policy: which hook is called when, and what it may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sinew_client import control
from sinew_client.control import Command, Loop, LoopListener, NoObservation

from tests.control.test_loop import loop_of


class Noted(LoopListener):
    """Notes which hook is called, and in which control step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def observed(self, step: int, observation: Any) -> None:
        self.calls.append(("observed", step))

    def request(self, step: int, fields: dict[str, Any]) -> None:
        self.calls.append(("request", step))
        fields["noted"] = step

    def answered(self, answer: Any, request: Any) -> None:
        self.calls.append(("answered", request.step))

    def before(self, step: int, observation: Any) -> None:
        self.calls.append(("before" if observation is None else "before, seen", step))

    def command(self, command: Command) -> None:
        self.calls.append(("command", command.step))

    def restarted(self) -> None:
        self.calls.append(("restarted", -1))

    def report(self) -> dict[str, Any]:
        return {"agreement": {"noted": len(self.calls)}}


def ticks(loop: Loop, count: int) -> None:
    """Take control steps; ``run`` would hold the robot at its end."""
    for _ in range(count):
        loop.tick(loop.pace.next())


def test_hooks_are_called_in_the_order_of_a_control_step() -> None:
    loop, _ = loop_of(delay=0.1)
    noted = Noted()
    noted.attach(loop)
    loop.run(3)
    assert noted.calls == [
        *[("observed", 0), ("request", 0), ("before, seen", 0), ("command", 0)],
        *[("before", 1), ("command", 1)],
        *[("answered", 0), ("before", 2), ("command", 2)],
    ]
    assert loop.source.requests[0]["noted"] == 0  # type: ignore[attr-defined]
    assert loop.report().agreement == {"noted": len(noted.calls)}
    noted.calls.clear()
    loop.restart("another episode")
    loop.run(4)
    assert noted.calls[0] == ("restarted", -1)


def test_a_robot_is_observed_in_every_step_for_a_listener_that_needs_it() -> None:
    loop, _ = loop_of(delay=0.1)
    noted = Noted()
    noted.observes = True
    noted.attach(loop)
    loop.run(5)
    assert [step for hook, step in noted.calls if hook == "observed"] == list(range(5))
    loop.pause()
    loop.run(7)
    assert [step for hook, step in noted.calls if hook == "observed"] == list(
        range(5)
    )  # not while it is paused


@pytest.mark.parametrize("hook", ["request", "before"])
def test_an_observation_that_a_listener_cannot_use_holds_the_robot(hook: str) -> None:
    """The request is not sent, what is planned is dropped, and the other listeners have their turn."""
    loop, arm = loop_of(delay=0.0, replan="1")
    other = Noted()

    def refuse(*_: Any) -> None:
        if loop.next_step > 2:
            raise NoObservation("no such camera")

    refusing = LoopListener()
    setattr(refusing, hook, refuse)
    refusing.attach(loop)
    other.attach(loop)
    ticks(loop, 3)
    asked = len(loop.source.requests)  # type: ignore[attr-defined]
    assert asked == 3
    ticks(loop, 3)
    assert [row is None for _, row in arm.sent[3:6]] == [True] * 3
    assert loop.reason == "no such camera"
    assert len(loop.source.requests) == asked + (3 if hook == "before" else 0)  # type: ignore[attr-defined]
    assert [step for name, step in other.calls if name.startswith("before")] == list(range(6))


def test_calls_of_other_threads_run_before_the_next_step() -> None:
    """A call that makes another one does not make it in the same step."""
    loop, _ = loop_of()
    steps: list[int] = []

    def call() -> None:
        steps.append(loop.next_step)
        if len(steps) < 3:
            loop.calls.append(call)

    loop.calls.append(call)
    loop.run(5)
    assert steps == [0, 1, 2]


def test_every_name_of_the_package_is_defined() -> None:
    for name in control.__all__:
        assert getattr(control, name) is not None
    assert dir(control) == sorted(control.__all__)
    with pytest.raises(AttributeError, match="module 'sinew_client.control' has no attribute 'Takeover'"):
        _ = control.Takeover  # type: ignore[attr-defined]


def test_kept_steps_are_those_with_a_command_and_what_was_observed_in_them() -> None:
    loop, arm = loop_of(delay=0.0, replan="full")
    steps: list[tuple[int, float, str]] = []

    def keep(observation: Any, prompt: str, command: Command) -> None:
        assert command.row is not None
        steps.append((command.step, float(np.ravel(command.row)[0]), prompt))

    control.Keep(keep).attach(loop)
    ticks(loop, 4)
    arm.frame_age = 60.0  # too old to act on
    ticks(loop, 2)
    arm.frame_age = 0.0
    ticks(loop, 2)
    assert [step for step, *_ in steps] == [
        at for at, (_, row) in enumerate(arm.sent[:8]) if row is not None and at not in (4, 5)
    ]
    assert {prompt for *_, prompt in steps} == {"stack"}

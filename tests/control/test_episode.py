"""An episode that hands out an action a step: where it asks again, and what a policy with a memory is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sinew_client import ActionChunk, ActionQueue, ClientError, Observation, PolicySpec
from sinew_client.types import CameraSpec, Timing, VectorSpec

SPEC = PolicySpec(
    name="counter", architecture="counter", cameras=(CameraSpec("front", 2, 2),), state=VectorSpec(1),
    action=VectorSpec(1), chunk_size=4, noise_dim=1, solver_steps=1, max_prompt_tokens=8,
)  # fmt: skip


class Counter:
    """Answers its n-th request with n, n + 0.1, n + 0.2, n + 0.3, and keeps what it was asked."""

    def __init__(self, **more: Any):
        self.spec = replace(SPEC, **more)
        self.asked: list[Observation] = []
        self.begun: list[str] = []

    def infer(self, observation: Any, *, timeout: float | None = None) -> ActionChunk:
        given = observation if isinstance(observation, Observation) else Observation(**observation)
        if given.prompt == "refuse":
            raise ClientError("no")
        self.asked.append(given)
        rows = len(self.asked) + np.arange(4, dtype=np.float32)[:, None] / 10
        return ActionChunk(rows, Timing())

    def reset(self, session: str = "") -> None:
        self.begun.append(session)

    def close(self) -> None:
        pass


def seen(step: int, prompt: str = "go") -> dict[str, Any]:
    return {
        "images": {"front": np.zeros((2, 2, 3), np.uint8)},
        "state": np.array([float(step)]),
        "prompt": prompt,
    }


def played(queue: ActionQueue, prompts: list[str]) -> list[float]:
    return [
        round(float(queue.select_action(seen(step, prompt))[0]), 1) for step, prompt in enumerate(prompts)
    ]


def test_rows_in_their_order_then_the_next_chunk() -> None:
    assert played(ActionQueue(Counter()), ["go"] * 6) == [1.0, 1.1, 1.2, 1.3, 2.0, 2.1]
    assert played(ActionQueue(Counter(n_action_steps=2)), ["go"] * 4) == [1.0, 1.1, 2.0, 2.1]
    assert played(ActionQueue(Counter(n_action_steps=2), rows=1), ["go"] * 2) == [1.0, 2.0]


def test_another_instruction_is_not_answered_with_rows_of_the_last() -> None:
    assert played(ActionQueue(Counter()), ["go", "stop", "stop", "go"]) == [1.0, 2.0, 2.1, 3.0]


def test_an_error_hands_out_nothing_and_the_next_step_asks_again() -> None:
    queue = ActionQueue(Counter())
    with pytest.raises(ClientError, match="no"):
        queue.select_action(seen(0, "refuse"))
    assert len(queue) == 0
    assert played(queue, ["go"]) == [1.0]


def test_a_policy_with_a_memory_gets_the_moments_before() -> None:
    policy = Counter(history=3, history_stride=2)
    queue = ActionQueue(policy, rows=1, session="left arm")
    played(queue, ["go"] * 6)
    assert [float(each.state[0]) for each in policy.asked[5].earlier] == [1.0, 3.0]
    assert {tuple(each.images) for each in policy.asked[5].earlier} == {("front",)}
    assert {each.session for each in policy.asked} == {"left arm"}
    queue.reset()
    assert policy.begun == ["left arm"]
    played(queue, ["go"])
    assert all(float(each.state[0]) == 0.0 for each in policy.asked[-1].earlier)  # none of the episode before


@pytest.mark.parametrize("rows", [0, 5, True, 1.5, "2"])
def test_rows_that_no_chunk_has_are_refused(rows: Any) -> None:
    with pytest.raises(ClientError, match=rf"rows: expected 1 to 4 \(the actions of a chunk\), got {rows!r}"):
        ActionQueue(Counter(), rows=rows)


def test_rows_that_a_chunk_has_are_handed_out_and_what_is_seen_is_asked_as_it_is() -> None:
    for rows in (1, np.int64(4)):
        assert len(set(played(ActionQueue(Counter(), rows=rows), ["go"] * 4))) == 4
    policy, given = Counter(), Observation({}, np.zeros(1))
    queue = ActionQueue(policy)
    queue.select_action(given)
    assert (policy.asked[0] is given, len(queue)) == (True, 3)
    queue.reset()
    assert (len(queue), policy.begun) == (0, [""])
    named = ActionQueue(Counter(), session="arm")
    named.select_action(given)
    assert named.policy.asked == [replace(given, session="arm")]  # type: ignore[attr-defined]
    pair = Counter(history=2)
    ActionQueue(pair).select_action({"images": None, "state": None})
    assert [len(each.earlier) for each in pair.asked] == [1]

"""pi0-FAST against LeRobot: the ids that it says and the chunks that they are, on every engine.

The fixture has four sentences: a usual one, one too short, one that cannot be decoded, and one that nothing ends.
Stages are in test_stages.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sinew.core import ObservationError, SinewError
from sinew.engine.watch import Watch
from sinew.lowbit.quantization import measure
from sinew.policy import Policy, load
from sinew.processing import Prepared, stack
from tests.golden import Golden, assert_parity
from tests.models.stages import fast_observation

CASE = "pi0fast-2cam"
ENGINES = ("eager", "plan", "cuda", pytest.param("onnx", marks=pytest.mark.slow))  # whose export takes 15 s
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def g(golden: Path) -> Golden:
    return Golden(golden / CASE)


@pytest.fixture(scope="module")
def open_engine(case_bundle: Callable[[str], Path]) -> Callable[[str], Policy]:
    opened: dict[str, Policy] = {}

    def open_(engine: str) -> Policy:
        if engine not in opened:
            opened[engine] = load(case_bundle(CASE), "cpu", "float32", engine, allow_missing_cameras=True)
        return opened[engine]

    return open_


def sentence(g: Golden, number: int) -> list[int]:
    """What LeRobot generated, up to its end."""
    ids: list[int] = g.numpy(f"case{number}.generated")[0].tolist()
    return ids[: len(g[f"case{number}.step_top2_ids"])]


def prepared(policy: Policy, g: Golden) -> list[Prepared]:
    return [policy.prepare(fast_observation(g, number)) for number in range(4)]


@pytest.mark.proves(engine="*", family="pi0_fast")
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_actions_are_the_references(engine: str, open_engine, g):
    """Ids are equal: what an engine's trace holds is each token, then the chunk in model units."""
    policy = open_engine(engine)
    kinds = json.loads(g.metadata["kinds"])
    assert kinds == ["normal", "short", "fail", "nostop"]
    for number, member in enumerate(prepared(policy, g)):
        tokens = member.inputs.tokens
        assert tokens.tolist() == g.numpy(f"case{number}.lang_tokens")[0][: len(tokens)].tolist()
        *said, chunk = policy.engine.trace(member.inputs.batched(), member.noise[None], 1).head
        assert [int(token.item()) for token in said] == sentence(g, number), kinds[number]
        wanted = g.numpy(f"case{number}.chunk_normalized")[0]
        np.testing.assert_allclose(chunk, wanted, rtol=0, atol=RELATIVE * (np.abs(wanted).max() or 1.0))
        actions = policy.run(member).actions
        assert_parity(actions, g.numpy(f"case{number}.actions")[0])
        watch = Watch()
        policy.engine.run(member.inputs.batched(), member.noise[None], 1, None, watch)
        assert len(watch.timing().step_ms) == len(said)


@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "cuda"])
def test_four_robots_at_once(engine: str, open_engine, g):
    """Their sentences have 21, 12, 10 and 40 tokens."""
    policy = open_engine(engine)
    members = prepared(policy, g)
    alone = [policy.run(member).actions for member in members]
    inputs = stack([member.inputs for member in members], policy.manifest.processing.prompt)
    watch = Watch()
    chunks = policy.engine.run(inputs, np.stack([member.noise for member in members]), 1, None, watch)
    assert len(watch.timing().step_ms) == 40
    for chunk, member, actions in zip(chunks, members, alone, strict=True):
        np.testing.assert_array_equal(policy.processor.finish(chunk, member.state), actions)


def test_a_sentence_that_does_not_begin_as_in_training_is_refused(open_engine, g):
    """LeRobot asserts that it begins with "Action", ":"; without validate_action_token_prefix it does not."""
    policy = open_engine("eager")
    words, said = policy.engine.model.action_tokens, np.array(sentence(g, 0))
    with pytest.raises(
        SinewError, match=r"tokens: expected a chunk that begins with the tokens \[\d+, \d+\].* got \[1, 2\]"
    ):
        words.chunk(np.array([1, 2, *said[2:]]))
    with pytest.raises(SinewError, match="begins with"):
        words.chunk(said[:1])


def test_what_this_policy_has_not_is_refused(open_engine, g):
    policy, given = open_engine("eager"), fast_observation(g, 0)
    for changes, why in (
        ({"solver_steps": 10}, "solver_steps"),
        ({"prompt": ""}, "prompt"),
        ({"previous": np.zeros((8, 5), np.float32), "delay": 1}, "integrates a velocity"),
    ):
        with pytest.raises(ObservationError, match=why):
            policy.infer({"images": given.images, "state": given.state, "prompt": "go", **changes})


def test_an_error_of_a_chunk_of_zeros_is_a_number(open_engine, g):
    """`sinew quantize` measures on any observation, also on one whose sentence cannot be decoded."""
    policy = open_engine("eager")
    member = prepared(policy, g)[2]
    assert not g.numpy("case2.chunk_normalized").any()
    assert measure(policy, open_engine("plan").engine, [(member.inputs, member.noise)]) == [0.0]

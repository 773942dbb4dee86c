"""A guess at several tokens is checked in one pass, and no token of a sentence shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sinew_client import Client

import sinew
from sinew.cli import main
from sinew.core import CancelledError, Observation, SinewError
from sinew.engine.drafts import Drafts
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.engine import Watch
from sinew.eval.learning.exploration import Exploration
from sinew.eval.learning.rollouts import RolloutPolicy
from sinew.models.speaker import CLOSE
from sinew.policy import Policy
from tests.engine.stand_ins import make
from tests.engine.test_contract import CPU, observation
from tests.golden import Golden
from tests.models.stages import fast_observation
from tests.serve.test_server import serving

DRAFT = 5
CASES = {"pi0fast-2cam": (0, 1, 2, 3), "openvla-ar": (0,)}


@pytest.fixture(scope="module", params=[(case, engine) for case in CASES for engine in ("eager", "plan")])
def policy(request: pytest.FixtureRequest, case_bundle: Callable[[str], Path]) -> Iterator[Policy]:
    case, engine = request.param
    with sinew.load(
        case_bundle(case), "cpu", "float32", engine, threads=1, allow_missing_cameras=True, draft=DRAFT
    ) as opened:
        yield opened


def seen(policy: Policy, golden: Path) -> list[Observation]:
    case = policy.bundle.path.stem
    g = Golden(golden / case)
    if case == "openvla-ar":
        images = {camera: g.numpy(f"frame.{camera}") for camera in g.cameras}
        return [Observation(images, np.zeros(0, np.float32), g.metadata["task"])]
    return [fast_observation(g, number) for number in CASES[case]]


def say(policy: Policy, context: object, drafts: Drafts | None) -> tuple[list[int], Watch]:
    policy.engine.drafts, watch = drafts, Watch()
    return policy.engine.say(context, watch)[0].tolist(), watch  # type: ignore[attr-defined]


class Always(Drafts):
    def pays(self) -> bool:
        return True


def knows(*sentences: list[int]) -> Drafts:
    drafts = Always(DRAFT)
    for sentence in sentences:
        drafts.keep(sentence)
    return drafts


def test_sentences_are_the_plain_loops_whatever_is_guessed(policy: Policy, golden: Path) -> None:
    """Of every sentence of the fixtures: the right guess, ones that err at each third token, and one that is of
    another world. A right one takes a pass for DRAFT + 1 tokens."""
    for member in map(policy.prepare, seen(policy, golden)):
        context = policy.engine.read(member.inputs.batched())
        plain, watch = say(policy, context, None)
        assert (watch.drafted, watch.accepted, len(watch.timing().step_ms)) == (0, 0, len(plain))
        found, watch = say(policy, context, knows(plain))
        assert found == plain
        first, *rest = watch.timing().step_ms
        assert first
        assert len(rest) == -(-(len(plain) - 1) // (DRAFT + 1))
        assert watch.accepted == len(plain) - 1 - len(rest)
        for begin in range(3):
            wrong = [token + 1 if place % 3 == begin else token for place, token in enumerate(plain)]
            found, watch = say(policy, context, knows(wrong))
            assert found == plain
            assert 0 < watch.accepted < watch.drafted
            assert len(watch.timing().step_ms) == len(plain) - watch.accepted
        assert say(policy, context, knows([7] * 60))[0] == plain


@torch.inference_mode()
def test_rounding_stays_far_below_the_lead_that_is_asked_for(policy: Policy, golden: Path) -> None:
    """Scores of a pass of several tokens against those of passes of one, as shares of the largest."""
    model = policy.engine.model
    scores: list[torch.Tensor] = []
    plain, logits = [], model.logits

    def kept(h: torch.Tensor) -> torch.Tensor:
        scores.append(logits(h))
        return scores[-1]

    context = policy.engine.read(policy.prepare(seen(policy, golden)[0]).inputs.batched())
    model.logits = kept
    try:
        spoken = begun = model.first(context)
        for _ in range(DRAFT + 1):
            spoken = model.next(spoken, context)
            plain.append(int(spoken.token))
        alone = torch.cat(scores[1:], dim=1)
        model.check(begun, context, torch.tensor([plain[:-1]]))
    finally:
        del model.logits
    error = ((scores[-1] - alone).abs().amax(-1) / alone.abs().amax(-1)).max()
    assert 0 <= float(error) < CLOSE / 100


def test_a_lead_that_rounding_could_turn_is_left_to_the_plain_pass() -> None:
    """A head in which each token has a twin of the same score: nothing that is guessed is taken."""
    model = make("speaking", seed=1)
    weight = model.lm_head.weight
    half = len(weight) // 2
    with torch.no_grad():
        weight[half : 2 * half] = weight[:half]
    engine = EagerEngine(model, CPU)
    context = engine.read(observation(model)[0].batched())
    plain, watch = engine.say(context)[0].tolist(), Watch()
    engine.drafts = knows(plain)
    assert engine.say(context, watch)[0].tolist() == plain
    assert (watch.accepted, len(watch.timing().step_ms)) == (0, len(plain))
    assert watch.drafted


def test_an_end_within_a_guess_ends_the_sentence_and_cancelling_the_passes() -> None:
    model = make("speaking", seed=1)
    engine = EagerEngine(model, CPU)
    inputs = observation(model)[0].batched()
    endless = engine.say(engine.read(inputs))[0].tolist()
    end = next(token for place, token in enumerate(endless) if 2 < place < 6 and token not in endless[:place])
    engine = EagerEngine(make("speaking", seed=1, end=end), CPU)
    context, cancel = engine.read(inputs), threading.Event()
    engine.drafts = knows(endless)  # goes on behind the end
    assert engine.say(context)[0].tolist() == endless[: endless.index(end) + 1]
    cancel.set()
    with pytest.raises(CancelledError):
        engine.say(context, Watch(cancel))
    assert engine.say(context)[0].tolist() == endless[: endless.index(end) + 1]


def test_guesses_follow_what_was_said() -> None:
    drafts = Drafts(3)
    assert drafts.guess([1, 2], 9) == []
    drafts.keep([1, 2, 3, 4, 5, 6])
    assert drafts.guess([1], 9) == [2, 3, 4]  # at the same place
    assert drafts.guess([1, 2, 3], 2) == [4, 5]  # no more than there is room for
    assert drafts.guess([9, 9, 8, 3, 4], 9) == [5, 6]  # what followed the same two elsewhere
    assert drafts.guess([9], 9) == [2, 3, 4]  # another token: the last sentence's place all the same
    drafts.keep([9, 7, 7])
    assert drafts.guess([9], 9) == [7, 7]
    assert drafts.guess([5, 6, 8, 5, 6], 9) == [8, 5, 6]  # of this sentence itself


def test_the_way_that_takes_less_goes_on_and_the_other_is_tried_again() -> None:
    for quick in (True, False):
        drafts, tried = Drafts(3), []
        for _ in range(64):
            tried.append(drafts.pays())
            drafts.note(tried[-1], (1.0 if tried[-1] == quick else 2.0) * 3, 3)
        assert tried[:2] == [True, False]
        assert tried.count(not quick) == 1 + 64 // 16
        before = tried.count(True)
        for _ in range(64):  # now it is the other
            tried.append(drafts.pays())
            drafts.note(tried[-1], 2.0 if tried[-1] == quick else 1.0, 1)
        assert (tried.count(True) - before < 32) == quick


@pytest.mark.slow
def test_a_server_says_what_was_accepted(
    case_bundle: Callable[[str], Path], golden: Path, tmp_path: Path
) -> None:
    bundle, given = case_bundle("pi0fast-2cam"), fast_observation(Golden(golden / "pi0fast-2cam"), 0)
    with sinew.load(bundle, "cpu", engine="plan", threads=1, allow_missing_cameras=True) as alone:
        wanted = alone.infer(given)
    flags = [
        "--engine",
        "plan",
        "--threads",
        "1",
        "--draft",
        "8",
        "--allow-missing-cameras",
        "--wire",
        "native:0",
    ]
    with serving(tmp_path, bundle, *flags) as server, Client(server.address, timeout=60) as client:
        client.infer(given)
        again = client.infer(given)
    assert np.array_equal(again.actions, wanted.actions)
    assert 0 < again.timing.accepted <= again.timing.drafted
    assert len(again.timing.step_ms) == len(wanted.timing.step_ms) - again.timing.accepted


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("serve blocks --draft 4 --engine plan", "got smolvla on plan in fp32 on cpu"),
        ("serve {fast} --draft 4 --engine plan --dtype bf16", "got pi0_fast on plan in"),
    ],
)
def test_what_cannot_check_a_guess_says_so(
    line: str, got: str, case_bundle: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(fast=case_bundle("pi0fast-2cam")).split()) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "draft: expected a head that says tokens, on engine eager or plan in fp32 on a CPU" in error
    assert got in error


def test_tokens_that_are_drawn_are_not_guessed(case_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(SinewError, match="draft: expected none, as guesses are of tokens not drawn, got 4"):
        RolloutPolicy(case_bundle("pi0fast-2cam"), Exploration("tokens", 1.0), draft=4)

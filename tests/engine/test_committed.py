"""Committed rows (training-time real-time chunking): a time per row, against a loop written out from the paper."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sinew_eval.sim  # noqa: F401 - registers the environments
import torch

from sinew.convert import convert
from sinew.core import BundleError, ConvertError, Observation, ObservationError
from sinew.engine.example import Inputs
from sinew.policy import Policy, load
from tests.closeness import assert_close, rounding
from tests.covering import some

CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")
COMMITTED = 5


@pytest.fixture(scope="module")
def committed(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("committed")

    def make(case: str) -> Path:
        out, source = folder / f"{case}.gguf", golden / case
        if not out.exists():
            given = {"vlm": source / "vlm"} if case.startswith("smolvla") else {"arch": source / "arch.json"}
            convert(
                source / "checkpoint", out, name=case, settings={"committed_rows": str(COMMITTED)}, **given
            )  # type: ignore[arg-type]
        return out

    return make


def ask(policy: Policy, **fields: Any) -> Observation:
    return Observation.from_mapping(
        {name: getattr(policy.dummy_observation(), name) for name in ("images", "state", "prompt", "seed")}
        | fields
    )


@pytest.mark.parametrize("engine", ["eager", "plan"])
@pytest.mark.parametrize("case", some(CASES, "pi05-2cam"))
def test_one_time_for_all_rows_is_the_ordinary_head(
    committed: Callable[[str], Path], case: str, engine: str
) -> None:
    policy = load(committed(case), engine=engine, threads=1)
    model, batch = (
        policy.engine.model,
        Inputs.of(policy.prepare(ask(policy)).inputs.batched(), torch.device("cpu")),
    )
    with torch.inference_mode():
        context = model.read(model.embed_images(batch.pixels), *batch[1:])
        x = torch.randn(1, *model.noise_shape, generator=torch.Generator().manual_seed(1))
        t = torch.tensor([0.4], dtype=torch.float64)
        one = rounding(lambda: model.act(x, model.embed_time(t), context))
        each = model.act(x, model.embed_time(t.expand(1, x.shape[1])), context)
        other = model.act(
            x, model.embed_time(torch.linspace(0.1, 0.9, x.shape[1], dtype=torch.float64)[None]), context
        )
    assert_close(one, each)
    assert one.refusal(other)


@pytest.mark.parametrize("case", some(CASES, "pi05-2cam"))
def test_a_chunk_continues_committed_rows_as_the_paper_says(
    committed: Callable[[str], Path], case: str
) -> None:
    eager, plan = (load(committed(case), engine=engine, threads=1) for engine in ("eager", "plan"))
    rows, dim, steps, delay = eager.spec.chunk_size, eager.spec.action.dim, 4, 3
    previous = eager.infer(ask(eager, seed=9)).actions[2:]
    asked = ask(eager, previous=previous, delay=delay, solver_steps=steps)

    model, processor = eager.engine.model, eager.processor
    batch = Inputs.of(processor.inputs(asked).batched(), torch.device("cpu"))
    scale, offset = processor.action_normalizer.affine()
    clean = torch.zeros(1, *model.noise_shape)
    clean[0, :delay, :dim] = torch.from_numpy(((previous - offset) / scale)[:delay])
    fixed = torch.arange(rows) < delay
    with torch.inference_mode():
        context = model.read(model.embed_images(batch.pixels), *batch[1:])
        x = torch.from_numpy(processor.noise(asked)[0])[None].clone()
        for k in range(steps):
            x[:, fixed] = clean[:, fixed]
            t = torch.full((1, rows), 1 - k / steps, dtype=torch.float64)
            t[:, fixed] = 0.0
            x = x - model.act(x, model.embed_time(t), context) / steps
        x[:, fixed] = clean[:, fixed]
    expected = x[0, :, :dim].double().numpy() * scale + offset

    rounded = rounding(lambda: eager.infer(asked).actions)
    got = rounded.found.numpy()
    assert_close(rounded, expected)
    assert_close(rounded, np.concatenate([previous[:delay], got[delay:]]))  # to units of the model and back
    assert_close(rounded, plan.infer(asked).actions)
    other = ask(eager, previous=previous, delay=1, solver_steps=steps, seed=4)
    together = eager.run_batch([eager.prepare(asked), eager.prepare(other)])
    for found, alone in zip(together, (asked, other), strict=True):
        assert_close(rounded.about(eager.infer(alone).actions), found.actions)
    plain = ask(eager, previous=previous, delay=0, solver_steps=steps)
    assert np.array_equal(eager.infer(plain).actions, eager.infer(ask(eager, solver_steps=steps)).actions)
    assert not np.array_equal(eager.infer(plain).actions[delay:], got[delay:])


def test_what_a_policy_was_not_trained_for_is_refused(
    committed: Callable[[str], Path], smolvla_bundle: Callable[[str], Path]
) -> None:
    policy = load(committed("smolvla-2cam"), engine="eager", threads=1)
    previous = np.zeros((8, policy.spec.action.dim), np.float32)
    policy.check(ask(policy, previous=previous, delay=COMMITTED))
    with pytest.raises(ObservationError, match=rf"delay: expected at most the {COMMITTED} actions"):
        policy.check(ask(policy, previous=previous, delay=COMMITTED + 1))
    policy.check(ask(policy, previous=previous, delay=COMMITTED + 1, rtc="guided"))
    with pytest.raises(ObservationError, match="beta: expected no value with rtc trained"):
        policy.check(ask(policy, previous=previous, delay=1, beta=2.0))
    other = load(smolvla_bundle("smolvla-2cam"), engine="eager", threads=1)
    with pytest.raises(ObservationError, match="was not trained with an action prefix"):
        other.check(ask(other, previous=previous, delay=1, rtc="trained"))


def test_the_embedded_policy_continues_what_it_committed_to() -> None:
    """Rows that the policy would not have chosen itself are kept, and what follows depends on them."""
    policy = load(
        Path(__file__).parents[2] / "sinew" / "assets" / "blocks-rtc.gguf", engine="plan", threads=1
    )
    assert policy.spec.committed_rows == 16
    env = pytest.importorskip("gymnasium").make("sinew/Blocks-v0")
    seen, _ = env.reset(seed=1)
    left, right = (np.tile(np.float32([move, 0.0, 0.0, 1.0]), (8, 1)) for move in (-1.0, 1.0))
    after = []
    for previous in (left, right):
        actions = policy.infer({**seen, "seed": 0, "previous": previous, "delay": 8}).actions
        np.testing.assert_allclose(actions[:8], previous, atol=1e-4)
        after.append(actions[8:20])
    assert float(np.abs(after[0] - after[1]).max()) > 0.1


def test_converters_read_what_lerobot_trained(golden: Path, tmp_path: Path) -> None:
    source = golden / "pi05-2cam"
    checkpoint = Path(
        shutil.copytree(source / "checkpoint", tmp_path / "checkpoint", copy_function=shutil.copyfile)
    )
    config = checkpoint / "config.json"
    text = config.read_text()
    config.write_text(text.rstrip().rstrip("}").rstrip() + ', "rtc_training_max_delay": 4}')
    bundle = convert(checkpoint, tmp_path / "policy.gguf", arch=source / "arch.json", name="pi")
    assert load(bundle, engine="eager").spec.committed_rows == 4
    config.write_text(text.rstrip().rstrip("}").rstrip() + ', "rtc_training_max_delay": 5000}')
    with pytest.raises(ConvertError, match="rtc_training_max_delay: expected a whole number from 0"):
        convert(checkpoint, tmp_path / "other.gguf", arch=source / "arch.json", name="pi")


def test_a_head_with_one_time_for_all_rows_has_no_committed_rows(
    committed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinew.families.smolvla.model import SmolVLA

    monkeypatch.setattr(SmolVLA, "times_per_row", False)
    with pytest.raises(BundleError, match="spec.committed_rows: expected 0, because the head of smolvla"):
        load(committed("smolvla-2cam"), engine="eager", threads=1)

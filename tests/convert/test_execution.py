"""How a checkpoint is meant to be executed is a field of its bundle, and everything that executes actions follows it.

ACT's temporal ensembling averages the rows that the chunks of successive steps have for one step. LeRobot measured no
success for one step of each chunk without it (LeRobot pull request 319).
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from sinew_client import ActionQueue
from sinew_client.control import choose
from sinew_client.control.defaults import REPLAN
from sinew_client.types import ActionChunk, CameraSpec, PolicySpec, RealTimeChunking, Timing, VectorSpec
from sinew_eval.episodes.settings import Variant
from sinew_eval.episodes.variants import _handed_over

import sinew
from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.core import ConvertError
from tests.cases import cases

ROWS = 4


@pytest.fixture
def act(golden, tmp_path):
    """``act(coefficient, n_action_steps) -> bundle`` of an ACT with these settings."""

    def make(coefficient, steps=1):
        path = tmp_path / f"checkpoint-{coefficient}"
        shutil.copytree(golden / "act-2cam" / "checkpoint", path)
        file = path / "config.json"
        record = json.loads(file.read_text())
        record |= {"temporal_ensemble_coeff": coefficient, "n_action_steps": steps}
        file.write_text(json.dumps(record))
        return convert(path, tmp_path / f"act-{coefficient}.gguf")

    return make


@pytest.mark.parametrize("coefficient", [0.01, 0, -0.05])
def test_the_bundle_states_the_coefficient(act, coefficient):
    spec = Bundle(act(coefficient)).manifest.spec
    assert (spec.temporal_ensemble, spec.n_action_steps) == (coefficient, 1)
    chosen = choose(policy=spec.to_dict())
    assert (chosen.handover, chosen.replan) == (f"ensemble:{coefficient:g}", "1")


@pytest.mark.parametrize("name", ["smolvla-2cam", "pi05-2cam", "evo1"])
def test_real_time_chunking_of_the_checkpoint_is_a_field_and_named_at_every_start(
    golden, tmp_path, caplog, name
):
    path = tmp_path / name
    shutil.copytree(golden / name / "checkpoint", path)
    file, given = path / "config.json", cases()[name].options(golden / name)
    record = json.loads(file.read_text())
    for said, told in (
        (
            {"enabled": True, "execution_horizon": 2, "prefix_attention_schedule": "EXP"},
            RealTimeChunking(2, "exp", 10.0),
        ),
        ({"mode": "trained", "max_guidance_weight": 3}, RealTimeChunking(10, "linear", 3.0, "trained")),
        ({"enabled": False}, None),
        (None, None),
    ):
        file.write_text(json.dumps(record | {"rtc_config": said}))
        manifest = Bundle(convert(path, tmp_path / "out.gguf", **given)).manifest
        assert manifest.spec.real_time_chunking == told
        assert PolicySpec.from_dict(json.loads(json.dumps(manifest.spec.to_dict()))) == manifest.spec
        named = [note for note in manifest.provenance.notes if note.startswith("rtc_config=")]
        assert bool(named) == (told is not None)
        reason = choose(policy=manifest.spec.to_dict()).reason
        assert ("made for real-time chunking" in reason) == (told is not None)
        if told is not None:
            follows = f"--handover rtc:no-jacobian:exp:10 --replan {manifest.spec.chunk_size - 2}"
            follows = "--handover rtc:trained" if told.mode == "trained" else follows
            assert follows in reason
            assert "chunking" not in choose("rtc", policy=manifest.spec.to_dict()).reason
        caplog.clear()
        served = sinew.serve(tmp_path / "out.gguf", ["native:0"], engine="eager")
        served.close()
        assert ("made for real-time chunking" in caplog.text) == (told is not None)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"execution_horizon": -1}, "rtc_config.execution_horizon: expected a whole number from 0"),
        ({"max_guidance_weight": "10"}, "rtc_config.max_guidance_weight: expected a number, at least 0"),
        ({"prefix_attention_schedule": "cosine"}, "prefix_attention_schedule: expected one of exp, linear"),
        ({"mode": "soft"}, "rtc_config.mode: expected one of guided, trained"),
    ],
)
def test_real_time_chunking_that_is_not_understood_is_named(golden, tmp_path, told, message):
    path = tmp_path / "smolvla"
    shutil.copytree(golden / "smolvla-2cam" / "checkpoint", path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rtc_config": told}))
    with pytest.raises(ConvertError, match=message):
        convert(path, tmp_path / "out.gguf", **cases()["smolvla-2cam"].options(golden / "smolvla-2cam"))


def test_without_a_coefficient_nothing_changes(act):
    spec = Bundle(act(None, 3)).manifest.spec
    assert spec.temporal_ensemble is None
    chosen = choose(policy=spec.to_dict())
    assert (chosen.handover, chosen.replan) == ("freeze", REPLAN)
    assert "n_action_steps 3; --replan 3 does the same" in chosen.replan_reason
    assert choose(policy=spec.to_dict(), replan="3").replan_reason == ""


@pytest.mark.parametrize("coefficient", ["0.01", True, [1]])
def test_a_coefficient_that_is_no_number_is_named(act, coefficient):
    with pytest.raises(ConvertError, match="temporal_ensemble_coeff: expected a number or null"):
        act(coefficient)


def test_what_the_user_asks_for_comes_first_and_is_said(act):
    policy = Bundle(act(0.01)).manifest.spec.to_dict()
    chosen = choose("freeze", policy=policy)
    assert chosen.handover == "freeze"
    assert "chosen by the user; the checkpoint was trained for ensemble:0.01" in chosen.reason
    chosen = choose("ensemble:0.5", policy=policy)
    assert chosen.reason == "chosen by the user"
    assert choose(policy=policy, replan="2").replan == "2"


@pytest.mark.usefixtures("dry_ends")
@pytest.mark.parametrize("steps", [1, 3])
def test_run_prints_the_rows_that_the_checkpoint_was_evaluated_with(act, capsys, steps):
    bundle = act(None, steps)
    main(["run", str(bundle), "--robot", "dry", "--hz", "30", "--seconds", "0.2", "--prompt", "go"])
    said = "".join(capsys.readouterr())
    assert f"the checkpoint was evaluated with n_action_steps {steps}; --replan {steps} does the same" in said


def test_run_prints_and_follows_it(act, capsys):
    words = ["run", str(act(0.01)), "--robot", "dry", "--hz", "10", "--seconds", "2", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "hand-over ensemble:0.01: the checkpoint was trained for temporal" in " ".join(printed.err.split())
    settings = json.loads(printed.out.splitlines()[-1])["settings"]
    assert (settings["handover"], settings["replan"]) == ("ensemble:0.01", "1")


def test_eval_follows_it(act):
    variant = _handed_over(Variant(str(act(0.01))), None, set())
    assert (variant.handover, variant.replan) == ("ensemble:0.01", 1)
    variant = _handed_over(Variant(str(act(None))), None, set())
    assert (variant.handover, variant.replan) == ("freeze", REPLAN)


def spec_of(coefficient):
    return PolicySpec(
        "act", "act", (CameraSpec("top", 8, 8),), VectorSpec(1), VectorSpec(1), ROWS, 0, 1, 1,
        n_action_steps=1, temporal_ensemble=coefficient,
    )  # fmt: skip


class Counting:
    """A policy whose k-th chunk has the rows 100 k, 100 k + 1, ..."""

    def __init__(self, coefficient):
        self.spec, self.asked = spec_of(coefficient), 0

    def infer(self, observation, timeout=None):
        rows = 100.0 * self.asked + np.arange(ROWS, dtype=np.float32)[:, None]
        self.asked += 1
        return ActionChunk(rows, Timing())

    def reset(self, session=""):
        pass


def expected(step, first, coefficient):
    """The mean of the rows for ``step`` of all chunks since ``first``, the oldest first (ACT, algorithm 2)."""
    rows = [100.0 * k + step - k for k in range(max(first, step - ROWS + 1), step + 1)]
    weights = np.exp(-coefficient * np.arange(len(rows)))
    return float(np.dot(weights, rows) / weights.sum())


@pytest.mark.parametrize("coefficient", [0.01, 0.0, -0.7])
def test_an_action_queue_averages_the_chunks_of_all_steps(coefficient):
    policy = Counting(coefficient)
    queue = ActionQueue(policy)
    seen = {"images": {}, "state": np.zeros(1), "prompt": "go"}
    for step in range(7):
        action = queue.select_action(seen)
        np.testing.assert_allclose(action, [expected(step, 0, coefficient)], rtol=1e-5)
    for step in range(7, 9):  # chunks of another instruction say nothing of this one
        action = queue.select_action(seen | {"prompt": "stop"})
        np.testing.assert_allclose(action, [expected(step, 7, coefficient)], rtol=1e-5)
    queue.reset()
    np.testing.assert_allclose(queue.select_action(seen), [900.0])
    assert ActionQueue(policy, rows=2).rows == 2  # as asked for


def test_the_protocol_that_executes_rows_averages_them():
    from sinew.serve.request import WireMessage
    from sinew.serve.wires.vla_eval import Conversation, unpack

    talk = Conversation(spec_of(0.01), {})
    policy, answers = Counting(0.01), []
    for _ in range(5):
        talk._seq = 0
        answer = talk.answer(WireMessage(), [policy.infer(None)], 0.0, None)
        answers.append(unpack(answer)["payload"]["actions"])
    np.testing.assert_allclose(np.ravel(answers), [expected(k, 0, 0.01) for k in range(5)], rtol=1e-5)
    assert talk._hello({})["temporal_ensemble"] == 0.01
    assert Conversation(spec_of(0.01), {}, {"rows": "2"}).rows == 2

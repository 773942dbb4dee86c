"""What a program says of the package: `sinew.quantize`, `sinew.record`, an episode over a bundle; all of it typed."""

from __future__ import annotations

import inspect
import operator
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sinew
from sinew.core import SinewError
from sinew.records.recorder import read_records
from tests.serve.test_replay import FRAMES, STATE

CASE = "smolvla-2cam"
SEEN = {"images": FRAMES, "state": STATE, "prompt": "go", "session": "arm"}


def test_names_are_there_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sinew, "convert", raising=False)  # which others have imported
    names = ("load", "connect", "convert.convert", "evaluate", "quantize", "record")
    assert {name.partition(".")[0] for name in names} <= set(dir(sinew)) == set(sinew.__all__)
    for name in names:
        function = operator.attrgetter(name)(sinew)
        assert function.__doc__
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(
            each.annotation is not inspect.Parameter.empty for each in signature.parameters.values()
        ), name
    assert typing.get_type_hints(sinew.quantize)["return"] is sinew.Quantized
    with pytest.raises(AttributeError, match="no attribute 'quantise'") as caught:
        _ = sinew.quantise
    assert caught.value.obj is sinew  # so that Python asks: did you mean 'quantize'?


class NextFrame:
    """A policy during whose inference a camera writes its next frame where this one was."""

    def __init__(self, policy: sinew.Policy, buffer: np.ndarray):
        self.spec, self._policy, self._buffer = policy.spec, policy, buffer

    def infer(self, observation: Any, **options: Any) -> Any:
        self._buffer[:] = 0
        return self._policy.infer(observation, **options)


@pytest.mark.parametrize(
    ("gone", "name"), [("torch", "RolloutPolicy"), ("torch", "Exploration"), ("gymnasium", "evaluate")]
)
def test_a_name_whose_package_is_absent_says_which(gone: str, name: str) -> None:
    program = f"import sys; sys.modules[{gone!r}] = None; import sinew; sinew.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"MissingPackageError: sinew.{name} needs {gone}: pip install " in done.stderr


def test_a_policy_is_recorded_and_its_recording_answers_the_same(
    smolvla_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    with sinew.load(smolvla_bundle(CASE), engine="eager", threads=1) as policy:
        with sinew.record(policy, folder) as recorded:
            episode = recorded.episode(rows=2, session="arm")
            rows = [episode.select_action(SEEN) for _ in range(3)]  # two requests
            with pytest.raises(SinewError, match="tail"):
                recorded.infer({**SEEN, "images": {**FRAMES, "tail": FRAMES["camera1"]}})
            recorded.policy = NextFrame(policy, buffer := FRAMES["camera1"].copy())
            recorded.infer({**SEEN, "images": {**FRAMES, "camera1": buffer}})
            assert not buffer.any()
        policy.check(SEEN)  # which was given stays open
        asked = [{**SEEN, "seed": 1}, {**SEEN, "state": STATE[:2]}, {**SEEN, "seed": 2}]
        first, wrong, second = policy.infer_all(asked)
        assert isinstance(wrong, SinewError)
        assert "state: expected" in str(wrong)
        for chunk, alone in ((first, policy.infer(asked[0])), (second, policy.infer(asked[2]))):
            np.testing.assert_allclose(chunk.actions, alone.actions, rtol=0, atol=1e-5)
        with pytest.raises(SinewError, match=r"a mapping \(infer_all takes several\), got list"):
            policy.infer(asked)
        table = policy._repr_html_()
        assert "<tr><th>engine</th><td>eager: " in table
        assert all(name in table for name in FRAMES)
    kept = list(read_records(folder))
    assert [each.wire for each in kept] == ["python"] * 4
    assert "tail" in kept[2].error
    np.testing.assert_array_equal(kept[0].actions[:2], rows[:2])
    np.testing.assert_array_equal(kept[3].observation.images["camera1"], FRAMES["camera1"])
    with sinew.connect(folder, latency=False) as again:
        np.testing.assert_array_equal(again.infer(SEEN).actions[:2], rows[:2])


@pytest.mark.slow
def test_quantize_is_what_the_verb_does(smolvla_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    made = sinew.quantize(
        smolvla_bundle(CASE), tmp_path / "small.gguf", observations=2, engine="cpu", episodes=0
    )
    assert made.recipe == {"vision": "int8", "language": "int8", "head": "fp32"}
    assert 0 < made.record.error < 0.05
    assert made.nbytes[0] < 0.7 * made.nbytes[1]
    assert made.warnings == []
    assert sinew.load(made.out).recipe == {"vision": "int8", "language": "int8"}
    with pytest.raises(SinewError, match="without a recipe"):
        sinew.quantize(made.out, tmp_path / "again.gguf")

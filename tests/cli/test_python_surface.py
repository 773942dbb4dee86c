"""What a program says of the package: `sinew.quantize`, `sinew.record`, an episode over a bundle; all of it typed."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sinew
from sinew.core import Observation, ObservationError, SinewError
from sinew.records.recorder import read_records
from tests.serve.test_replay import FRAMES, STATE

CASE = "smolvla-2cam"
SEEN = {"images": FRAMES, "state": STATE, "prompt": "go", "session": "arm"}


def test_names_are_there_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sinew, "convert", raising=False)  # which others have imported
    names = ("load", "connect", "convert", "evaluate", "quantize", "record", "run", "serve")
    assert (
        set(names) <= set(dir(sinew)) > set(sinew.__all__)
    )  # what other packages add is no part of a star import
    for name in names:
        function = getattr(sinew, name)
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


def test_a_package_is_called_and_stays_one(tmp_path: Path) -> None:
    import sinew.serve.wires
    from sinew.convert import convert
    from sinew.serve.wires.server import Server

    assert sinew.serve.wires.server.Server is Server  # type: ignore[attr-defined] # checkers know the function
    assert sinew.convert.convert is convert  # type: ignore[attr-defined]
    assert inspect.signature(sinew.serve) == inspect.signature(Server).replace(return_annotation=Server)
    assert pickle.loads(pickle.dumps(sinew.serve)) is sys.modules["sinew.serve"]
    with pytest.raises(SinewError, match="gone: no such file or directory"):
        sinew.convert(tmp_path / "gone", tmp_path / "out.gguf")


PROGRAM = """
import numpy as np
import sinew
from sinew.serve.limits import ServingLimits

with sinew.load("blocks") as policy:
    with sinew.serve(policy, ["native:0"], limits=ServingLimits(queue=4)) as server:
        with sinew.connect(server.addresses["native"]) as robot, sinew.record(robot, "records") as kept:
            rows: np.ndarray = kept.infer(policy.dummy_observation()).actions
made: sinew.Quantized = sinew.quantize("blocks", sinew.convert("checkpoint", "out.gguf"))
found: sinew.Evaluation = sinew.evaluate("blocks", episodes=2)
"""


@pytest.mark.slow
def test_a_strict_program_has_types(tmp_path: Path) -> None:
    """Wheels have what this tree has: py.typed, and the names that ``__getattr__`` finds later."""
    for name, text, status in (("right", PROGRAM, 0), ("wrong", "import sinew\nsinew.serve(3).wait()\n", 1)):
        program = tmp_path / f"{name}.py"
        program.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", program],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout
    assert 'Argument 1 to "Server" has incompatible type "int"' in done.stdout


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
    assert sinew.load(made.out).facts.recipe == {"vision": "int8", "language": "int8"}
    with pytest.raises(SinewError, match="without a recipe"):
        sinew.quantize(made.out, tmp_path / "again.gguf")


@pytest.mark.parametrize("theirs", ["task", "instruction"])
def test_a_word_of_other_libraries_names_ours(theirs: str) -> None:
    with pytest.raises(ObservationError, match="got an unknown key") as caught:
        Observation.from_mapping({"images": {}, "state": [], theirs: "pick up the cube"})
    assert str(caught.value) == f"{theirs}: expected prompt, got an unknown key"


def test_a_device_is_what_torch_calls_one(smolvla_bundle: Callable[[str], Path]) -> None:
    import torch

    with sinew.load(smolvla_bundle("smolvla-2cam"), torch.device("cpu"), engine="eager") as policy:
        assert policy.device == "cpu"


FORKED = """
import os, signal, sys
import sinew
policy = sinew.load("pen", engine="onnx")
seen = policy.dummy_observation()
policy.infer(seen)
if (child := os.fork()) == 0:
    signal.alarm(60)  # threads that are not there are waited for without an end
    try:
        policy.infer(seen)
    except sinew.core.SinewError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(3)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), policy.infer(seen).actions.shape)
"""


def test_a_forked_process_is_told_to_open_its_own() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    first, last = ran.stdout.splitlines()
    assert first.startswith("ClosedError the policy was opened in process "), ran.stderr
    assert first.endswith("open the policy in each process")
    assert last == "3 (24, 1)"

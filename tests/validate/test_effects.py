"""How much the actions change if one input changes: of the built-in policies, and of copies that ignore one."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import sinew
from sinew.checks.effects import LEAST_SHARE, NOISE_SHARE, Effects, changes, measure
from sinew.checks.validate.observations import random_observations
from sinew.cli import main
from sinew.core import ActionChunk, Observation
from tools.structure import ROOT

ASSETS = ROOT / "sinew" / "assets"


def measured(path: Path | str) -> Effects:
    with sinew.load(path, engine="eager") as policy:
        observations = [
            replace(each, prompt="place the green block in the left bin")
            for each in itertools.islice(random_observations(policy), 2)
        ]
        return measure(policy, observations)


def ignoring(tmp_path: Path, name: str, *tensors: str, scale: float = 0.0) -> Path:
    """Return a copy of a built-in policy in which a path is blanked by hand: its weights times ``scale``."""
    path = tmp_path / f"{name}.gguf"
    shutil.copyfile(ASSETS / f"{name}.gguf", path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name in tensors:
            if tensor.tensor_type.name == "BF16":
                whole = tensor.data.view(np.uint16).astype(np.uint32) << 16
                scaled = (whole.view(np.float32) * np.float32(scale)).view(np.uint32) >> 16
                tensor.data.view(np.uint16)[:] = scaled.astype(np.uint16)
            else:
                tensor.data[:] = tensor.data * np.float32(scale)
    return path


@pytest.mark.parametrize("name", ["act", "blocks", "blocks-rtc", "egg", "pen"])
def test_the_built_in_policies_use_every_input(name: str) -> None:
    found = measured(ASSETS / f"{name}.gguf")
    assert found.unused == []
    verdicts = {each.verdict for each in found.effects if each.input == "instruction"}
    assert ("not read" if name == "act" else "used") in verdicts
    assert (found.noise > 0) == (name != "act")
    assert all(each.threshold == max(NOISE_SHARE * found.noise, LEAST_SHARE) for each in found.effects)


@pytest.mark.parametrize(
    ("name", "tensors", "scale", "unused", "verdict"),
    [
        ("act", ["state_proj.weight", "environment_proj.weight"], 0.0, ["state"], "no effect"),
        ("act", ["state_proj.weight", "environment_proj.weight"], 1e-3, ["state"], "weak"),
        ("blocks", ["state_proj.weight"], 0.0, ["state"], "no effect"),
        ("pen", ["vision.patch_embedding.weight"], 0.0, ["camera now", "camera previous"], "no effect"),
    ],
)
def test_a_policy_that_ignores_an_input_is_named(
    tmp_path: Path, name: str, tensors: list[str], scale: float, unused: list[str], verdict: str
) -> None:
    found = measured(ignoring(tmp_path, name, *tensors, scale=scale))
    assert set(unused) <= set(found.unused)
    assert {each.verdict for each in found.effects if each.input in unused} == {verdict}
    assert found.text().startswith(f"the actions hardly depend on: {', '.join(found.unused)}; ")


def test_a_policy_that_reads_no_word_of_the_instruction_is_named() -> None:
    with sinew.load(ASSETS / "egg.gguf", engine="eager") as policy:

        class Deaf:
            """A real policy that gets the same instruction, whatever it is asked."""

            spec, processor = policy.spec, policy.processor

            def infer(self, observation: Observation) -> ActionChunk:
                return policy.infer(replace(observation, prompt="hold the egg"))

        observations = list(itertools.islice(random_observations(policy), 2))
        found = measure(Deaf(), observations)  # type: ignore[arg-type]
    assert "instruction" in found.unused
    assert {each.verdict for each in found.effects if each.input == "instruction"} == {"no effect"}


def test_only_what_differs_is_changed() -> None:
    with sinew.load(ASSETS / "pen.gguf", engine="eager") as policy:
        one, other = itertools.islice(random_observations(policy), 2)
        alike = replace(one, images=dict.fromkeys(one.images, one.images["now"]))
        assert not any("frame of" in change for _, change, _ in changes(policy, alike, [alike]))
        found = {(name, change): each for name, change, each in changes(policy, one, [one, other])}
    np.testing.assert_array_equal(
        found["camera now", "the frame of previous"].images["now"], one.images["previous"]
    )
    np.testing.assert_array_equal(
        found["state", "replaced by the state of another observation"].state, other.state
    )
    assert (found["camera now", "grey"].images["now"] == 128).all()
    assert len({id(each) for each in found.values()}) == len(found)


def test_the_doctor_prints_the_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, told = ignoring(tmp_path, "egg", "state_proj.weight"), tmp_path / "told.json"
    words = ["doctor", str(path), "--observe", "egg", "--seconds", "0.3", "--json", str(told)]
    main(words)
    assert json.loads(told.read_text())["effects"]["unused"][-1] == "state"
    printed = " ".join(capsys.readouterr().out.split())
    assert "state; the sampler's noise changes the actions by" in printed
    main([*words, "--no-effects"])
    assert "effects" not in json.loads(told.read_text())


def test_an_evaluation_prints_the_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    told = tmp_path / "told.json"
    words = ["eval", "pen", "--episodes", "1", "--workers", "1", "--effects", "--json", str(told)]
    assert main(words) == 0
    (found,) = json.loads(told.read_text())["effects"].values()
    assert found["unused"] == []
    assert {each["input"] for each in found["effects"]} == {
        "instruction",
        "camera now",
        "camera previous",
        "state",
    }
    assert "the actions depend on every input" in " ".join(capsys.readouterr().out.split())
    assert main(["eval", "expert", "--env", "sinew/Pen-v0", "--episodes", "1", "--effects"]) == 1
    assert "--effects: expected a bundle, got expert" in capsys.readouterr().err

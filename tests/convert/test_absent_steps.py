"""A step that a family was trained with and that a checkpoint's file lacks is named, never passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from tests.cases import cases

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"


@pytest.fixture
def without(golden, tmp_path):
    """``without(case, *steps, config) -> (its checkpoint without these steps, what its conversion is given)``."""

    def make(name: str, *steps: str, **config):
        path = tmp_path / name
        shutil.copytree(golden / name / "checkpoint", path)
        for file in (path / PRE, path / POST):
            record = json.loads(file.read_text())
            record["steps"] = [step for step in record["steps"] if step["registry_name"] not in steps]
            file.write_text(json.dumps(record))
        if config:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return path, cases()[name].options(golden / name)

    return make


def noted(path: Path, given, **more) -> str:
    return "\n".join(Bundle(convert(path, path.parent / "o.gguf", **given, **more)).manifest.provenance.notes)


IMAGES = ("xvla_image_scale", "xvla_image_to_float", "xvla_imagenet_normalize")


@pytest.mark.parametrize("name", ["xvla-ee6d", "xvla-auto"])
@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (
            IMAGES,
            [
                "no step xvla_imagenet_normalize: the model reads frames in the range 0 to 1",
                "xvla_image_to_float",
            ],
        ),
        (IMAGES[2:], ["no step xvla_imagenet_normalize: the model reads frames in the range 0 to 1"]),
        (
            ("xvla_add_domain_id",),
            ["no step xvla_add_domain_id: the file does not define the domain", "domain 0 of"],
        ),
        ((*IMAGES, "xvla_add_domain_id"), ["xvla_imagenet_normalize", "xvla_add_domain_id"]),
    ],
)
def test_xvla_without_its_steps(without, name, steps, told):
    path, given = without(name, *steps)
    notes = noted(path, given)
    assert all(each in notes for each in told), notes


def test_xvla_with_its_steps_or_a_domain_that_is_given(without):
    path, given = without("xvla-ee6d")
    assert "no step" not in noted(path, given)
    (path / PRE).unlink()
    path, given = without("xvla-auto", "xvla_add_domain_id")
    notes = noted(path, given, embodiment="1")
    assert "xvla_add_domain_id" not in notes
    assert "domain 1 of" in notes


@pytest.mark.parametrize("name", ["pi0-2cam", "pi05-2cam"])
def test_relative_actions_that_no_step_makes_absolute(without, name):
    steps = ("relative_actions_processor", "absolute_actions_processor")
    path, given = without(name, *steps, use_relative_actions=True)
    assert "use_relative_actions=true, and policy_preprocessor.json has no step" in noted(path, given)


def test_vla_jepa_without_what_its_configuration_says(without):
    path, given = without("vla-jepa", "vla_jepa_binarize_gripper", binarize_gripper_action=True)
    assert "binarize_gripper_action=true, but policy_postprocessor.json has no step" in noted(path, given)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("smolvla-2cam", "normalizer_processor"),
        ("smolvla-2cam", "smolvla_new_line_processor"),
        ("pi05-2cam", "pi05_prepare_state_tokenizer_processor_step"),
        ("act-2cam", "unnormalizer_processor"),
        ("diffusion-ddpm", "normalizer_processor"),
        ("xvla-ee6d", "tokenizer_processor"),
    ],
)
def test_steps_without_which_nothing_is_right_are_required(without, name, step):
    path, given = without(name, step)
    with pytest.raises(ConvertError, match=f"expected a step {step}, got none"):
        convert(path, path.parent / "no.gguf", **given)


@pytest.mark.parametrize("name", ["smolvla-2cam", "act-2cam", "xvla-ee6d"])
@pytest.mark.parametrize("file", [PRE, POST])
def test_one_pipeline_without_the_other(without, name, file):
    path, given = without(name)
    (path / file).unlink()
    with pytest.raises(ConvertError, match=f"{file}: this file is missing, and"):
        convert(path, path.parent / "no.gguf", **given)


@pytest.mark.parametrize("file", [PRE, POST])
def test_keys_of_a_pipeline_that_nothing_reads(without, file):
    path, given = without("act-2cam")
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | {"frozen": 1}))
    with pytest.raises(
        ConvertError, match="expected only the keys name and steps, got frozen, which is not understood"
    ):
        convert(path, path.parent / "no.gguf", **given)

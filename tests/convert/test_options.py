"""What the user gives to a conversion is used, recorded, or refused by name."""

from __future__ import annotations

import shutil

import pytest

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.convert.options import ConvertOptions, Joints, Setting, parse_settings
from sinew.core import ConvertError, VectorSpec
from sinew.steps.prompt.advantage import Advantage
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.suffix import Suffix

CASE = "smolvla-2cam"


def test_settings_are_used_and_recorded(golden, tmp_path):
    case = golden / CASE
    out = convert(case / "checkpoint", tmp_path / "o.gguf", vlm=case / "vlm", settings={"solver_steps": 4})
    manifest = Bundle(out).manifest
    assert manifest.spec.solver_steps == 4
    assert manifest.provenance.options == {"vlm": f"{CASE}/vlm", "set solver_steps": "4"}


def test_unknown_settings_and_options_list_the_known_ones(golden, tmp_path):
    case, out = golden / CASE, tmp_path / "o.gguf"
    with pytest.raises(ConvertError, match=r"--set center_crop: .*smolvla \(solver_steps: solver steps of"):
        convert(case / "checkpoint", out, vlm=case / "vlm", settings={"center_crop": False})
    for message, options in {
        r"--embodiment: .*smolvla, which does not support this option; supported options: --base, --vlm, --tokenizer": {
            "embodiment": "gr1"
        },
        r"--stats-key": {"stats_key": "libero"},
        r"--base .*: .*checkpoint is a complete model and not an adapter": {"base": tmp_path},
        r"--openpi-config": {"openpi_config": "pi0_droid"},
        r"--cameras": {"cameras": ("front",)},
    }.items():
        with pytest.raises(ConvertError, match=message):
            convert(case / "checkpoint", out, vlm=case / "vlm", **options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "expected a whole number from 1 to 100, got '0'"),
        ("101", "got '101'"),
        ("1.5", "got '1.5'"),
        ("nan", "got 'nan'"),
        ("", "got ''"),
    ],
)
def test_settings_out_of_range(golden, tmp_path, text, message):
    case = golden / CASE
    with pytest.raises(ConvertError, match=f"--set solver_steps: .*{message}"):
        convert(case / "checkpoint", tmp_path / "o.gguf", vlm=case / "vlm", settings={"solver_steps": text})


def test_names_and_units_are_used_and_recorded(golden, tmp_path):
    case = golden / CASE
    names = [f"joint {k}" for k in range(6)]
    given = {"state": {"names": names, "units": ["deg"] * 6}, "action": {"units": ["rad"] * 6}}
    out = convert(case / "checkpoint", tmp_path / "o.gguf", vlm=case / "vlm", vectors=given)
    spec = Bundle(out).manifest.spec
    assert spec.state.names == tuple(names)
    assert spec.state.labels[0] == "joint 0 [deg]"
    assert spec.action.labels == tuple(f"{k} [rad]" for k in range(6))
    options = Bundle(out).manifest.provenance.options
    assert options["vectors.state"] == ", ".join(spec.state.labels)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"state": {"names": ["a"]}}, "--vectors: state.names: expected 6, got 1"),
        ({"action": {"units": ["m"] * 7}}, "--vectors: action.units: expected 6, got 7"),
        ({"force": {"names": ["a"]}}, "--vectors: expected state and action, .* got 'force'"),
        ({"state": ["a"]}, "--vectors: expected state and action"),
        ({"state": {"name": ["a"]}}, "--vectors: state"),
        ({"state": {"names": "a"}}, "--vectors: state"),
        ({"state": {"names": ["a"] * 6, "units": ["m"]}}, "--vectors: state.units: expected 6, got 1"),
    ],
)
def test_names_and_units_that_do_not_fit_are_refused(golden, tmp_path, given, message):
    case = golden / CASE
    with pytest.raises(ConvertError, match=message):
        convert(case / "checkpoint", tmp_path / "o.gguf", vlm=case / "vlm", vectors=given)
    assert not (tmp_path / "o.gguf").exists()


def test_other_names_than_the_checkpoints_are_refused():
    own = VectorSpec(2, ("pan", "lift"), ("deg", "deg"))
    assert Joints(("pan", "lift")).named("state", own) == own
    with pytest.raises(
        ConvertError, match=r"state.names: expected pan, lift as in the checkpoint, got lift, pan"
    ):
        Joints(("lift", "pan")).named("state", own)


def test_settings_as_text():
    assert parse_settings(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    for texts in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ConvertError, match="--set"):
            parse_settings(texts)
    assert Setting(bool, "").parse("crop", "False") is False
    assert Setting(float, "", 0, 1).parse("crop", "0.9") == 0.9
    assert Setting(str, "", values=("a", "b")).parse("crop", "b") == "b"
    for setting, text in (
        (Setting(bool, ""), "1"),
        (Setting(float, ""), "inf"),
        (Setting(str, "", values=("a",)), "b"),
    ):
        with pytest.raises(ConvertError, match="--set crop: expected"):
            setting.parse("crop", text)


def test_nothing_given_records_nothing(golden, tmp_path):
    shutil.copytree(golden / CASE, tmp_path / CASE, copy_function=shutil.copyfile)
    out = convert(tmp_path / CASE / "checkpoint", tmp_path / "o.gguf")
    assert Bundle(out).manifest.provenance.options == {}
    assert ConvertOptions().record() == {}


def test_a_prompt_gets_a_place_for_advantages(golden, tmp_path):
    case, out = golden / CASE, tmp_path / "o.gguf"
    given = {"advantage": "positive, negative", "usual_advantage": "positive"}
    manifest = Bundle(convert(case / "checkpoint", out, vlm=case / "vlm", settings=given)).manifest
    first, *rest = manifest.processing.prompt.steps
    assert first == Advantage(
        (("positive", "\nAdvantage: positive"), ("negative", "\nAdvantage: negative")), "positive"
    )
    assert tuple(rest) == (Instruction(), Suffix("\n"))
    assert manifest.provenance.options["set advantage"] == "positive, negative"
    given = {"advantage": "0,1", "advantage_words": r"\nI={advantage}", "advantage_place": "text"}
    prompt = Bundle(
        convert(case / "checkpoint", out, vlm=case / "vlm", settings=given)
    ).manifest.processing.prompt
    assert prompt.steps[-1] == Advantage((("0", "\nI=0"), ("1", "\nI=1")), place="text")
    assert prompt.template == "{prompt}\n{advantage}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"usual_advantage": "good"}, "--set usual_advantage requires --set advantage=NAME,NAME"),
        ({"advantage": ", "}, "--set advantage requires --set advantage=NAME,NAME"),
        ({"advantage": "a,a"}, "--set advantage: expected different names, got a, a"),
        (
            {"advantage": "a", "advantage_words": "good"},
            r"--set advantage_words: expected a text that contains",
        ),
        (
            {"advantage": "a", "usual_advantage": "b"},
            "--set advantage: usual: expected one of a, or none, got 'b'",
        ),
        ({"advantage": "a" * 65}, r"--set advantage: words\[0\]\[0\]: expected 1 to 64 printable characters"),
        (
            {"advantage": "a", "advantage_words": "{advantage}" * 65},
            r"--set advantage: words\[0\]\[1\]: expected 1 to 64 characters, got 65",
        ),
        (
            {"advantage": "a", "advantage_place": "end"},
            "--set advantage_place: expected one of instruction, text",
        ),
        ({"advantag": "a"}, "--set advantag: expected a setting of smolvla"),
    ],
)
def test_advantages_that_no_prompt_can_hold(golden, tmp_path, settings, message):
    case = golden / CASE
    with pytest.raises(ConvertError, match=message):
        convert(case / "checkpoint", tmp_path / "o.gguf", vlm=case / "vlm", settings=settings)


def test_a_policy_without_language_has_no_advantages(golden, tmp_path):
    with pytest.raises(
        ConvertError, match="--set advantage: expected a policy that reads an instruction, got act"
    ):
        convert(golden / "act-2cam" / "checkpoint", tmp_path / "o.gguf", settings={"advantage": "good"})

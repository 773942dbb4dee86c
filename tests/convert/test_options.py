"""What the user gives to a conversion is used, recorded, or refused by name."""

from __future__ import annotations

import shutil

import pytest

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.convert.options import ConvertOptions, Setting, parse_settings
from sinew.core import ConvertError

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
        r"--embodiment: .*smolvla, which takes --base, --vlm, --tokenizer": {"embodiment": "gr1"},
        r"--stats-key": {"stats_key": "libero"},
        r"--base .*: .*checkpoint is no adapter but a whole model": {"base": tmp_path},
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

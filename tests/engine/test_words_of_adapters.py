"""What an adapter says: words and the actions behind them are those of the merged bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sinew.convert import convert
from sinew.policy import load
from tests.adapters import write_folder
from tests.closeness import assert_close, rounding
from tests.stream.test_text import observation

LANGUAGE = r"language_model.*\.(q|v)_proj"


@pytest.mark.parametrize("engine", ["eager", "plan"])
def test_an_adapter_says_what_its_merged_bundle_says(golden: Path, tmp_path: Path, engine: str) -> None:
    """The base beside it says its own words, to the bit."""
    home = golden / "pi05-2cam"
    given = {"settings": {"lm_head": "true"}, "arch": home / "arch.json", "control_hz": 30}
    base = convert(home / "checkpoint", tmp_path / "base.gguf", **given)
    folder = write_folder("pi05-2cam", tmp_path / "adapter", 1, LANGUAGE)
    merged = convert(folder, tmp_path / "merged.gguf", base=home / "checkpoint", **given)
    apart = convert(folder, tmp_path / "apart.gguf", base=home / "checkpoint", merge=False, **given)
    policy = load(base, engine=engine, threads=1, adapters={"kitchen": apart})
    alone, whole = (load(path, engine=engine, threads=1) for path in (base, merged))
    asked = {**observation(alone), "subtask": True, "text_tokens": 6}
    found = {name: policy.infer({**asked, "adapter": name}) for name in ("kitchen", "")}
    wanted = whole.infer(asked)
    assert found["kitchen"].text == wanted.text
    reference = load(merged, engine="eager", threads=1)
    rounded = rounding(lambda: reference.infer(asked).actions).about(wanted.actions)
    assert_close(rounded, found["kitchen"].actions)
    own = alone.infer(asked)
    assert (found[""].text, found[""].adapter) == (own.text, "")
    assert np.array_equal(found[""].actions, own.actions)
    assert rounded.refusal(own.actions)
    assert policy.ask({**asked, "subtask": False, "adapter": "kitchen"}, "what is it?", 4) == whole.ask(
        {**asked, "subtask": False}, "what is it?", 4
    )

"""pi0-FAST checkpoints: the second tokenizer, what files may leave out, and every option that changes a chunk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.core import ConvertError
from tests.golden import Golden

CASE = "pi0fast-2cam"
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
TABLE = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


@pytest.fixture
def home(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden / CASE, tmp_path / CASE, copy_function=shutil.copyfile))


@pytest.fixture
def run(home: Path) -> Callable[..., Bundle]:
    def run_(**options: Any) -> Bundle:
        out = home / "it.gguf"
        out.unlink(missing_ok=True)
        return Bundle(convert(home / "checkpoint", out, arch=home / "arch.json", **options))

    return run_


def change(path: Path, **fields: Any) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (record | fields).items() if v is not None}))


def test_what_a_bundle_holds(run, golden):
    manifest, g = run().manifest, Golden(golden / CASE)
    options = json.loads(g.metadata["options"])
    words = manifest.config
    assert words["max_tokens"] == options["max_decoding_steps"]
    assert words["zero_token"] == 860 - 1 - options["fast_skip_tokens"]
    assert words["begins"] == words["leaves_out"][:2]
    assert len(words["leaves_out"]) == 3
    assert (words["lowest"], words["scale"]) == (-28, 10.0)
    assert json.loads(words["action_tokenizer"])["model"]["type"] == "BPE"
    names = [source.name for source in manifest.provenance.sources]
    assert {"tokenizer/tokenizer.json", "fast_tokenizer/tokenizer.json"} <= set(names)
    assert "fast_tokenizer/processor_config.json" in names
    assert manifest.spec.chunk_size == 8


def test_the_tokenizer_of_actions_lies_elsewhere(run, home, tmp_path):
    (home / "checkpoint" / "fast_tokenizer").rename(tmp_path / "fast")
    with pytest.raises(
        ConvertError, match=r"looked in .*fast_tokenizer\); pass the folder .* --action-tokenizer DIR"
    ):
        run()
    change(home / "checkpoint" / "config.json", action_tokenizer_name="lerobot/fast-action-tokenizer")
    given = run(action_tokenizer=tmp_path / "fast").manifest
    assert given.config["scale"] == 10.0
    (tmp_path / "fast" / "processor_config.json").unlink()
    with pytest.raises(ConvertError, match="processor_config.json is missing. It contains FAST's scale"):
        run(action_tokenizer=tmp_path / "fast")


@pytest.mark.parametrize(
    ("file", "fields", "why"),
    [
        ("config.json", {"temperature": 0.7}, "temperature"),
        ("config.json", {"beams": 4}, "beams"),
        (
            "config.json",
            {"max_decoding_steps": 9000},
            "max_decoding_steps: expected a whole number from 1 to 8192",
        ),
        ("config.json", {"n_action_steps": 9}, "n_action_steps: expected a whole number from 1 to 8, got 9"),
        ("config.json", {"validate_action_token_prefix": "no"}, "expected true or false, got 'no'"),
        ("config.json", {"fast_skip_tokens": 900}, "zero_token: expected 1 to"),
        (
            "fast_tokenizer/processor_config.json",
            {"scale": 0},
            "scale: expected a finite number above 0, got 0",
        ),
        (
            "fast_tokenizer/processor_config.json",
            {"min_token": 1.5},
            "number scale and a whole number min_token, got 10 and 1.5",
        ),
        (
            "fast_tokenizer/tokenizer_config.json",
            {"clean_up_tokenization_spaces": True},
            "expected false, got true, which changes the decoded text of tokens",
        ),
    ],
)
def test_what_would_give_other_chunks_is_refused(run, home, file, fields, why):
    change(home / "checkpoint" / file, **fields)
    with pytest.raises(ConvertError, match=why):
        run()


def test_a_pipeline_that_disagrees(run, home):
    path = home / "checkpoint" / "policy_preprocessor.json"
    record = json.loads(path.read_text())
    (step,) = [s for s in record["steps"] if s["registry_name"] == "action_tokenizer_processor"]
    step["config"]["fast_skip_tokens"] = 64
    path.write_text(json.dumps(record))
    with pytest.raises(
        ConvertError, match="fast_skip_tokens: expected 128, the value in config.json, got 64"
    ):
        run()


def test_a_head_or_a_table_that_is_missing(run, home):
    """LeRobot makes the table of the head; a head it draws at random, with a warning."""
    path = home / "checkpoint" / "model.safetensors"
    found = load_file(path)
    save_file({name: tensor for name, tensor in found.items() if name != TABLE}, path)
    one = run()
    assert one.tensor("language.embed_tokens.weight").equal(one.tensor("lm_head.weight"))
    save_file({name: tensor for name, tensor in found.items() if name != HEAD}, path)
    with pytest.raises(ConvertError, match="lm_head.weight is missing. LeRobot .* random values"):
        run()


def test_a_prefix_that_nobody_checks(run, home):
    change(home / "checkpoint" / "config.json", validate_action_token_prefix=False)
    words = run().manifest.config
    assert words["begins"] == []
    assert len(words["leaves_out"]) == 3


def test_lerobot_0_4_padded_the_state_before_its_words(run):
    old, new = (run(compat=version).manifest.processing.prompt for version in ("lerobot-0.4", "lerobot-0.6"))
    assert "32" in str(old.steps)
    assert "32" not in str(new.steps)


def test_inspect_shows_the_size_of_a_tokenizer(run, home, capsys):
    run()
    assert main(["inspect", str(home / "it.gguf")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = (home / "checkpoint" / "fast_tokenizer" / "tokenizer.json").read_text()
    assert f"action_tokenizer a text of {len(text)} characters" in said

"""What lies in folders of one's own training: files of optimisers and shards, wrappers, adapters, other statistics."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from tests.adapters import ATTENTION, write_folder
from tests.cases import cases

CASE = "smolvla-2cam"
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint, with what its training left beside it."""
    made = tmp_path / "run of mine"
    shutil.copytree(golden / CASE / "checkpoint", made)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "training_args.bin", "latest"):
        (made / name).write_bytes(b"state")
    (made / "global_step10").mkdir()
    (made / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"state")
    return made


def converted(folder: Path, golden: Path, **options: object) -> Path:
    given = cases()[CASE].options(golden / CASE) | options
    return convert(folder, folder.with_name("out.gguf"), **given)


def refused(folder: Path, golden: Path, **options: object) -> str:
    with pytest.raises(ConvertError) as caught:
        converted(folder, golden, **options)
    assert not folder.with_name("out.gguf").exists()
    return str(caught.value)


def test_the_state_of_its_training_changes_nothing(folder: Path, golden: Path) -> None:
    plain = convert(
        golden / CASE / "checkpoint", folder.with_name("plain.gguf"), **cases()[CASE].options(golden / CASE)
    )
    assert Bundle(converted(folder, golden)).hashes == Bundle(plain).hashes


INSTEAD = {
    "model-00001-of-00002.safetensors": (
        "model.safetensors.index.json lists the tensors of each file; copy it into the same folder"
    ),
    "pytorch_model_fsdp_0": 'to make it, run `accelerate merge-weights "{folder}/pytorch_model_fsdp_0" "{folder}"`',
    "zero_to_fp32.py": 'to make it, run `python "{folder}/zero_to_fp32.py" "{folder}" "{folder}" --safe_serialization`',
    "pytorch_model.bin": "to make it, save `torch.load('{folder}/pytorch_model.bin', weights_only=True)`"
    " with `safetensors.torch.save_file`",
    "ema.safetensors": "rename this file if it contains the weights",
}


@pytest.mark.parametrize("other", INSTEAD)
def test_weights_in_another_form_say_how_they_become_one_file(folder: Path, golden: Path, other: str) -> None:
    (folder / MODEL).rename(folder / other)
    told = INSTEAD[other].replace("{folder}", str(folder))
    assert refused(folder, golden) == f"{folder}: {MODEL} is missing, but {other} exists: {told}"


def test_no_weights_at_all_name_nothing_that_is_not_theirs(folder: Path, golden: Path) -> None:
    (folder / MODEL).unlink()
    assert refused(folder, golden) == f"{folder}: {MODEL} is missing; pass the folder that contains this file"


def wrapped(name: str) -> Callable[[str], str]:
    return {
        "DistributedDataParallel": lambda each: f"module.{each}",
        "torch.compile": lambda each: each.replace(".", "._orig_mod.", 1),
        "PEFT": lambda each: each.replace("q_proj.weight", "q_proj.base_layer.weight"),
    }[name]


@pytest.mark.parametrize("around", ["DistributedDataParallel", "torch.compile", "PEFT"])
@pytest.mark.parametrize("case", [CASE, "diffusion-ddim", "xvla-auto"])
def test_names_of_what_was_around_the_policy(golden: Path, tmp_path: Path, case: str, around: str) -> None:
    made = tmp_path / case
    shutil.copytree(golden / case / "checkpoint", made)
    weights = load_file(made / MODEL)
    changed = {wrapped(around)(name): each for name, each in weights.items()}
    if around == "PEFT" and changed.keys() == weights.keys():  # nothing of it is called q_proj
        name = next(name for name in weights if name.endswith(".weight"))
        changed[name.replace(".weight", ".lora_A.default.weight")] = np.zeros(4, np.float32)
    save_file(changed, made / MODEL)
    with pytest.raises(ConvertError, match="expected weights of the policy alone, got '") as caught:
        convert(made, tmp_path / "out.gguf", **cases()[case].options(golden / case))
    assert ("merge_and_unload" if around == "PEFT" else around) in str(caught.value)


def test_an_adapter_beside_a_model_is_not_left_out_silently(golden: Path, tmp_path: Path) -> None:
    made = write_folder(CASE, tmp_path / "both", 1, ATTENTION)
    shutil.copy(golden / CASE / "checkpoint" / MODEL, made / MODEL)
    both = f"{made}: expected a model or an adapter, got {MODEL} and {ADAPTER}. If the adapter is merged"
    for options in ({}, {"base": golden / CASE / "checkpoint"}):
        assert refused(made, golden, **options).startswith(both)
    (made / ADAPTER).unlink()  # what a merged one may keep is no weight
    converted(made, golden)


def test_the_base_is_a_folder_and_an_adapter_is_safetensors(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made, home = write_folder(CASE, tmp_path / "adapter", 1, ATTENTION), golden / CASE / "checkpoint"
    for base, told in (
        (
            Path("lerobot/smolvla_base"),
            "no such folder on this machine, and 'lerobot/smolvla_base' could not",
        ),
        (home / MODEL, "expected a folder, got a file"),
    ):
        assert refused(made, golden, base=base).startswith(f"--base {base}: {told}")
    (made / ADAPTER).rename(made / "adapter_model.bin")
    assert refused(made, golden, base=home).startswith(
        f"{made}: {ADAPTER} is missing, but adapter_model.bin exists: "
    )


@pytest.mark.parametrize("part", ["action", "observation.state"])
def test_statistics_of_another_robot(folder: Path, golden: Path, part: str) -> None:
    for file in folder.glob("*processor*.safetensors"):
        found = load_file(file)
        save_file({k: v[:5].copy() if k.startswith(part) else v for k, v in found.items()}, file)
    expected = (
        f"statistics of {part.rpartition('.')[2]}: expected 6 numbers, got 5 of mean, 5 of std; use the statistics of"
        " the policy's training data"
    )
    assert refused(folder, golden) == expected

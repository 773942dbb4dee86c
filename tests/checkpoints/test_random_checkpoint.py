"""Random checkpoints have the layout of the real ones: names, shapes, types, sizes, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

import sinew
from benchmarks.checkpoints.noise import write_tensors
from benchmarks.checkpoints.plan import TensorPlan
from benchmarks.checkpoints.smolvla import tensors, write_checkpoint
from benchmarks.checkpoints.smolvla_layout import TINY, Widths
from benchmarks.checkpoints.tokenizer import tokenizer_json
from sinew.convert import convert


def header(path: Path) -> dict[str, dict]:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def layout(path: Path) -> dict[str, dict]:
    """Return a file's metadata, and dtype and shape of each tensor, wherever in the file it lies."""
    found = header(path)
    return {
        name: {key: entry[key] for key in entry if key != "data_offsets"} for name, entry in found.items()
    }


# Sizes of what LeRobot itself writes for the full-size model; the files of its versions before 0.6, which
# have no metadata, are of exactly these lengths.
@pytest.mark.parametrize(
    ("recipe", "float32_tensors", "file_bytes"),
    [("float32", 500, 1_800_257_992), ("native", 225, 1_197_789_224), ("bf16-vlm", 26, None)],
)
def test_full_size_layout(recipe, float32_tensors: int, file_bytes: int | None) -> None:
    plans = tensors(Widths(), recipe)
    assert len(plans) == 500
    assert sum(plan.elements for plan in plans) == 450_046_176
    assert sum(plan.storage == "F32" for plan in plans) == float32_tensors
    if file_bytes:
        entries, offset = {}, 0
        for plan in plans:
            span = [offset, offset := offset + plan.nbytes]
            entries[plan.name] = {"dtype": plan.storage, "shape": list(plan.shape), "data_offsets": span}
        text = len(json.dumps(entries, separators=(",", ":")))
        assert 8 + text + -text % 8 + offset == file_bytes


@pytest.mark.parametrize(("case", "recipe"), [("smolvla-2cam", "float32"), ("smolvla-bf16-vlm", "bf16-vlm")])
def test_tiny_layout_is_that_of_the_reference(golden: Path, tmp_path: Path, case: str, recipe) -> None:
    made = write_checkpoint(tmp_path, widths=TINY, dtype=recipe)
    reference = golden / case / "checkpoint"
    assert layout(made.policy / "model.safetensors") == layout(reference / "model.safetensors")
    assert made.nbytes == (made.policy / "model.safetensors").stat().st_size
    files = {str(path.relative_to(reference)) for path in reference.rglob("*") if path.is_file()}
    assert {str(path.relative_to(made.policy)) for path in made.policy.rglob("*") if path.is_file()} == files
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        assert json.loads((made.policy / name).read_text()) == json.loads((reference / name).read_text())
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (made.policy, reference))
    assert ours.keys() <= theirs.keys()
    training_and_hub = (
        "optimizer_",
        "scheduler_",
        "push_to",
        "repo_id",
        "private",
        "tags",
        "license",
        "pretrained_",
    )
    assert all(key.startswith(training_and_hub) for key in theirs.keys() - ours.keys())
    stats = [path for path in files if path.endswith("processor.safetensors")]
    assert len(stats) == 2
    for name in stats:
        assert header(made.policy / name) == header(reference / name)


def test_values_are_scaled_noise_and_reproducible(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", widths=TINY)
    second = write_checkpoint(tmp_path / "b", widths=TINY)
    path = first.policy / "model.safetensors"
    assert path.read_bytes() == (second.policy / "model.safetensors").read_bytes()
    with safe_open(path, framework="np") as file:
        matrix = file.get_tensor("model.vlm_with_expert.vlm.lm_head.weight")  # [512, 96]
        norm = file.get_tensor("model.vlm_with_expert.vlm.model.text_model.norm.weight")
    assert matrix.std() == pytest.approx(96**-0.5, rel=0.05)
    assert norm.mean() == pytest.approx(1, abs=0.05)
    assert len(np.unique(matrix[:, 0])) > 500  # rows differ


def test_tensors_longer_than_the_noise_block(tmp_path: Path) -> None:
    plan = TensorPlan("long", (4100, 2048), "matrix", "BF16")  # 8.4 M elements of 4.2 M noise values
    nbytes = write_tensors(tmp_path / "x.safetensors", [plan], {})
    assert nbytes == (tmp_path / "x.safetensors").stat().st_size
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        values = file.get_tensor("long").float()
    assert values.isfinite().all()
    assert values.std().item() == pytest.approx(2048**-0.5, rel=0.01)


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    from benchmarks.checkpoints.noise import _to_bfloat16

    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    values[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]  # ties, both ways
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(_to_bfloat16(values), expected)


def test_tokenizer_has_the_real_special_tokens() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(49280))
    assert tokenizer.get_vocab_size() == 49280
    expected = {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
        "<global-img>": 49152,
        "<fake_token_around_image>": 49189,
        "<image>": 49190,
    }
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected
    text = "Pick up the red cube — 积木!\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": "native"},
        {"cameras": 3, "state_dim": 14, "action_dim": 14},
        {"widths": replace(TINY, num_expert_layers=2, self_attn_every_n_layers=0)},
        {"widths": replace(TINY, self_attn_every_n_layers=3, text_kv_heads=3, expert_width_multiplier=0.5)},
    ],
    ids=["default", "native", "three cameras", "half the expert, cross only", "other widths"],
)
def test_converted_checkpoint_runs(tmp_path: Path, arguments: dict) -> None:
    made = write_checkpoint(tmp_path, **{"widths": TINY, **arguments})
    policy = sinew.load(convert(made.policy, tmp_path / "policy.gguf", vlm=made.vlm))
    chunk = policy.warm_up()
    assert chunk.actions.shape == (50, arguments.get("action_dim", 6))
    assert np.isfinite(chunk.actions).all()
    assert 0.1 < np.abs(chunk.actions).mean() < 1e3

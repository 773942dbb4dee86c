"""LoRA adapters with `--base`: merged as PEFT merges them, and refused by name where they are something else."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.convert.adapter import read_config
from sinew.core import ConvertError
from sinew.policy import load
from tests.cases import cases

CASE, RANK, ALPHA = "smolvla-2cam", 4, 6
PREFIX = "base_model.model."
# Of LeRobot's default targets for SmolVLA one of each kind, and what `modules_to_save` and `bias` bring.
QUERY = "model.vlm_with_expert.lm_expert.layers.0.self_attn.q_proj"
STATE = "model.state_proj"
SAVED = "model.action_out_proj"

Adapter = tuple[Path, dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]


@pytest.fixture
def adapter(golden: Path, tmp_path: Path) -> Adapter:
    """A folder as LeRobot writes it, the options that convert it, its weights and those of its base."""
    case = cases()[CASE]
    home = golden / case.home
    base = home / case.checkpoint
    folder = tmp_path / "adapter"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("model*.safetensors"))
    whole: dict[str, np.ndarray] = {}
    for file in base.glob("model*.safetensors"):
        whole |= load_file(file)
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    for module in (QUERY, STATE):
        outputs, inputs = whole[f"{module}.weight"].shape
        weights[f"{PREFIX}{module}.lora_A.weight"] = rng.normal(0, 0.1, (RANK, inputs)).astype(np.float32)
        weights[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(0, 0.1, (outputs, RANK)).astype(np.float32)
    for part in ("weight", "bias"):
        shape = whole[f"{SAVED}.{part}"].shape
        weights[f"{PREFIX}{SAVED}.{part}"] = rng.normal(0, 0.1, shape).astype(np.float32)
    shape = whole[f"{STATE}.bias"].shape  # as PEFT writes a bias of what it wraps
    weights[f"{PREFIX}{STATE}.base_layer.bias"] = rng.normal(0, 0.1, shape).astype(np.float32)
    write(folder, weights)
    return folder, {**case.options(home), "base": base}, weights, whole


def write(folder: Path, weights: dict[str, np.ndarray], **changes: Any) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_rslora": False}
    config |= {
        "target_modules": "(q_proj|state_proj)",
        "modules_to_save": ["action_out_proj"],
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(weights, folder / "adapter_model.safetensors")


def wanted(whole: np.ndarray, weights: dict[str, np.ndarray], module: str, scale: float) -> np.ndarray:
    """The formula in float64."""
    down, up = (weights[f"{PREFIX}{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
    return np.asarray(whole, np.float64) + scale * up @ down


@pytest.mark.parametrize(
    ("changes", "query", "state"),
    [
        ({}, ALPHA / RANK, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / math.sqrt(RANK), ALPHA / math.sqrt(RANK)),
        ({"alpha_pattern": {"state_proj": 1}}, ALPHA / RANK, 1 / RANK),
        ({"alpha_pattern": {"^state_proj": 1, "^" + QUERY: 2}}, 2 / RANK, ALPHA / RANK),
        ({"r": 9, "rank_pattern": {"q_proj": RANK, "state_proj": RANK}}, ALPHA / RANK, ALPHA / RANK),
    ],
)
def test_an_adapter_is_merged(
    adapter: Adapter, tmp_path: Path, changes: dict, query: float, state: float
) -> None:
    folder, options, weights, whole = adapter
    write(folder, weights, **changes)
    merged = convert(folder, tmp_path / "merged.gguf", **options)
    plain = convert(
        options["base"], tmp_path / "plain.gguf", **{k: v for k, v in options.items() if k != "base"}
    )
    found, before = (Bundle(each) for each in (merged, plain))
    changed = [name for name in before.infos if not np.array_equal(values(found, name), values(before, name))]
    assert len(changed) == 5, changed
    for name in changed:
        if "q_proj" in name:
            expected = wanted(whole[f"{QUERY}.weight"], weights, QUERY, query)
        elif name.endswith("state_proj.bias"):
            expected = weights[f"{PREFIX}{STATE}.base_layer.bias"]
        elif "state_proj" in name:
            expected = wanted(whole[f"{STATE}.weight"], weights, STATE, state)
        else:
            expected = weights[f"{PREFIX}{SAVED}.{name.rpartition('.')[2]}"]
        # A sum of RANK products and one more, and the rounding to float32.
        np.testing.assert_allclose(
            values(found, name), expected, rtol=0, atol=8 * 2.0**-24 * np.abs(expected).max()
        )
    sources = [each.name for each in found.manifest.provenance.sources]
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= set(sources)
    if not changes:
        first, second = (load(each, "cpu", engine="eager") for each in (merged, plain))
        seen = first.dummy_observation()
        assert np.abs(first.infer(seen).actions - second.infer(seen).actions).max() > 1e-3


def values(bundle: Bundle, name: str) -> np.ndarray:
    return bundle.tensor(name).float().numpy()


def without(weights: dict[str, np.ndarray], end: str) -> dict[str, np.ndarray]:
    return {name: each for name, each in weights.items() if not name.endswith(end)}


A, B = (f"{PREFIX}{QUERY}.lora_{half}.weight" for half in "AB")
REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict], dict], str]] = {
    "another kind": ({"peft_type": "IA3"}, dict, "peft_type: expected LORA, got"),
    "DoRA": ({"use_dora": True}, dict, "use_dora=true is not supported"),
    "a field of tomorrow": ({"use_tomorrow": 3}, dict, "use_tomorrow=3 is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa"}, dict, "changes the weights of the base"),
    "a rank that is not the weights'": ({"r": 5}, dict, "expected rank 5, got 4"),
    "an alpha that is none": ({"lora_alpha": "x"}, dict, "lora_alpha: expected a number"),
    "a pattern that may take for ever": ({"rank_pattern": {"(a+)+$": 4}}, dict, "expected names of modules"),
    "half of it": ({}, lambda found: without(found, "q_proj.lora_B.weight"), "lora_B.weight is missing"),
    "none of it": ({}, lambda found: {}, "expected the weights of an adapter, got an empty file"),
    "another base": (
        {},
        lambda found: {**found, f"{PREFIX}x.bias": np.zeros(3, np.float32)},
        "x.bias is no weight",
    ),
    "another width": ({}, lambda found: {**found, A: found[A][:, 1:]}, "expected lora_A [r, inputs]"),
    "no numbers": ({}, lambda found: {**found, B: np.full_like(found[B], np.nan)}, "expected finite numbers"),
    "an embedding": (
        {},
        lambda found: {**found, f"{PREFIX}e.lora_embedding_A": found[A]},
        "of a linear layer",
    ),
    "a whole of another form": (
        {},
        lambda found: {**found, f"{PREFIX}{SAVED}.bias": np.zeros(3, np.float32)},
        "action_out_proj.bias: expected [",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_adapter_of_its_base(adapter: Adapter, tmp_path: Path, what: str) -> None:
    folder, options, weights, _ = adapter
    changes, change, message = REFUSED[what]
    write(folder, change(weights), **changes)
    with pytest.raises(ConvertError) as caught:
        convert(folder, tmp_path / "out.gguf", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


# What PEFT 0.21 writes beside the fields of 0.18 where nothing is enabled -> a value with which another is computed.
NEWER: dict[str, tuple[Any, Any]] = {
    "arrow_config": (None, {"top_k": 3}),
    "kasa_config": (None, {"beta": 1e-4}),
    "layer_replication": (None, [[0, 4], [2, 5]]),
    "lora_ga_config": (None, {"direction": "ArB2r"}),
    "monteclora_config": (None, {"num_samples": 8}),
    "target_parameters": (None, ["feed_forward.experts.gate_up_proj"]),
    "trainable_token_indices": (None, [3]),
    "use_bdlora": (None, {"nblocks": 2}),
    "use_qalora": (False, True),
    "velora_config": (None, {"rank": 1}),
    "alora_invocation_tokens": (None, [7]),
    "lora_bias": (False, True),
}


@pytest.mark.parametrize("name", NEWER)
def test_the_fields_of_newer_peft_are_empty_or_rejected_by_name(tmp_path: Path, name: str) -> None:
    """LeRobot 0.7 writes them when a policy is trained with --policy.use_peft=true alone."""
    file = tmp_path / "adapter_config.json"
    usual = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 16, "lora_alpha": 8}
    usual |= {key: empty for key, (empty, _other) in NEWER.items()}
    file.write_text(json.dumps(usual))
    assert read_config(file)["r"] == 16
    file.write_text(json.dumps(usual | {name: NEWER[name][1]}))
    with pytest.raises(ConvertError, match=f"{name}=.* is not supported; merge the adapter with PEFT"):
        read_config(file)


def test_the_base_of_another_type(adapter: Adapter, tmp_path: Path, golden: Path) -> None:
    folder, options, *_ = adapter
    other = golden / "pi0-2cam" / cases()["pi0-2cam"].checkpoint
    with pytest.raises(ConvertError, match="expected a policy of the adapter's type smolvla, got pi0"):
        convert(folder, tmp_path / "out.gguf", **{**options, "base": other})

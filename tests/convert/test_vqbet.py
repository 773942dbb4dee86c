"""VQ-BeT's checkpoints: what is read of them and what is rejected; the draws of its codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError, ObservationError
from sinew.policy import load
from tests.golden import Golden, assert_parity
from tests.models.stages import code_noise, moments_observation

CASES = ("vqbet-parallel", "vqbet-sequential")
CAMERA = {"type": "VISUAL", "shape": [3, 97, 99]}


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    source = golden / "vqbet-parallel" / "checkpoint"
    shutil.copytree(source, tmp_path / "vqbet", copy_function=shutil.copyfile)
    return tmp_path / "vqbet"


def run(checkpoint: Path, without: tuple[str, ...] = (), inputs: object = None, **changes: object) -> Bundle:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    config["input_features"] |= inputs or {}
    for key in without:
        del config[key]
    (checkpoint / "config.json").write_text(json.dumps(config))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"inputs": {"observation.environment_state": {"type": "ENV", "shape": [3]}}},
            "expected one camera and observation.state, got .*observation.environment_state",
        ),
        (
            {"inputs": {"observation.images.wrist": CAMERA}},
            "expected one camera and observation.state, got .*observation.images.wrist",
        ),
        (
            {"vision_backbone": "resnet50"},
            "vision_backbone: expected one of resnet18, resnet34, got 'resnet50'",
        ),
        ({"crop_shape": [98, 84]}, "crop_shape: expected at most 97 x 99, got 98 x 84"),
        (
            {"gpt_block_size": 16},
            "gpt_block_size: expected at least 17, the number of tokens of 5 observation steps, got 16",
        ),
        ({"bet_softmax_temperature": 0}, "bet_softmax_temperature: expected a number above 0, got 0"),
        ({"n_obs_steps": 17}, "n_obs_steps: expected a whole number from 1 to 16, got 17"),
        ({"gpt_n_head": 5}, "hidden_size: expected a multiple of num_heads 5, got 48"),
        ({"gpt_n_layer": 2}, r"vqbet.policy.transformer.h.2.\S+ is not a part of the model"),
        ({"action_chunk_size": 6}, r"decoder.4.weight has shape \[30, 36\], expected \[36, 36\]"),
        ({"sequentially_select": True}, "map_to_cbet_preds_primary_bin.0.weight is missing"),
        ({"use_group_norm": True}, r"norm|bias"),
        ({"codebooks": 3}, "codebooks=3 is not understood"),
    ],
)
def test_what_is_not_computed_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


@pytest.mark.parametrize("key", ["n_obs_steps", "action_chunk_size", "crop_shape", "use_group_norm"])
def test_defaults_that_may_differ_between_versions_are_not_taken(checkpoint: Path, key: str) -> None:
    with pytest.raises(ConvertError, match=f"'{key}' is missing"):
        run(checkpoint, without=(key,))


def test_what_a_bundle_says(checkpoint: Path) -> None:
    manifest = run(checkpoint).manifest
    spec = manifest.spec
    assert (spec.history, spec.chunk_size, spec.n_action_steps, spec.views) == (5, 5, 5, 5)
    assert (spec.noise_shape, spec.solver.noise, spec.solver_steps) == ((5, 16), "exponential", 1)
    dropped = " ".join(manifest.provenance.dropped)
    for name in (
        "vqvae_model.encoder.0.weight",
        "cluster_size",
        "embed_avg",
        "select_target_actions_indices",
    ):
        assert name in dropped


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draws", range(4))
def test_every_set_of_draws_gives_the_references_actions(
    case: str, draws: int, golden: Path, case_bundle: Any
) -> None:
    g = Golden(golden / case)
    policy = load(case_bundle(case), engine="eager", dtype="float32")
    chunk = policy.infer(moments_observation(g, code_noise(g, draws)))
    assert_parity(chunk.actions, g["chunks_actions"][draws])


def test_noise_of_ones_gives_the_most_likely_codes(golden: Path, case_bundle: Any) -> None:
    g = Golden(golden / "vqbet-parallel")
    policy = load(case_bundle("vqbet-parallel"), engine="eager", dtype="float32")
    chunk = policy.infer(moments_observation(g, code_noise(g, None)))
    assert_parity(chunk.actions, g["greedy_actions"][0])


def test_a_seed_draws_exponential_noise(golden: Path, case_bundle: Any) -> None:
    """Draws of many seeds have the frequencies of the distribution of codes."""
    g = Golden(golden / "vqbet-sequential")
    policy = load(case_bundle("vqbet-sequential"), engine="eager", dtype="float32")
    given = replace(moments_observation(g, code_noise(g)), noise=None)
    drawn = np.concatenate(
        [policy.processor.noise(replace(given, seed=seed))[0].ravel() for seed in range(400)]
    )
    assert drawn.min() > 0
    assert (
        abs(drawn.mean() - 1) < 0.05
    )  # 5600 numbers: their mean is within 0.013 of 1, one standard deviation
    assert abs((drawn > 1).mean() - np.exp(-1)) < 0.05
    again = [policy.infer(replace(given, seed=3)).actions for _ in range(2)]
    assert np.array_equal(*again)


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_noise_by_which_nothing_divides_is_rejected(least: float, golden: Path, case_bundle: Any) -> None:
    g = Golden(golden / "vqbet-parallel")
    policy = load(case_bundle("vqbet-parallel"), engine="eager", dtype="float32")
    noise = code_noise(g)
    noise[1, 3] = least
    with pytest.raises(ObservationError, match=f"noise: expected numbers above 0, .*got {least:g}"):
        policy.infer(moments_observation(g, noise))

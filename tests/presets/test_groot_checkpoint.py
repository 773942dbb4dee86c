"""A random N1.7 checkpoint in miniature converts and runs, so the full-size one has every tensor at its shape."""

from __future__ import annotations

import numpy as np

from sinew.convert import convert
from sinew.families.gr00t.checkpoint import TAG, GrootWidths, write_groot_checkpoint
from sinew.policy import load

TINY = GrootWidths(
    text={
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 600,
    },
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "depth": 3,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
    sections=(4, 2, 2),
    layers=2,
    blocks=4,
    heads=2,
    head_dim=12,
    hidden=20,
    refine_layers=1,
    refine_heads=4,
    embodiments=5,
    action_dim=9,
    horizon=6,
    positions=8,
    edge=64,
)


def test_a_tiny_one_converts_and_runs(tmp_path):
    source = write_groot_checkpoint(tmp_path / "checkpoint", TINY)
    out = tmp_path / "policy.gguf"
    convert(source, out, vlm=source / "vlm", settings={"frames": "64x96"})
    policy = load(out, engine="eager")
    assert policy.spec.embodiment == TAG
    assert policy.manifest.precision["head"] == "BF16"
    chunk = policy.infer(policy.dummy_observation()).actions
    assert chunk.shape == (6, 7)
    assert np.isfinite(chunk).all()
    again = write_groot_checkpoint(tmp_path / "again", TINY)
    for file in sorted(source.glob("*.safetensors")):
        assert file.read_bytes() == (again / file.name).read_bytes()

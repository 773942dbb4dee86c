"""A random OpenVLA-OFT in miniature converts and runs, so the full-size one has every tensor at its shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sinew.convert import convert
from sinew.families.openvla.checkpoint import oft_config, tensors, write_openvla_checkpoint
from sinew.layers.decoder import DecoderConfig
from sinew.models import build_on_meta
from sinew.policy import load


def test_a_tiny_one_converts_and_runs(golden: Path, tmp_path: Path) -> None:
    published = oft_config()
    dino, siglip = published.vision
    tiny = replace(
        published,
        vision=(
            replace(dino, hidden_size=32, intermediate_size=48, num_layers=2),
            replace(siglip, hidden_size=48, intermediate_size=40, num_layers=1),
        ),
        projector=(4 * 80, 64),
        language=DecoderConfig(64, 96, 2, 4, 4, 16, 1e-6, 1e4),
    )
    source = write_openvla_checkpoint(tmp_path / "checkpoint", golden / "openvla-oft" / "checkpoint", tiny)
    convert(source, tmp_path / "policy.gguf")
    policy = load(tmp_path / "policy.gguf", "cpu", engine="eager")
    assert policy.engine.model.config == tiny
    chunk = policy.infer(policy.dummy_observation()).actions
    assert chunk.shape == (8, 7)
    assert np.isfinite(chunk).all()


def test_the_published_one_has_seven_and_a_half_billion_numbers() -> None:
    """7.54 in the published file, which has SigLIP's pooling head too; nothing reads that."""
    config = oft_config()
    assert sum(plan.elements for plan in tensors(config)) == 7_525_994_480
    model = build_on_meta("openvla_oft", config)
    assert 7.3e9 < sum(parameter.numel() for parameter in model.parameters()) < 7.6e9

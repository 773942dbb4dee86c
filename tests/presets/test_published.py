"""Published sizes: of every family, and the same as those of its random checkpoint of full size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sinew.convert.read.record import JsonRecord
from sinew.families.gr00t import checkpoint as gr00t
from sinew.families.gr00t import qwen
from sinew.families.pi import checkpoint as pi
from sinew.families.pi.convert import model_config as pi_config
from sinew.families.smolvla import checkpoint as smolvla
from sinew.families.smolvla.convert import model_config as smolvla_config
from sinew.families.smolvla.convert import open_checkpoint
from sinew.families.smolvla.layout import Widths
from sinew.models.published import published
from sinew.perf.program import PublishedProgram, preset
from sinew.perf.request import TracedRequest
from sinew.registry import presets

# Numbers that a bundle holds, by hand: towers, language model, table of tokens and head. A part that is missing or has
# another width changes them by more than a hundredth.
BILLIONS = {
    "gr00t-n1.5": 2.09,
    "gr00t-n1.6": 2.65,
    "openvla": 7.50,
    "pi0-fast": 3.45,
    "vla-adapter": 1.39,
    "vla-jepa": 2.28,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes(name):
    model = preset(name).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_products_of_ternary_weights_count():
    """Two FLOPs for each weight and row, whatever its bits: the language model's, for one view and twenty tokens."""
    assert "bitvla" in presets()
    trace = PublishedProgram.load("bitvla", TracedRequest(1, 20)).trace
    d, f, keys, layers = 2560, 6912, 640, 30
    rows = 256 + 1 + 20 + 56 + 1  # patches, state, prompt, slots of the chunk, stop
    weights = layers * (2 * d * d + 2 * d * keys + 3 * d * f)
    attention = layers * 4 * rows * rows * d
    projector = 2 * (8 * d + d * d)
    assert trace.flops("prefix") == pytest.approx(2 * rows * weights + attention + projector, rel=0.01)
    assert trace.flops("vision") > 2 * 256 * 26 * (4 * 1152**2 + 2 * 1152 * 4304)


def test_a_preset_is_the_random_checkpoint_of_smolvla(tmp_path: Path):
    record = smolvla.policy_config(Widths(), "bf16-vlm", {"action": {}})
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = smolvla_config(open_checkpoint(tmp_path), smolvla.vlm_config(Widths()), {})
    found = published("smolvla")
    assert found.config == config
    assert (found.side, found.tokens) == (config.vision.image_size, record["tokenizer_max_length"])
    assert found.steps == record["num_steps"]


@pytest.mark.parametrize(("preset_name", "architecture"), [("pi0", "pi0"), ("pi0.5", "pi05")])
def test_a_preset_is_the_random_checkpoint_of_pi(preset_name, architecture):
    found = published(preset_name)
    record = pi.policy_config(architecture, cameras=found.views, dim=7)
    assert found.config == pi_config(record["type"], record, {}, preset_name)
    assert (found.tokens, found.steps) == (record["tokenizer_max_length"], record["num_inference_steps"])


def test_a_preset_is_the_random_checkpoint_of_gr00t_n17():
    widths, here = gr00t.GrootWidths(), Path("config.json")
    checkpoint = JsonRecord(here, gr00t.nvidia_files(widths)["config.json"])
    vlm = JsonRecord(here, gr00t.vlm_files(widths)["vlm/config.json"])
    found = published("gr00t-n1.7")
    assert found.config == qwen.model_config(checkpoint, vlm, 8, 8)
    assert (found.side, found.steps) == (widths.edge, checkpoint["num_inference_timesteps"])

"""Published sizes: of every family, and the same as those of its random checkpoint of full size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sinew_perf.program import PublishedProgram, preset
from sinew_perf.request import TracedRequest

from benchmarks.checkpoints import smolvla
from benchmarks.checkpoints.smolvla_layout import Widths
from benchmarks.families import FAMILIES
from benchmarks.inflate import inflate
from sinew.convert import read
from sinew.convert.options import ConvertOptions
from sinew.core.registry import presets
from sinew.families.published import published
from sinew.families.smolvla.convert import model_config as smolvla_config
from sinew.families.smolvla.convert import open_checkpoint
from sinew.models import build_on_meta, mismatch
from tests.covering import some

INFLATED = {  # benchmarks/families.py -> preset; without those that keep weights in files of torch's
    "pi0": "pi0",
    "pi05": "pi0.5",
    "groot-n15": "gr00t-n1.5",
    "groot-n16": "gr00t-n1.6",
    "groot-n17": "gr00t-n1.7",
    "evo1": "evo1",
    "vla-jepa": "vla-jepa",
    "xvla": "xvla",
    "openvla": "openvla",
}
# Numbers that a bundle holds, by hand: towers, language model, table of tokens and head. A part that is missing or has
# another width changes them by more than a hundredth.
BILLIONS = {
    "cogact": 7.46,
    "gr00t-n1.5": 2.09,
    "gr00t-n1.6": 2.65,
    "openvla": 7.50,
    "omnivla": 7.49,
    "omnivla-edge": 0.1536,  # 90.2 of upstream's 108.3 million, which are read, and CLIP's 63.4
    "pi0-fast": 3.45,
    "vla-adapter": 1.39,
    "vla-jepa": 2.28,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes(name):
    model = preset(name).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.slow
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


def header_alone(path: Path, plans, fixed, metadata) -> None:
    """Write a file of tensors that takes no room: its header, and a hole in the place of the numbers."""
    header, end = {}, 0
    for plan in plans:
        span = [end, end := end + plan.nbytes]
        header[plan.name] = {"dtype": plan.storage, "shape": list(plan.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


@pytest.mark.parametrize("name", some(INFLATED, "pi05", "groot-n17", "evo1"))
def test_a_preset_is_what_converts_from_files_of_full_size(name, tmp_path: Path):
    """Every tensor that benchmarks/full_size.py writes has its shape, and the sizes that its files say are those that
    were published; ids of tokens are those of the fixture's tokenizer."""
    family, home = FAMILIES[name], tmp_path / name
    inflate(family, home, header_alone)
    found = read(home / family.folder, ConvertOptions(**family.options(home)))
    expected = published(INFLATED[name])
    ids = {key: getattr(found.config, key) for key in ("image_token", "marker") if hasattr(found.config, key)}
    assert found.spec.architecture == expected.architecture
    assert found.config == replace(expected.config, **ids)
    assert found.spec.solver_steps == expected.steps
    assert found.processing.image.height == expected.side
    dropped = set(found.dropped)
    shapes = {found.rename(key): part.shape for key, part in found.tensors.items() if key not in dropped}
    assert mismatch(build_on_meta(found.spec.architecture, found.config), shapes) is None

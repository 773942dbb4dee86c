"""vla.cpp's files of GR00T N1.5 and N1.6, Evo-1 and BitVLA make the bundles that their checkpoints make."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sinew.bundle import Bundle
from sinew.bundle.gguf_file import GGUFFile
from sinew.convert import convert
from sinew.core import ConvertError
from sinew.vlacpp.write import export_vlacpp
from tests.cases import cases
from tests.convert.vlacpp_rest import _weights, write_bitvla, write_eagle, write_evo1

ARM = cases()["evo1-mint"].given["stats_key"]


def assert_same(theirs: Bundle, ours: Bundle) -> None:
    """Every weight, the architecture and the processing, bit for bit."""
    assert theirs.manifest.provenance.format == "vla.cpp-gguf"
    assert theirs.manifest.config == ours.manifest.config
    assert theirs.manifest.processing == ours.manifest.processing
    assert theirs.manifest.tokenizer == ours.manifest.tokenizer
    assert theirs.infos.keys() == ours.infos.keys()
    for name in ours.infos:
        assert torch.equal(theirs.tensor(name), ours.tensor(name)), name


def test_n16(golden, groot_bundle, tmp_path):
    home = golden / "groot-n16"
    file = write_eagle(home, tmp_path / "theirs.gguf")
    given = {"vlm": home / "eagle", "settings": {"letterbox": "true"}}
    theirs, ours = Bundle(convert(file, tmp_path / "a.gguf", **given)), Bundle(groot_bundle("groot-n16"))
    assert_same(theirs, ours)
    assert replace(theirs.manifest.spec, name="") == replace(ours.manifest.spec, name="")


def test_n15_in_nvidias_layout(golden, groot_bundle, tmp_path):
    home = golden / "groot-n15"
    file = write_eagle(home, tmp_path / "theirs.gguf", "base")
    given = {"vlm": home / "eagle", "settings": {"embodiment_id": "2"}}
    theirs, ours = (
        Bundle(convert(file, tmp_path / "a.gguf", **given)),
        Bundle(groot_bundle("groot-n15-nvidia")),
    )
    assert_same(theirs, ours)
    assert replace(theirs.manifest.spec, name="") == replace(ours.manifest.spec, name="")


def test_n15_of_a_fine_tune(golden, groot_bundle, tmp_path):
    """vla.cpp puts the statistics beside the file."""
    home, ours = golden / "groot-n15", Bundle(groot_bundle("groot-n15"))
    file = write_eagle(home, tmp_path / "theirs.gguf")
    processing, spec = ours.manifest.processing, ours.manifest.spec
    tables = {
        what: {name: list(parts[0].normalization.stats[name]) for name in ("min", "max")}
        for what, parts in (("state", processing.state_parts), ("action", processing.action_parts))
    }
    stats = tmp_path / "dataset_statistics.json"
    stats.write_text(json.dumps({"new_embodiment": tables}))  # whatever the robot is
    steps = json.loads((home / "checkpoint" / "policy_preprocessor.json").read_text())["steps"]
    numbers = next(
        s["config"]["embodiment_mapping"] for s in steps if "embodiment_mapping" in s.get("config", {})
    )
    settings = {"embodiment_id": str(numbers[spec.embodiment])}
    cameras = tuple(camera.name for camera in reversed(spec.cameras))
    given = {"vlm": home / "eagle", "stats": stats, "cameras": cameras, "settings": settings}
    theirs = Bundle(convert(file, tmp_path / "a.gguf", **given))
    assert_same(theirs, ours)
    assert [c.name for c in theirs.manifest.spec.cameras] == [c.name for c in spec.cameras]
    with pytest.raises(
        ConvertError, match=r"made from a LeRobot fine-tune.*--stats dataset_statistics\.json"
    ):
        convert(file, tmp_path / "b.gguf", vlm=home / "eagle")


def test_evo1(golden, evo1_bundle, tmp_path):
    home = golden / "evo1-mint"
    file = write_evo1(home, tmp_path / "theirs.gguf", ARM)
    ours = Bundle(evo1_bundle("evo1-mint"))
    attending = {"settings": {"masked_rows": "attend"}}
    theirs = Bundle(convert(file, tmp_path / "a.gguf", vlm=home / "vlm", **attending))
    assert_same(theirs, ours)
    unasked = Bundle(
        convert(file, tmp_path / "zero.gguf", vlm=home / "vlm")
    )  # what vla.cpp's engine computes
    assert unasked.manifest.config == {**ours.manifest.config, "masked_attend": False}
    assert theirs.manifest.spec.solver_steps == json.loads((home / "checkpoint" / "config.json").read_text())[
        "num_inference_timesteps"
    ]  # fmt: skip
    with pytest.raises(ConvertError, match="stats: .*takes --vlm|--stats"):
        convert(file, tmp_path / "b.gguf", vlm=home / "vlm", stats=home / "checkpoint" / "norm_stats.json")


# ----------------------------------------------------------------------------- BitVLA

SIZES = {48: 64, 108: 144, 80: 128, 152: 256, 16: 32, 560: 896, 144: 192}


@pytest.fixture(scope="module")
def bitvla(golden, tmp_path_factory) -> Path:
    """A checkpoint with the fixture's layout and sizes that divide into tiles, as published ones do."""
    out = tmp_path_factory.mktemp("bitvla") / "checkpoint"
    shutil.copytree(golden / "bitvla" / "checkpoint", out, ignore=shutil.ignore_patterns("model*", "*.pt"))
    generator = torch.Generator().manual_seed(0)

    def larger(name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = 16 if name.endswith("position_embedding.weight") else 0  # patches, no width
        shape = [size if size == kept else SIZES.get(size, size) for size in tensor.shape]
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    source = golden / "bitvla" / "checkpoint"
    save_file({name: larger(name, t) for name, t in _weights(source).items()}, out / "model.safetensors")
    for file in source.glob("*.pt"):
        found = torch.load(file, weights_only=True)
        torch.save({name: larger(name, t) for name, t in found.items()}, out / file.name)
    record = json.loads((out / "config.json").read_text())
    record["text_config"] |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    record["vision_config"] |= {"hidden_size": 64, "intermediate_size": 144}
    (out / "config.json").write_text(json.dumps(record))
    return out


def test_bitvla(bitvla, tmp_path):
    """Code for code and scale for scale, gate and up apart, the tower's second matrix without its padding."""
    ours = Bundle(convert(bitvla, tmp_path / "ours.gguf"))
    theirs = Bundle(convert(write_bitvla(bitvla, tmp_path / "t.gguf"), tmp_path / "a.gguf", tokenizer=bitvla))
    assert theirs.manifest.config == ours.manifest.config
    assert theirs.manifest.processing == ours.manifest.processing
    assert theirs.lowbit == ours.lowbit
    assert theirs.infos.keys() == ours.infos.keys()
    for name in ours.infos:  # the mean of a matrix is summed in another order
        found, wanted = theirs.tensor(name), ours.tensor(name)
        if name.endswith(".scale"):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(found, wanted), name


def test_an_exported_bitvla_comes_back_the_same(bitvla, golden, openvla_bundle, tmp_path):
    """Every byte of every tile is what vla.cpp's converter writes."""
    ours = Bundle(convert(bitvla, tmp_path / "ours.gguf"))
    export_vlacpp(ours, tmp_path / "theirs.gguf")
    exported, wanted = GGUFFile(tmp_path / "theirs.gguf"), GGUFFile(write_bitvla(bitvla, tmp_path / "w.gguf"))
    assert exported.tensors.keys() == wanted.tensors.keys()
    for name, info in wanted.tensors.items():
        found = exported.tensors[name]
        assert (found.shape, found.type) == (info.shape, info.type), name
        if not name.endswith(".scale"):  # a mean that is summed in another order
            both = (f.map[i.offset : i.offset + i.nbytes] for f, i in ((exported, found), (wanted, info)))
            assert bytes(next(both)) == bytes(next(both)), name
    differ = {key for key, value in wanted.metadata.items() if exported.metadata[key] != value}
    assert differ == {"bitvla.statistics_json", "bitvla.preprocessor_config_json"}
    back = Bundle(convert(tmp_path / "theirs.gguf", tmp_path / "back.gguf", tokenizer=bitvla))
    assert (back.manifest.config, back.lowbit) == (ours.manifest.config, ours.lowbit)
    assert back.manifest.processing == ours.manifest.processing
    for name in ours.infos:
        assert torch.equal(back.tensor(name), ours.tensor(name)), name
    with pytest.raises(ConvertError, match="expected a multiple of 16 rows, .*, got 108"):
        export_vlacpp(Bundle(openvla_bundle("bitvla")), tmp_path / "other.gguf")


def test_bitvla_files_that_are_not_understood(bitvla, golden, tmp_path):
    file = write_bitvla(bitvla, tmp_path / "t.gguf")
    with pytest.raises(ConvertError, match="contain no tokenizer.*--tokenizer"):
        convert(file, tmp_path / "a.gguf")
    other = tmp_path / "other"
    shutil.copytree(bitvla, other, ignore=shutil.ignore_patterns("model*", "*.pt"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<proprio_pad>", "<state_pad>"))
    with pytest.raises(ConvertError, match="proprio_pad"):
        convert(file, tmp_path / "a.gguf", tokenizer=other)
    info, damaged = GGUFFile(file).tensors["lm.blk.0.attn_q.weight"], bytearray(file.read_bytes())
    damaged[info.offset + 7] = 0
    (tmp_path / "d.gguf").write_bytes(damaged)
    with pytest.raises(ConvertError, match="code 0") as caught:
        convert(tmp_path / "d.gguf", tmp_path / "a.gguf", tokenizer=bitvla)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.gguf").exists()

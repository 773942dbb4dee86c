"""Checkpoints of the OpenVLA family: what is taken from where, and one line for each wrong one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from sinew.bundle import Bundle
from sinew.cli.bench import make_observation
from sinew.convert import convert
from sinew.core import ConvertError
from sinew.policy import load
from tests.golden import Golden

CASES = ("openvla-oft", "openvla-ar", "vla-adapter")


@pytest.fixture
def checkpoint(golden, tmp_path):
    """A copy to damage: ``checkpoint(case) -> directory``."""

    def copy(case: str = "openvla-oft") -> Path:
        out = tmp_path / case
        shutil.copytree(golden / case / "checkpoint", out)
        return out

    return copy


def edit(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def refused(path: Path, **options) -> str:
    out = path.parent / "out.gguf"
    with pytest.raises(ConvertError) as error:
        convert(path, out, **options)
    assert not out.exists()
    message = str(error.value)
    assert "\n" not in message
    return message


def test_what_a_bundle_says(openvla_bundle):
    oft, plain, adapter = (Bundle(openvla_bundle(case)).manifest for case in CASES)
    assert [m.architecture for m in (oft, plain, adapter)] == ["openvla_oft", "openvla", "vla_adapter"]
    assert [m.spec.chunk_size for m in (oft, plain, adapter)] == [8, 1, 8]
    assert [m.spec.state.dim for m in (oft, plain, adapter)] == [8, 0, 8]
    assert [len(m.spec.cameras) for m in (oft, plain, adapter)] == [2, 1, 2]
    assert oft.processing.image.channels == 6
    assert "libero_spatial_no_noops" in oft.provenance.notes[0]
    assert all(m.spec.solver.kind == "single" and m.spec.noise_dim == 0 for m in (oft, plain, adapter))
    # The gripper is outside the mask.
    assert [part.normalization.mode for part in oft.processing.action_parts] == ["quantiles", "identity"]
    assert [part.normalization.eps for part in plain.processing.action_parts] == [0.0, 1e-8]
    assert {name.split(".")[1] for name in oft.provenance.dropped} == {"featurizer", "fused_featurizer"}
    assert any("lm_head" in name for name in adapter.provenance.dropped) == ("lm_head" in str(adapter))


def test_settings(golden, tmp_path):
    out = tmp_path / "a.gguf"
    settings = {"center_crop": "false", "chunk": 5, "statistics": "bounds"}
    convert(golden / "openvla-oft" / "checkpoint", out, settings=settings, cameras=("top", "hand"))
    manifest = Bundle(out).manifest
    assert [step.kind for step in manifest.processing.image.steps] == ["jpeg", "resize"]
    assert manifest.spec.chunk_size == 5
    assert [camera.name for camera in manifest.spec.cameras] == ["top", "hand"]
    assert manifest.processing.state.mode == "min_max"
    assert manifest.provenance.options["set center_crop"] == "false"


@pytest.mark.parametrize("case", ["bitvla", "openvla-oft"])
def test_views_that_no_file_counts(golden, tmp_path, case):
    """A robot of LIBERO's sizes may have three cameras: what was assumed is said with the option that overrules it."""
    found = {}
    for name, cameras in (("assumed", ()), ("given", ("front", "left", "right"))):
        out = tmp_path / f"{name}.gguf"
        convert(golden / case / "checkpoint", out, cameras=cameras)
        found[name] = Bundle(out).manifest
    assert [camera.name for camera in found["assumed"].spec.cameras] == ["full_image", "wrist_image"]
    assert "pass yours in their order with --cameras" in found["assumed"].provenance.notes[1]
    assert found["given"].provenance.notes[1].endswith("cameras front, left, right, as set by --cameras")
    policy = load(tmp_path / "given.gguf", engine="eager")
    seen = make_observation(policy.spec, None, "pick it up", None) | {"seed": 0}
    actions = policy.infer(seen).actions
    turned = dict(zip(seen["images"], reversed(seen["images"].values()), strict=True))
    assert actions.shape == (8, 7)
    assert (
        policy.infer({**seen, "images": turned}).actions != actions
    ).any()  # each view is read in its place


def test_the_newest_head_is_taken(checkpoint):
    path = checkpoint()
    head = path / "action_head--150000_checkpoint.pt"
    other = torch.load(head, weights_only=True)
    torch.save(
        {key: torch.zeros_like(value) for key, value in other.items()}, path / "action_head--9_checkpoint.pt"
    )
    out = path.parent / "a.gguf"
    convert(path, out)
    assert Bundle(out).tensor("head.proj_out.weight").abs().sum() > 0


# ----------------------------------------------------------------------------- wrong checkpoints


def test_no_statistics(checkpoint):
    path = checkpoint()
    (path / "dataset_statistics.json").unlink()
    edit(path / "config.json", lambda record: record.pop("norm_stats"))
    assert "--stats FILE" in refused(path)


def test_several_statistics(checkpoint):
    path = checkpoint()
    edit(
        path / "dataset_statistics.json",
        lambda record: record.update(other=record["libero_spatial_no_noops"]),
    )
    message = refused(path)
    assert "--stats-key with one of: libero_spatial_no_noops, other" in message
    assert "no statistics 'third'" in refused(path, stats_key="third")
    convert(path, path.parent / "a.gguf", stats_key="other")
    assert "'other'" in Bundle(path.parent / "a.gguf").manifest.provenance.notes[0]


def test_statistics_of_another_robot(checkpoint):
    path = checkpoint()

    def shorten(record):
        for values in record["libero_spatial_no_noops"]["proprio"].values():
            values.pop()

    edit(path / "dataset_statistics.json", shorten)
    assert "expected 8 values, got q01 7" in refused(path)


def test_statistics_without_the_state(checkpoint):
    path = checkpoint()
    edit(path / "dataset_statistics.json", lambda record: record["libero_spatial_no_noops"].pop("proprio"))
    assert "have no q01 and q99 of 'proprio'" in refused(path)


def test_lora_alone(checkpoint):
    path = checkpoint()
    for file in path.glob("model*"):
        file.unlink()
    (path / "lora_adapter").mkdir()
    (path / "lora_adapter" / "adapter_model.safetensors").write_bytes(b"")
    assert "merge" in refused(path)


def test_truncated_shard(checkpoint):
    path = checkpoint()
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in refused(path)


def test_missing_shard(checkpoint):
    path = checkpoint()
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(path)


def test_the_neighbours_head(checkpoint, golden):
    path = checkpoint()
    (path / "action_head--150000_checkpoint.pt").unlink()
    shutil.copy(golden / "vla-adapter" / "checkpoint" / "action_head--checkpoint.pt", path)
    assert "does not fit its config" in refused(path)


def test_no_head_beside_a_projector(checkpoint):
    path = checkpoint()
    (path / "action_head--150000_checkpoint.pt").unlink()
    assert "no action_head--*_checkpoint.pt" in refused(path)


def test_action_tokens_in_parallel_are_asked_for(checkpoint, golden, openvla_bundle):
    """Their files are those of OpenVLA's tokens; only the wish for a chunk, or a projector, tells them apart."""
    for file in (path := checkpoint()).glob("action_head--*.pt"):
        file.unlink()
    assert (
        "pass --set decoding=parallel if the policy was trained to decode action tokens in parallel"
        in refused(path)
    )
    assert "--set decoding=parallel" in refused(path, settings={"decoding": "in_turn"})
    assert "lm_head" in refused(path, settings={"decoding": "parallel"})  # this fixture's file has none
    plain = checkpoint("openvla-ar")
    assert refused(plain, settings={"chunk": 8}).startswith("--set chunk=8: ")
    assert "no known robot has actions of 7 values and states of 0 values; pass --set chunk=N" in refused(
        plain, settings={"decoding": "parallel"}
    )
    assert "--set decoding: expected one of in_turn, parallel" in refused(
        plain, settings={"decoding": "both"}
    )
    whole = golden / "openvla-oft" / "checkpoint"
    with pytest.raises(ConvertError, match="--set decoding=parallel: .* has an action head"):
        convert(whole, path.parent / "out.gguf", settings={"decoding": "parallel"})
    assert (
        "pass --set decoding=parallel for OFT's"
        in Bundle(openvla_bundle("openvla-ar")).manifest.provenance.notes[-1]
    )


def test_no_projector_for_the_adapter(checkpoint):
    path = checkpoint("vla-adapter")
    (path / "proprio_projector--checkpoint.pt").unlink()
    assert "no known robot has" in refused(path)
    settings = {"chunk": 8, "statistics": "bounds_q99"}
    assert "reads the state" in refused(path, settings=settings, cameras=("a", "b"))


def test_cameras_of_the_adapter(checkpoint):
    assert "2 cameras, got 3" in refused(checkpoint("vla-adapter"), cameras=("a", "b", "c"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["text_config"].update(rope_scaling={"type": "linear"}), "rope_scaling"),
        (lambda c: c["text_config"].update(hidden_act="relu"), "hidden_act: expected 'silu'"),
        (lambda c: c["text_config"].update(num_attention_heads=3), "text_config"),
        (lambda c: c.update(timm_model_ids=["vit_huge", "vit_so400m_patch14_siglip_224"]), "vit_huge"),
        (lambda c: c.pop("timm_model_ids"), "timm_model_ids"),
    ],
)
def test_configs_that_are_not_understood(checkpoint, change, message):
    path = checkpoint()
    edit(path / "config.json", change)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["vision_config"].update(vit_act_bits=4), "vit_weight_bits, vit_act_bits"),
        (lambda c: c.update(vision_feature_select_strategy="default"), "expected 'full', got 'default'"),
        (
            lambda c: c.update(vision_feature_layer=-9),
            "vision_feature_layer: expected a number from -3 to -1",
        ),
        (lambda c: c["text_config"].update(num_hidden_layers=1), "does not fit its config"),
    ],
)
def test_bitvla_configs_that_are_not_understood(checkpoint, change, message):
    path = checkpoint("bitvla")
    edit(path / "config.json", change)
    assert message in refused(path)


def test_bitvla_under_openvlas_name(checkpoint):
    """vla.cpp's converter knows the published files under this model_type."""
    path = checkpoint("bitvla")
    edit(path / "config.json", lambda record: record.update(model_type="openvla"))
    convert(path, path.parent / "a.gguf")
    manifest = Bundle(path.parent / "a.gguf").manifest
    assert (manifest.architecture, manifest.config["views_after"]) == ("bitvla", 65)


def test_bitvla_with_a_plain_tower(checkpoint):
    path = checkpoint("bitvla")
    edit(path / "config.json", lambda record: record["vision_config"].pop("vit_weight_bits"))
    edit(path / "config.json", lambda record: record["vision_config"].pop("vit_act_bits"))
    convert(path, path.parent / "a.gguf")
    bundle = Bundle(path.parent / "a.gguf")
    assert bundle.lowbit
    assert not [name for name in bundle.lowbit if name.startswith("vision.")]


def test_bitvla_without_its_parts(checkpoint):
    path = checkpoint("bitvla")
    next(path.glob("proprio_projector*")).unlink()
    assert "proprio_projector--*_checkpoint.pt" in refused(path)


@pytest.mark.slow
def test_the_first_heads_of_vla_adapter(checkpoint, golden):
    """They share one projection among three sources and turn nothing; every row of a chunk is the same."""
    path = checkpoint("vla-adapter")
    file = path / "action_head--checkpoint.pt"
    head = torch.load(file, weights_only=True)
    old = {}
    for name, tensor in head.items():
        if "_self." in name:
            old[name.replace("_self.", "_proj.")] = tensor
        elif not any(part in name for part in ("_adapter.", "_task.", "film_gen")):
            old[name] = tensor
    torch.save(old, file)
    convert(path, path.parent / "a.gguf")
    g = Golden(golden / "vla-adapter")
    policy = load(path.parent / "a.gguf", engine="eager")
    assert not policy.engine.model.config.rotary
    given = {"images": {c: g.numpy(f"frame.{c}") for c in g.cameras}, "state": g.numpy("state_raw")}
    actions = policy.infer({**given, "prompt": g.metadata["task"]}).actions
    assert abs(actions - actions[0]).max() < 1e-5
    assert abs(actions).max() > 1e-3


def test_diffusion_and_film_are_refused_by_name(checkpoint):
    path = checkpoint()
    (path / "noisy_action_projector--1_checkpoint.pt").write_bytes(b"")
    assert "diffusion" in refused(path)

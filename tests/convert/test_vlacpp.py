"""vla.cpp's files of the families: imported, they act as their checkpoints do; what cannot be read is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from sinew.bundle import Bundle
from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.writer import FileSlice, TensorSource
from sinew.cli import main
from sinew.convert import convert
from sinew.convert.sources import ASSETS
from sinew.convert.tensors import read_array
from sinew.core import ConvertError, Observation
from sinew.policy import load
from sinew.steps.prompt.template import sentence
from sinew.vlacpp.write import TOKENS, export_vlacpp
from tests.cases import cases
from tests.convert.test_groot import TAG
from tests.convert.vlacpp_families import write_prismatic, write_qwen
from tests.convert.vlacpp_file import write_vlacpp, write_vlacpp_pi
from tests.convert.vlacpp_rest import write_evo1
from tests.golden import Golden, assert_parity

MARKER = 454  # of the fixture's tokenizer


def given(golden: Path, case: str, tmp_path: Path) -> dict:
    """What a file does not hold, for one case."""
    if case in ("openvla-oft", "vla-adapter"):
        return {"tokenizer": golden / case / "checkpoint"}
    vlm = {"vlm": golden / case / "vlm"}
    if case == "groot-n17":
        return vlm | {"embodiment": TAG, "settings": {"frames": "240x300"}}
    g, stats = Golden(golden / case), tmp_path / "stats.json"
    table = {
        feature: {name: g[f"stats.{feature}.{name}"].tolist() for name in names}
        for feature, names in (("observation.state", ("mean", "std")), ("action", ("min", "max")))
    }
    stats.write_text(json.dumps(table))
    return vlm | {"stats": stats, "cameras": ("image", "wrist_image")}


def written(golden: Path, case: str, tmp_path: Path) -> Path:
    out = tmp_path / "theirs.gguf"
    if case in ("openvla-oft", "vla-adapter"):
        return write_prismatic(golden / case, out)
    return write_qwen(golden / case, out, MARKER if case == "vla-jepa" else 0)


@pytest.mark.parametrize("case", ["openvla-oft", "vla-adapter", "groot-n17", "vla-jepa"])
def test_imported_files_act_like_their_checkpoints(golden, tmp_path, case):
    file = written(golden, case, tmp_path)
    bundle = convert(file, tmp_path / "ours.gguf", **given(golden, case, tmp_path))
    policy, g = load(bundle, dtype="float32", engine="eager"), Golden(golden / case)
    noise = g.numpy("noise").reshape(policy.spec.noise_shape) if "noise" in g.tensors else None
    observation = Observation(
        images={camera.removeprefix("observation.images."): g.numpy(f"frame.{camera}") for camera in g.cameras},
        state=g.numpy("state_raw"),
        prompt=g.metadata["task"],
        noise=noise,
    )  # fmt: skip
    found = policy.infer(observation).actions
    wanted = g.numpy("actions").reshape(found.shape)
    assert policy.manifest.provenance.format == "vla.cpp-gguf"
    if case == "vla-adapter":  # vla.cpp rounds the float32 head to bfloat16
        assert 0 < np.abs(found - wanted).max() < 2e-3
    else:
        assert_parity(found, wanted)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("openvla-oft", {"tokenizer": None}, "contain no tokenizer.*--tokenizer FILE_OR_DIR"),
        (
            "openvla-oft",
            {"embodiment": "gr1"},
            "--embodiment: .*openvla_oft or vla_adapter, which does not support",
        ),
        ("openvla-oft", {"settings": {"frames": "2x2"}}, "--set frames: expected a setting of .*openvla_oft"),
        ("groot-n17", {"embodiment": ""}, "several robots. Choose one with --embodiment TAG"),
        (
            "groot-n17",
            {"cameras": ("a", "b")},
            "cameras: a vla.cpp file of gr00t_n1_7 does not support this option",
        ),
        (
            "vla-jepa",
            {"cameras": ()},
            "contain no names of cameras; pass the names in the order of the training with --cameras",
        ),
        ("vla-jepa", {"stats": None}, "no statistics .* for 'action'.*--stats FILE"),
        ("vla-jepa", {"settings": {"letterbox": "true"}}, "letterbox: a vla.cpp file of vla_jepa does not"),
    ],
)
def test_what_has_to_be_given(golden, tmp_path, case, change, message):
    file = written(golden, case, tmp_path)
    with pytest.raises(ConvertError, match=message) as caught:
        convert(file, tmp_path / "ours.gguf", **(given(golden, case, tmp_path) | change))
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(golden, tmp_path):
    """Token ids are in the file, so the neighbour's cannot be taken for it."""
    file = write_qwen(golden / "vla-jepa", tmp_path / "theirs.gguf", MARKER + 1)
    with pytest.raises(ConvertError, match=rf"embodied_action_token_id: expected {MARKER + 1}, got {MARKER}"):
        convert(file, tmp_path / "ours.gguf", **given(golden, "vla-jepa", tmp_path))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("evo1", "evo1.image_size is None, expected a size"),
        ("bitvla", "bitvla.lm.hidden is None, expected a size"),
        ("llama", r"'llama' is not supported \(only smolvla, pi0, pi05, openvla_oft"),
        ("openvla_oft", "openvla_oft.vit.image_size is None, expected a size"),
        ("gr00t_n1_7", "gr00t_n1_7.temporal_patch_size is None|expected a size"),
    ],
)
def test_other_files_are_refused_by_name(golden, tmp_path, architecture, message):
    writer = GGUFWriter(tmp_path / "theirs.gguf", architecture)
    writer.add_string(f"{architecture}.architecture", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConvertError, match=message):
        convert(
            tmp_path / "theirs.gguf", tmp_path / "ours.gguf", tokenizer=golden / "openvla-oft" / "checkpoint"
        )


def test_the_bundle_of_an_imported_file_names_what_was_assumed(golden, tmp_path):
    file = written(golden, "openvla-oft", tmp_path)
    bundle = convert(file, tmp_path / "ours.gguf", **given(golden, "openvla-oft", tmp_path))
    manifest = Bundle(bundle).manifest
    assert manifest.provenance.sources[0].name.endswith("theirs.gguf")
    assert any("vla.cpp's" in note for note in manifest.provenance.notes)


# ----------------------------------------------------------------------------- export


@pytest.fixture
def bundle_of(smolvla_bundle, pi_bundle):
    return lambda case: (smolvla_bundle if case.startswith("smolvla") else pi_bundle)(case)


@pytest.mark.parametrize("case", ["smolvla-2cam", "smolvla-bf16-vlm", "pi0-2cam", "pi05-2cam"])
def test_an_exported_bundle_comes_back_the_same(golden, bundle_of, tmp_path, caplog, case):
    ours = Bundle(bundle_of(case))
    export_vlacpp(ours, tmp_path / "theirs.gguf", before_0_4=True)
    write = write_vlacpp if case.startswith("smolvla") else write_vlacpp_pi
    reference = GGUFFile(write(golden / case, tmp_path / "reference.gguf"))
    exported = GGUFFile(tmp_path / "theirs.gguf")
    wanted = {
        name: (info.shape, info.type, content(reference, name)) for name, info in reference.tensors.items()
    }
    if case == "pi05-2cam":  # quantiles; a bundle has no means, and vla.cpp reads none then
        wanted = {k: v for k, v in wanted.items() if not k.endswith(("_mean", "_std"))}
    found = {
        name: (info.shape, info.type, content(exported, name)) for name, info in exported.tensors.items()
    }
    assert found.keys() == wanted.keys()
    if case == "pi0-2cam":  # what their engine divides by
        factor = ours.manifest.config["language"]["hidden_size"] ** 0.5
        assert exported.metadata["pi0.projector_factor"] == factor
        for name in ("mm.proj.weight", "mm.proj.bias"):
            assert found.pop(name)[1] is GGMLQuantizationType.F32
            del wanted[name]
            np.testing.assert_allclose(
                values(exported, name), values(reference, name) * np.float64(factor), rtol=1e-7
            )
    plain = case.startswith("smolvla") and wanted[TOKENS][1] is GGMLQuantizationType.F32
    if plain:  # vla.cpp's converter writes it as it is, and its engine then does not load it
        table = torch.from_numpy(values(reference, TOKENS))
        np.testing.assert_array_equal(values(exported, TOKENS), table.bfloat16().float().numpy())
        assert found.pop(TOKENS)[1] is GGMLQuantizationType.BF16
        del wanted[TOKENS]
    why = "because vla.cpp reads this tensor of SmolVLA as bfloat16 only"
    told = [f"{TOKENS} is rounded to bfloat16, {why}"] if plain else []
    assert [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()] == told
    assert [name for name in wanted if found[name] != wanted[name]] == []
    for key, value in reference.metadata.items():
        assert exported.metadata[key] == value, key
    (tmp_path / "tokenizer.json").write_text(ours.manifest.tokenizer)
    cameras = tuple(camera.name for camera in ours.manifest.spec.cameras)
    back = convert(tmp_path / "theirs.gguf", tmp_path / "back.gguf", tokenizer=tmp_path, cameras=cameras)
    observation = Golden(golden / case).observation()
    first, second = (
        load(path, engine="eager", allow_missing_cameras=True).infer(observation).actions
        for path in (ours.path, back)
    )
    if plain:
        np.testing.assert_allclose(first, second, atol=2e-2 * np.abs(first).max())
    elif case == "pi0-2cam":  # a projector that was multiplied and divided
        np.testing.assert_allclose(first, second, atol=1e-5 * np.abs(first).max())
    else:
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("case", ["openvla-oft", "vla-adapter", "evo1-mint"])
def test_exported_families_come_back_the_same(golden, openvla_bundle, evo1_bundle, tmp_path, case):
    """And they hold what vla.cpp's own converters write of the checkpoints, under the same names."""
    evo1, home = case == "evo1-mint", golden / case
    ours = Bundle((evo1_bundle if evo1 else openvla_bundle)(case))
    if evo1:
        with pytest.raises(
            ConvertError, match="config.masked_attend: expected False, got True: vla.cpp's engine"
        ):
            export_vlacpp(ours, tmp_path / "refused.gguf")
        ours.manifest = replace(ours.manifest, config={**ours.manifest.config, "masked_attend": False})
    export_vlacpp(ours, tmp_path / "theirs.gguf")
    reference = tmp_path / "reference.gguf"
    if evo1:
        write_evo1(home, reference, cases()[case].given["stats_key"])
    else:
        write_prismatic(home, reference)
    exported, wanted = GGUFFile(tmp_path / "theirs.gguf"), GGUFFile(reference)
    assert exported.tensors.keys() == wanted.tensors.keys()
    found, theirs = ({name: values(file, name) for name in file.tensors} for file in (exported, wanted))
    if evo1:  # the class token and its position, of which a bundle holds the sum
        for tensors in (found, theirs):
            tensors["vit.pos_embd"][0, 0] += tensors.pop("vit.class_embd")[0, 0]
    for name in theirs:
        assert found[name].shape == theirs[name].shape, name
        if exported.tensors[name].type is not wanted.tensors[name].type and not evo1:
            found[name] = (
                torch.from_numpy(found[name]).bfloat16().float().numpy()
            )  # as vla.cpp's converter rounds
        np.testing.assert_array_equal(found[name], theirs[name], err_msg=name)
    differ = {key for key, value in wanted.metadata.items() if exported.metadata[key] != value}
    assert differ == (
        {"evo1.num_inference_timesteps"} if evo1 else {f"{ours.manifest.architecture}.statistics_json"}
    )
    (tmp_path / "tokenizer.json").write_text(ours.manifest.tokenizer)
    cameras = tuple(camera.name for camera in ours.manifest.spec.cameras)
    given = {"vlm": home / "vlm"} if evo1 else {"tokenizer": tmp_path}
    back = Bundle(convert(tmp_path / "theirs.gguf", tmp_path / "back.gguf", cameras=cameras, **given))
    assert back.manifest.config == ours.manifest.config
    assert back.manifest.processing.action == ours.manifest.processing.action
    assert back.manifest.processing.action_parts == ours.manifest.processing.action_parts
    assert back.manifest.processing.state == ours.manifest.processing.state
    assert back.infos.keys() == ours.infos.keys()
    for name in ours.infos:
        assert torch.equal(back.tensor(name).float(), ours.tensor(name).float()), name


@torch.inference_mode()
def test_vlacpps_engine_gives_the_features_of_an_exported_pi0(pi_bundle, golden, tmp_path):
    """Its formula written out (src/models/pi0.cpp, line 498): (W f + b) / sqrt(hidden) of the tower's features f."""
    ours = pi_bundle("pi0-2cam")
    export_vlacpp(Bundle(ours), tmp_path / "theirs.gguf", before_0_4=True)
    reference = write_vlacpp_pi(golden / "pi0-2cam", tmp_path / "reference.gguf")
    model = load(ours, engine="eager").engine.model
    hidden, width = model.config.language.hidden_size, model.config.vision.hidden_size
    features = torch.randn(1, 9, width, generator=torch.Generator().manual_seed(0))
    wanted = model.connect(features, 3, 3).double().numpy()
    made = {}
    for name, path in (("ours", tmp_path / "theirs.gguf"), ("theirs", reference)):
        weight, bias = (
            values(GGUFFile(path), f"mm.proj.{part}").astype(np.float64) for part in ("weight", "bias")
        )
        made[name] = (features.double().numpy() @ weight.T + bias) / hidden**0.5
    largest = np.abs(wanted).max()
    assert np.abs(made["ours"] - wanted).max() <= 1e-5 * largest
    assert np.abs(made["theirs"] - wanted).max() >= 0.5 * largest  # as their converter writes it


def test_a_pi0_is_refused_for_vlacpp_0_4(pi_bundle, tmp_path):
    """Its engine reads the image tokens unscaled, and does not know the key of the factor."""
    out = tmp_path / "theirs.gguf"
    with pytest.raises(ConvertError, match=r"expected a policy other than pi0, got one: vla.cpp 0.4.0 reads"):
        export_vlacpp(Bundle(pi_bundle("pi0-2cam")), out)
    assert not out.exists()
    export_vlacpp(Bundle(pi_bundle("pi05-2cam")), out)


def test_a_file_of_another_factor_is_refused_and_one_without_says_so(pi_bundle, golden, tmp_path):
    reference = write_vlacpp_pi(golden / "pi0-2cam", tmp_path / "reference.gguf")
    (tmp_path / "tokenizer.json").write_text(Bundle(pi_bundle("pi0-2cam")).manifest.tokenizer)
    back = Bundle(convert(reference, tmp_path / "back.gguf", tokenizer=tmp_path))
    assert any(
        "vla.cpp's engine divides the image features by the root" in note
        for note in back.manifest.provenance.notes
    )
    export_vlacpp(Bundle(pi_bundle("pi0-2cam")), tmp_path / "theirs.gguf", before_0_4=True)
    content, factor = (
        (tmp_path / "theirs.gguf").read_bytes(),
        struct.pack("<d", GGUFFile(tmp_path / "theirs.gguf").metadata["pi0.projector_factor"]),
    )
    assert content.count(factor) == 1
    (tmp_path / "wrong.gguf").write_bytes(content.replace(factor, struct.pack("<d", 3.0)))
    with pytest.raises(ConvertError, match=r"pi0.projector_factor: expected \d+\.?\d*, got 3.0"):
        convert(tmp_path / "wrong.gguf", tmp_path / "refused.gguf", tokenizer=tmp_path)


def values(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    data = FileSlice(file.path, info.offset, info.nbytes)
    return read_array(TensorSource(name, info.shape, info.type, info.nbytes, data)).copy()


def content(file: GGUFFile, name: str) -> bytes:
    info = file.tensors[name]
    return bytes(file.map[info.offset : info.offset + info.nbytes])


def test_what_vlacpp_has_no_place_for_is_refused(groot_bundle, smolvla_bundle, tmp_path):
    with pytest.raises(
        ConvertError,
        match="'gr00t_n1_5': expected one of smolvla, .*, which vla.cpp's files support; .* all embodiments",
    ):
        export_vlacpp(Bundle(groot_bundle("groot-n15")), tmp_path / "theirs.gguf")
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    prompt = replace(bundle.manifest.processing.prompt, steps=sentence("Do: {prompt}"))
    bundle.manifest = replace(bundle.manifest, processing=replace(bundle.manifest.processing, prompt=prompt))
    with pytest.raises(
        ConvertError, match="processing.prompt.steps is .*'text': 'Do: '.*, which vla.cpp's file does not"
    ):
        export_vlacpp(bundle, tmp_path / "theirs.gguf")
    assert list(tmp_path.iterdir()) == []


def test_the_verb(smolvla_bundle, tmp_path, capsys):
    bundle = str(smolvla_bundle("smolvla-2cam"))
    assert main(["export", bundle, "--vlacpp", str(tmp_path / "theirs.gguf")]) == 0
    assert "for vla.cpp" in capsys.readouterr().out
    assert main(["export", bundle, "--vlacpp", str(tmp_path / "theirs.gguf")]) == 1
    assert "the file already exists" in capsys.readouterr().err
    assert main(["export", bundle]) == 1
    assert "either --onnx FOLDER or --vlacpp FILE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["blocks", "pen"])
def test_a_packaged_policy_is_exported(tmp_path, name):
    """Their records are of a day when models had fewer fields, which now have defaults."""
    ours = Bundle(ASSETS / f"{name}.gguf")
    export_vlacpp(ours, tmp_path / "theirs.gguf")
    (tmp_path / "tokenizer.json").write_text(ours.manifest.tokenizer)
    spec = ours.manifest.spec
    cameras = tuple(camera.name for camera in spec.cameras)
    back = convert(tmp_path / "theirs.gguf", tmp_path / "back.gguf", tokenizer=tmp_path, cameras=cameras)
    rng = np.random.default_rng(0)
    observation = {
        "images": {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in spec.cameras},
        "state": np.zeros(spec.state.dim, np.float32),
        "prompt": "pick up the red block and put it in the left bin",
        "seed": 1,
    }
    first, second = (load(path, engine="eager").infer(observation).actions for path in (ours.path, back))
    np.testing.assert_allclose(first, second, atol=2e-2 * np.abs(first).max())
    assert np.abs(first).max() > 1e-2

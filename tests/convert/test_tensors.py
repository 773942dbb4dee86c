"""Sources with transforms: values, laziness, and what does not fit; weights in shards and in .pt files."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sinew.bundle.writer import FileSlice, TensorSource
from sinew.convert.read.safetensors import read_safetensors, read_weights
from sinew.convert.read.torch_zip import read_torch
from sinew.convert.tensors import (
    Rule,
    apply,
    computed,
    constant,
    join,
    moved,
    pick,
    read_array,
    reshape,
    rounded,
    rows,
    split,
    split_qkv,
    transpose,
)
from sinew.core import ConvertError


@pytest.fixture
def stack(tmp_path) -> tuple[dict[str, TensorSource], dict[str, torch.Tensor]]:
    tensors = {
        "a": torch.randn(6, 4, 5),
        "b": torch.randn(3, 4, 5),
        "half": torch.randn(6, 4).bfloat16(),
        "id": torch.arange(3),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    return read_safetensors(tmp_path / "w.safetensors"), tensors


def equal(source: TensorSource, tensor: torch.Tensor) -> bool:
    values = read_array(source)
    assert source.shape == values.shape
    assert source.nbytes == sum(len(block) for block in source.data.blocks())
    return np.array_equal(values, tensor.float().numpy())


def test_transforms_give_what_torch_gives(stack):
    found, t = stack
    assert equal(pick(found["a"], 2), t["a"][2])
    assert equal(pick(found["a"], 2, 3), t["a"][2, 3])
    assert equal(transpose(found["a"]), t["a"].permute(2, 1, 0))
    assert equal(transpose(found["half"]), t["half"].T)
    assert equal(transpose(pick(found["a"], 5)), t["a"][5].T)
    assert equal(reshape(found["a"], 24, -1), t["a"].reshape(24, 5))
    assert equal(join(found["a"], found["b"]), torch.cat([t["a"], t["b"]]))
    assert equal(join(pick(found["a"], 1), pick(found["b"], 1), axis=1), torch.cat([t["a"][1], t["b"][1]], 1))
    for axis, sizes in ((0, (1, 2, 3)), (1, (3, 1)), (2, (5,))):
        parts = zip(split(found["a"], sizes, axis), t["a"].split(sizes, axis), strict=True)
        assert all(equal(*part) for part in parts)
    assert all(equal(*pair) for pair in zip(split_qkv(found["half"]), t["half"].split(2), strict=True))
    assert equal(computed(lambda x, y: x[:3] + y, found["a"], found["b"]), t["a"][:3] + t["b"])
    doubled = computed(lambda x: 2 * x, found["half"])
    assert doubled.type is GGMLQuantizationType.F32
    assert equal(doubled, 2 * t["half"].float())
    assert equal(constant("zeros", np.zeros((2, 3))), torch.zeros(2, 3))


def test_rounding_is_torchs(stack):
    found, t = stack
    assert rounded(found["half"]) is found["half"]
    assert equal(rounded(found["a"]), t["a"].bfloat16())
    edges = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x80000001, 0], np.uint32)
    source = rounded(constant("edges", edges.view(np.float32)))
    assert source.type is GGMLQuantizationType.BF16
    assert equal(source, torch.from_numpy(edges.view(np.float32)).bfloat16())
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(read_array(rounded(constant("nan", nans)))).all()


def test_parts_of_a_file_stay_parts_of_it(stack):
    """A stack of embodiments or a fused projection is copied, never loaded."""
    found, _ = stack
    for source in (pick(found["a"], 2, 3), *split(found["a"], (1, 5)), reshape(rows(found["b"], 1, 3), -1)):
        assert isinstance(source.data, FileSlice)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 16),
    steps=st.lists(st.sampled_from(["transpose", "pick", "halves", "flat"]), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_chains_of_transforms(shape, seed, steps):
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    source = constant("x", array)
    for step in steps:
        if step == "transpose":
            source, array = transpose(source), array.T
        elif step == "pick" and array.ndim > 1:
            source, array = pick(source, array.shape[0] - 1), array[-1]
        elif step == "halves":
            half = array.shape[-1] // 2
            source = split(source, (half, array.shape[-1] - half), array.ndim - 1)[1]
            array = array[..., half:]
        elif step == "flat":
            source, array = reshape(source, -1), array.reshape(-1)
    assert source.shape == array.shape
    assert np.array_equal(read_array(source), array)


def test_what_does_not_fit_names_the_tensor(stack):
    found, _ = stack
    for message, make in {
        r"a: shape \[6, 4, 5\] has no index \[6\]": lambda: pick(found["a"], 6),
        r"a: shape \[6, 4, 5\] does not split into \[2, 2\]": lambda: split(found["a"], (2, 2)),
        r"half: shape \[6, 4\] does not split into": lambda: split(found["half"], (2, 1), 2),
        r"half: expected type F32 like a, got BF16": lambda: join(
            rows(found["a"], 0, 1), reshape(found["half"], 1, 4, 6), axis=2
        ),
        r"a \[6, 4, 5\], b \[3, 4, 5\]: these tensors cannot be joined along axis 1": lambda: join(
            found["a"], found["b"], axis=1
        ),
        r"a \[6, 4, 5\]: .*reshape": lambda: reshape(found["a"], 7, -1),
        r"b \[3, 4, 5\]: .*axes": lambda: moved(lambda x: x.transpose(0, 1), found["b"]),
    }.items():
        with pytest.raises(ConvertError, match=message):
            make()


def test_rules_rename_split_and_drop(stack):
    found, t = stack
    rules = (
        Rule(r"id"),
        Rule(r"(h)alf", (r"\1.q", r"\1.k", r"\1.v"), split_qkv),
        Rule(r"(\w)", (r"layer.\1",)),
    )
    out = apply(found, rules)
    assert sorted(out) == ["h.k", "h.q", "h.v", "layer.a", "layer.b"]
    assert equal(out["h.k"], t["half"][2:4])
    assert out["h.k"].name == "half"  # messages use the name that the user knows
    assert apply(found, ()) == found
    with pytest.raises(ConvertError, match="would both become one"):
        apply(found, (Rule("[ab]", ("one",)),))


# ----------------------------------------------------------------------------- shards


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    table = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return tmp_path


def test_every_shard_is_checked_against_the_index(sharded):
    tensors, files = read_weights(sharded)
    assert list(tensors) == ["a", "b", "c"]
    assert [file.name[:11] for file in files] == ["model-00001", "model-00002"]
    index = sharded / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    for message, change in {
        "lists 'd' in this file, which does not contain it": {"d": "model-00002-of-00002.safetensors"},
        "contains 'a', which .* lists in model-00002": {"a": "model-00002-of-00002.safetensors"},
        "contains 'b', which .* lists nowhere": {"b": None},
        "names model-00003-of-00003.safetensors, which the folder does not contain": {
            "d": "model-00003-of-00003.safetensors"
        },
        "weight_map: expected a table": {"d": "../w.safetensors"},
    }.items():
        record = {name: file for name, file in (table | change).items() if file}
        index.write_text(json.dumps({"weight_map": record}))
        with pytest.raises(ConvertError, match=message):
            read_weights(sharded)
    for text in ("[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}', "{"):
        index.write_text(text)
        with pytest.raises(ConvertError, match=r"model\.safetensors\.index\.json"):
            read_weights(sharded)


# ----------------------------------------------------------------------------- .pt files


def test_torch_files_without_running_them(tmp_path):
    path = tmp_path / "head.pt"
    weights = {"module.fc.weight": torch.randn(4, 3).bfloat16(), "bias": torch.randn(8)[::2]}
    torch.save({"module": weights, "step": 3, "view": torch.randn(3, 4).T}, path)
    found = read_torch(path)
    assert sorted(found) == ["module.bias", "module.module.fc.weight", "view"]
    for name, tensor in weights.items():
        assert equal(found[f"module.{name}"], tensor)
    assert equal(transpose(found["module.module.fc.weight"]), weights["module.fc.weight"].T)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_hostile_torch_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "head.pt"
    torch.save({"a": Evil()}, path)
    with pytest.raises(ConvertError, match="not a file of tensors alone"):
        read_torch(path)
    assert not Path("ran").exists()
    path.write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(ConvertError, match="not a zip archive"):
        read_torch(path)
    torch.save([torch.zeros(2)], path)
    with pytest.raises(ConvertError, match="expected a dictionary"):
        read_torch(path)
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(ConvertError, match="'a' needs 4398046511104 bytes"):
        read_torch(path)
    torch.save({"a": torch.zeros(2, dtype=torch.complex64)}, path)
    with pytest.raises(ConvertError, match="expected plain numbers"):
        read_torch(path)
    torch.save({"a": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    with pytest.raises(ConvertError, match="expected an entry that is stored, got method 8"):
        read_torch(Path("packed.pt"))
    with pytest.raises(ConvertError, match="got a directory"):
        read_torch(tmp_path)

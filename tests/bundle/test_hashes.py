"""Hashes of the header and of each tensor: no flipped bit passes, and older bundles say that they carry none."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinew.bundle import Bundle, GGUFFile, TensorSource, write_bundle
from sinew.bundle.schema import KEY_HEADER, KEY_TENSORS
from sinew.bundle.writer import FileSlice
from sinew.cli import main
from sinew.core import BundleError
from sinew.policy import load


@pytest.fixture(scope="module")
def original(smolvla_bundle) -> Path:
    return smolvla_bundle("smolvla-2cam")


@pytest.fixture
def path(original, tmp_path) -> Path:
    return Path(shutil.copyfile(original, tmp_path / "policy.gguf"))


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def without_hashes(path: Path, out: Path, **extra: str) -> Path:
    """The bundle as an earlier version wrote it."""
    file = GGUFFile(path)
    writer = GGUFWriter(out, file.metadata["general.architecture"])
    writer.add_custom_alignment(file.metadata["general.alignment"])
    for key, value in (file.metadata | extra).items():
        if key in (KEY_HEADER, KEY_TENSORS, "general.architecture", "general.alignment"):
            continue
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for info in file.tensors.values():
        raw = np.frombuffer(file.map, np.uint8, info.nbytes, info.offset)
        writer.add_tensor(info.name, raw.view(np.float32).reshape(info.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_every_bundle_carries_hashes_of_itself(path):
    bundle = Bundle(path)
    assert bundle.hashes is not None
    raw = path.read_bytes()
    for name, info in bundle.infos.items():
        assert bundle.hashes[name] == hashlib.sha256(raw[info.offset : info.offset + info.nbytes]).hexdigest()
    assert bundle.verify() == []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_flipped_bit_of_the_header_is_an_error(original, path, data):
    """5 of 30 headers with 1 % of flipped bits that still loaded went unnoticed before."""
    file = GGUFFile(original)
    places = file.places
    near = st.sampled_from(sorted(places)).flatmap(
        lambda key: st.integers(places[key] - 40, places[key] + 80)
    )
    position = data.draw(st.one_of(st.integers(0, file.header_bytes - 1), near))
    position = min(max(position, 0), file.header_bytes - 1)
    bit = data.draw(st.integers(0, 7))
    flip(path, position, bit)
    try:
        with pytest.raises(BundleError):
            Bundle(path)
    finally:
        flip(path, position, bit)
    Bundle(path)


def test_flipped_bits_of_the_hashes_keys_are_errors(path):
    """A key that is not recognised must not make an older bundle of it, whatever bit it is that flips."""
    raw, text = path.read_bytes(), (KEY_HEADER.encode(), KEY_TENSORS.encode(), b"sinew.provenance")
    for key in text:
        start = raw.index(key)
        for position in range(start, start + len(key)):
            flip(path, position, position % 7)
            with pytest.raises(BundleError):
                Bundle(path)
            flip(path, position, position % 7)


@pytest.mark.parametrize("bit", [0, 6])
def test_a_flipped_weight_is_found_on_demand(path, capsys, bit):
    info = list(Bundle(path).infos.values())[7]
    flip(path, info.offset + info.nbytes // 2, bit)
    assert Bundle(path).verify() == [info.name]  # and opening, which reads no weights, cannot know
    assert main(["doctor", str(path), "--verify", "--engine", "eager"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 123 tensors were changed after they were written" in text
    assert info.name in text.replace(" ", "")


def test_doctor_verifies(path, capsys):
    assert main(["doctor", str(path), "--verify", "--engine", "eager"]) == 0
    assert "123 tensors are unchanged" in " ".join(capsys.readouterr().out.split())


def test_older_bundles_load_and_say_that_they_carry_none(path, tmp_path, capsys):
    old = without_hashes(path, tmp_path / "old.gguf")
    bundle = Bundle(old)
    assert bundle.hashes is None
    observation = load(path, engine="eager").dummy_observation()
    np.testing.assert_array_equal(
        load(old, engine="eager").infer(observation).actions,
        load(path, engine="eager").infer(observation).actions,
    )
    with pytest.raises(BundleError, match="contains no hashes"):
        bundle.verify()
    assert main(["doctor", str(old), "--verify", "--engine", "eager"]) == 0
    assert "contains no hashes" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(old)]) == 0
    assert "none" in capsys.readouterr().out


def test_one_hash_alone_and_unknown_keys_are_errors(path, tmp_path):
    for extra, message in (
        ({"sinew.header_sha25": "x"}, "unknown key 'sinew.header_sha25'"),
        ({"tokenizer.ggml.model": "x"}, "unknown key 'tokenizer.ggml.model'"),
    ):
        with pytest.raises(BundleError, match=message):
            Bundle(without_hashes(path, tmp_path / "odd.gguf", **extra))
    Bundle(without_hashes(path, tmp_path / "noted.gguf", **{"general.author": "somebody"}))


def test_rewritten_bundles_get_hashes_of_their_own(path, tmp_path):
    old = Bundle(without_hashes(path, tmp_path / "old.gguf"))
    copies = [
        TensorSource(t.name, t.shape, t.type, t.nbytes, FileSlice(old.path, t.offset, t.nbytes))
        for t in old.infos.values()
    ]
    write_bundle(tmp_path / "new.gguf", lambda: old.manifest, copies)
    assert Bundle(tmp_path / "new.gguf").verify() == []

"""The bundle: round trip, zero copy, strictness, and hostile files."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinew.bundle import Bundle, GGUFFile, TensorSource, facts, write_bundle
from sinew.bundle.schema import Manifest, Normalization, PolicySpec, Processing
from sinew.bundle.writer import ArraySlice
from sinew.convert.sources import card
from sinew.core import BundleError, MotionSpec, SinewError, VectorSpec
from sinew.core.fields import from_json
from sinew.models.solvers import NoiseLevels, Solver
from sinew.policy import load


@pytest.fixture
def path(smolvla_bundle) -> Path:
    return smolvla_bundle("smolvla-2cam")


def sources(bundle: Bundle) -> list[TensorSource]:
    """A bundle's tensors, ready to be written again."""
    return [
        TensorSource(t.name, t.shape, t.type, t.nbytes, ArraySlice(bundle.tensor(t.name).numpy()))
        for t in bundle.infos.values()
    ]


# ----------------------------------------------------------------------------- reading and writing


def test_the_gguf_package_reads_the_same_file(path):
    ours, theirs = Bundle(path), GGUFReader(path)
    assert [t.name for t in theirs.tensors] == [
        t.name for t in sorted(ours.infos.values(), key=lambda t: t.offset)
    ]
    for tensor in theirs.tensors:
        assert tuple(reversed(tensor.shape.tolist())) == ours.infos[tensor.name].shape
        assert np.array_equal(tensor.data, ours.tensor(tensor.name).numpy())
    for key in theirs.fields:
        if not key.startswith("GGUF."):
            assert theirs.fields[key].contents() == ours.file.metadata[key]


def test_weights_equal_the_checkpoint(path, golden):
    from safetensors.torch import load_file

    from sinew.families.smolvla.convert import UNUSED_TENSORS, bundle_name

    bundle = Bundle(path)
    upstream = load_file(golden / "smolvla-2cam" / "checkpoint" / "model.safetensors")
    kept = {name for name in upstream if not name.startswith(UNUSED_TENSORS)}
    assert {bundle_name(name) for name in kept} == set(bundle.infos)
    for name in kept:
        assert torch.equal(bundle.tensor(bundle_name(name)), upstream[name])


def test_statistics_are_exact_and_kinds_are_kept(path, golden):
    from tests.golden import Golden

    g, processing = Golden(golden / "smolvla-2cam"), Bundle(path).manifest.processing
    for recipe, feature in ((processing.state, "observation.state"), (processing.action, "action")):
        assert recipe.mode == "mean_std"
        for stat in ("mean", "std"):
            assert np.array_equal(np.float32(recipe.stats[stat]), g.numpy(f"stats.{feature}.{stat}"))


def test_provenance_names_the_sources_with_their_hashes(path, golden):
    import hashlib

    for source in Bundle(path).manifest.provenance.sources:
        file = next((golden / "smolvla-2cam").rglob(source.name))  # directory/file
        assert source.bytes == file.stat().st_size
        assert source.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_reading_is_zero_copy_and_private(path):
    bundle = Bundle(path)
    start = np.frombuffer(bundle.file.map, np.uint8).ctypes.data
    for name, info in bundle.infos.items():
        assert bundle.tensor(name).data_ptr() == start + info.offset
        assert info.offset % 64 == 0
    model = load(path, dtype="float32", engine="eager").engine.model
    mapped = np.frombuffer(bundle.file.map, np.uint8)
    before = path.read_bytes()
    bundle.tensor("action_in_proj.bias").fill_(7.0)
    assert path.read_bytes() == before
    assert all(p.device.type == "cpu" for p in model.parameters())
    del mapped


def test_loading_in_the_stored_precision_copies_no_weights(path):
    policy = load(path, dtype="float32", engine="eager")
    region = np.frombuffer(policy.bundle.file.map, np.uint8)
    low, high = region.ctypes.data, region.ctypes.data + region.size
    assert all(low <= p.data_ptr() < high for p in policy.engine.model.parameters())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, torch.float32),
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
    ],
)
def test_storage_types(path, tmp_path, kind, dtype):
    tensor = torch.randn(3, 5).to(dtype)
    raw = tensor.view(torch.uint8).numpy()
    source = TensorSource("w", (3, 5), kind, tensor.numel() * dtype.itemsize, ArraySlice(raw))
    write_bundle(tmp_path / "one.gguf", lambda: Bundle(path).manifest, [source])
    assert torch.equal(Bundle(tmp_path / "one.gguf").tensor("w"), tensor)


def test_quantised_tensors_are_refused_by_name_until_they_are_supported(path, tmp_path):
    source = TensorSource("w", (2, 32), GGMLQuantizationType.Q8_0, 68, ArraySlice(np.zeros(68, np.uint8)))
    write_bundle(tmp_path / "q.gguf", lambda: Bundle(path).manifest, [source])
    bundle = Bundle(tmp_path / "q.gguf")
    assert bundle.infos["w"].nbytes == 68
    with pytest.raises(BundleError, match="'w' is stored as Q8_0"):
        bundle.tensor("w")


def test_a_failed_write_leaves_nothing_behind(path, tmp_path):
    bundle = Bundle(path)
    broken = replace(sources(bundle)[0], name="x" * 64)
    with pytest.raises(BundleError, match="longer than 63 bytes"):
        write_bundle(tmp_path / "out.gguf", lambda: bundle.manifest, [broken])

    class Boom:
        def blocks(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_bundle(
            tmp_path / "out.gguf", lambda: bundle.manifest, [replace(sources(bundle)[0], data=Boom())]
        )
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- strictness


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(path, tmp_path):
    bundle = Bundle(path)
    tensors = {t.name: t for t in sources(bundle)}
    gone = [t for t in tensors.values() if t.name != "state_proj.bias"]
    extra = [*tensors.values(), replace(tensors["state_proj.bias"], name="another.bias")]
    bias = tensors["state_proj.bias"]
    bent = [*gone, replace(bias, shape=(bias.shape[0] // 2, 2))]
    for variant, message in (
        (gone, "state_proj.bias is missing"),
        (extra, "another.bias is not a part of the model"),
        (bent, r"state_proj.bias has shape \[48, 2\], expected \[96\]"),
    ):
        write_bundle(tmp_path / "v.gguf", lambda: bundle.manifest, variant)
        with pytest.raises(BundleError, match=message):
            load(tmp_path / "v.gguf", engine="eager")


def with_manifest(path: Path, out: Path, **changes) -> Path:
    bundle = Bundle(path)
    write_bundle(out, lambda: replace(bundle.manifest, **changes), sources(bundle))
    return out


def test_manifest_errors_name_the_field(path, tmp_path):
    m = Bundle(path).manifest
    out = tmp_path / "m.gguf"
    stats = {"mean": (0.0,) * 5, "std": (1.0,) * 6}
    cases = {
        "unknown field 'hidden'": {"config": {**m.config, "hidden": 3}},
        "num_layers": {"config": {**m.config, "vision": {**m.config["vision"], "num_layers": 10**9}}},
        "architecture 'resnet'": {"architecture": "resnet"},
        "tokenizer cannot be read": {"tokenizer": "{}"},
        "mean has 5 values, expected 6": {
            "processing": replace(m.processing, state=replace(m.processing.state, stats=stats))
        },
        "disagrees with sinew.config": {"spec": replace(m.spec, chunk_size=m.spec.chunk_size + 1)},
        r"processing.image.height: expected 1 to 8192, got 1000000000": {
            "processing": replace(m.processing, image=replace(m.processing.image, height=10**9))
        },
    }
    for message, change in cases.items():
        with pytest.raises(BundleError, match=message):
            load(with_manifest(path, out, **change), engine="eager")


@pytest.mark.parametrize("name", ["groot-n17", "groot-n15"])
def test_a_grid_of_patches_is_that_of_the_frames(groot_bundle, name, tmp_path):
    """A server of such a file began, and no request could be computed."""
    path = groot_bundle(name)
    config = Bundle(path).manifest.config
    for rows in (config["rows"] + 1, 8192):
        wrong = with_manifest(path, tmp_path / "m.gguf", config={**config, "rows": rows})
        with pytest.raises(
            BundleError,
            match=r"sinew.config: expected a grid of \d+x\d+ patches, as camera \S+, whose frames",
        ):
            load(wrong, engine="eager")


def test_other_gguf_files_are_told_apart(tmp_path):
    writer = GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BundleError, match=r"architecture 'llama'.*not a Sinew bundle.*sinew convert"):
        Bundle(tmp_path / "llama.gguf")


# ----------------------------------------------------------------------------- damaged and hostile files


def header_size(path: Path) -> int:
    return min(t.offset for t in Bundle(path).infos.values())


def test_every_truncation_is_an_error(path, tmp_path):
    data, end = path.read_bytes(), header_size(path)
    cut = tmp_path / "cut.gguf"
    for size in [
        0,
        1,
        3,
        4,
        23,
        24,
        25,
        *range(32, end, 997),
        end - 1,
        end,
        end + 1,
        len(data) // 2,
        len(data) - 65,
    ]:
        cut.write_bytes(data[:size])
        with pytest.raises(BundleError):
            Bundle(cut)


@pytest.mark.parametrize(
    "data",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),  # tensors
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),  # pairs
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),  # key length
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIQ", 1, b"k", 8, 2**40),  # string length
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 2**60),  # array of bytes
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**50),  # array of strings
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),  # nested array
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77),  # unknown type
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"w", 2**31),  # dimensions
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 0)
        + struct.pack("<Q1sI2QIQ", 1, b"w", 2, 2**63, 2**63, 0, 0),  # huge
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 4, 0, 2**63),  # offset
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 0)
        + struct.pack("<Q1sIQIQ", 1, b"w", 1, 4, 999, 0),  # tensor type
        b"GGUF" + struct.pack("<I", 2),  # old version
        b"PK\x03\x04" + bytes(100),  # a torch pickle
    ],
    ids=lambda data: data[4:40].hex()[:24],
)
def test_hostile_headers_are_errors_without_allocation(tmp_path, data):
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(BundleError):
            GGUFFile(file)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_overlapping_and_unaligned_tensors_are_refused(path, tmp_path):
    def two(offset: int) -> bytes:
        info = b"".join(
            struct.pack("<Q1sIQIQ", 1, name, 1, 16, 0, at) for name, at in ((b"a", 0), (b"b", offset))
        )
        return b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + info + bytes(512)

    file = tmp_path / "two.gguf"
    for offset, message in ((32, "overlaps"), (72, "not aligned")):
        file.write_bytes(two(offset))
        with pytest.raises(BundleError, match=message):
            GGUFFile(file)
    file.write_bytes(two(64))
    assert set(GGUFFile(file).tensors) == {"a", "b"}


fuzz = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(fuzz, max_examples=6)  # each loads a policy
@given(data=st.data())
def test_a_damaged_header_is_a_bundle_or_an_error(path, tmp_path, data):
    """Flip bytes anywhere before the weights: the file loads, or says why not. Nothing else happens."""
    raw = bytearray(path.read_bytes())
    end = header_size(path)
    # The first kilobytes and the tensor infos hold the structure; the rest is the tokenizer's text.
    where = st.one_of(st.integers(0, 4096), st.integers(end - 12_000, end - 1), st.integers(0, end - 1))
    for position in data.draw(st.lists(where, min_size=1, max_size=8)):
        raw[position] = data.draw(st.integers(0, 255))
    file = tmp_path / "fuzzed.gguf"
    file.write_bytes(raw)
    with contextlib.suppress(SinewError), mock.patch("sinew.bundle.reader.read_hashes", return_value=None):
        load(file, engine="eager")  # past the header's hash, which would end nearly all of them
    gc.collect()


@fuzz
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_an_error(tmp_path, junk):
    file = tmp_path / "junk.gguf"
    for data in (junk, b"GGUF\x03\x00\x00\x00" + junk):
        file.write_bytes(data)
        with pytest.raises(SinewError):
            Bundle(file)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@fuzz
@given(data=st.data())
def test_manifest_parts_take_only_what_they_should(path, data):
    """Replace one value somewhere in a manifest part by arbitrary JSON."""
    metadata = dict(Bundle(path).file.metadata)
    key = data.draw(
        st.sampled_from(["sinew.spec", "sinew.processing", "sinew.provenance", "sinew.precision"])
    )
    record = json.loads(metadata[key])
    node = record
    while isinstance(node, dict) and node:
        name = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[name], dict) or data.draw(st.booleans()):
            node[name] = data.draw(json_values)
            break
        node = node[name]
    metadata[key] = json.dumps(record)
    try:
        Manifest.from_metadata(metadata)
    except BundleError as error:
        assert "sinew." in str(error)  # noqa: PT017 - most draws are errors, some are not


def test_json_that_is_too_deep_is_an_error():
    for kind in (PolicySpec, Processing, dict[str, str]):
        with pytest.raises(BundleError):
            from_json("[" * 100_000, kind, "sinew.spec")


def test_the_file_may_be_replaced_while_it_is_open(path, tmp_path):
    """A new version is renamed over the old one; the running policy keeps its own pages."""
    mine = tmp_path / "live.gguf"
    shutil.copy(path, mine)
    bundle = Bundle(mine)
    expected = bundle.tensor("state_proj.bias").clone()
    other = tmp_path / "new.gguf"
    other.write_bytes(bytes(mine.stat().st_size))
    other.replace(mine)
    assert torch.equal(bundle.tensor("state_proj.bias"), expected)


@pytest.mark.parametrize(
    ("names", "units", "labels"),
    [
        ((), (), ()),
        (("x", "grip"), (), ("x", "grip")),
        (("x", "grip"), ("m", ""), ("x [m]", "grip")),
        ((), ("", "opening"), ("0", "1 [opening]")),  # once ended `sinew serve`, which printed what it serves
    ],
)
def test_a_vector_is_shown_by_names_units_or_both(names, units, labels):
    assert VectorSpec(2, names, units).labels == labels
    shown = f": {', '.join(labels)}" if labels else ""
    spec = VectorSpec(2, names, units)
    assert card._vector(spec).replace("\\", "") == f"2 numbers{shown}"
    assert facts._vector(spec, Normalization("identity"), (), ()) == f"2 values{shown}, identity"


OPENED_BY_THREADS = """
import os, sys, threading
from sinew.bundle import Bundle

sys.setswitchinterval(1e-6)


def opens():
    gate.wait()
    Bundle(sys.argv[1])


for _ in range(8):  # each child meets the classes of a manifest for the first time
    if (child := os.fork()) == 0:
        gate = threading.Barrier(8)
        threads = [threading.Thread(target=opens) for _ in range(8)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"a process whose threads open a bundle together ended with {status}")
"""


def test_threads_may_open_their_first_bundle_together():
    """msgspec 0.22 ends the process where two threads meet a dataclass for the first time."""
    done = subprocess.run(
        [sys.executable, "-c", OPENED_BY_THREADS, "sinew/assets/pen.gguf"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_steps_that_a_solver_does_not_have_are_refused_at_opening():
    manifest = Bundle("sinew/assets/pen.gguf").manifest
    solver = Solver("diffusion", levels=NoiseLevels(100, spacing="even"))
    replace(manifest, spec=replace(manifest.spec, solver=solver)).check_agreement()
    with pytest.raises(BundleError, match="solver_steps does not fit spec.solver"):
        replace(manifest, spec=replace(manifest.spec, solver=solver, solver_steps=11)).check_agreement()


FIRST_SIX = '{"kind": "absolute", "action": [0, 1, 2, 3, 4, 5], "state": [0, 1, 2, 3, 4, 5]}'


@pytest.mark.parametrize(
    ("motion", "state", "words"),
    [
        (
            MotionSpec("absolute"),
            7,
            rf"got 7 state numbers and 6 actions\..* --motion '{re.escape(FIRST_SIX)}'",
        ),
        (MotionSpec("absolute", (0,), (0,)), 6, "no columns, got columns, a scale or a range"),
        (MotionSpec("offsets", (9,), (0,)), 6, "offsets: expected different columns of the action"),
    ],
)
def test_a_motion_that_does_not_fit_says_what_to_do(motion: MotionSpec, state: int, words: str):
    manifest = Bundle("sinew/assets/pen.gguf").manifest
    spec = replace(manifest.spec, state=VectorSpec(state), action=VectorSpec(6), motion=motion)
    with pytest.raises(BundleError, match=f"spec.motion: .*{words}"):
        replace(manifest, spec=spec).check_agreement()

"""The golden cases unpack to the references' own files, once, wherever the checkout lies; the checkout stays small."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load

from sinew.bundle import Bundle
from tests import cases, rules

UNPACK = cases.unpack
LIMIT = 50_000_000  # bytes of DATA: everybody who clones the repository downloads them
DATA = ("tests/fixtures/", "sinew/assets/", "docs/figures/")
# What the rules draw, from the generator that made the references' own files of weights.
DRAWN = {
    "normal": (
        {"std": 0.02, "mean": 1.0},
        "5207fa65",
        [1.0066733360290527, 0.9739933609962463, 0.9806312322616577],
    ),
    "uniform": (
        {"low": -0.5, "high": 1.5},
        "4d512dc2",
        [0.8274046182632446, 0.2486964911222458, 0.7138307690620422],
    ),
}


def stored(**tensors: np.ndarray) -> dict[str, rules.Tensor]:
    return {
        name: ("F32", list(value.shape), value.astype("<f4").tobytes()) for name, value in tensors.items()
    }


def as_rules(made_of: dict) -> dict:
    """Rules with the SHA-256 of what they give, as it is found when it is wrong."""
    with pytest.raises(ValueError, match="SHA-256") as said:
        rules.build({**made_of, "sha256": "of another file"}, None, cases.content)
    return {**made_of, "sha256": str(said.value).split()[-1]}


def test_tracked_data_is_small() -> None:
    """Weights and frames of golden cases are compressed or drawn: tests/fixtures/README.md."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # whoever owns it
    listed = subprocess.run(command, cwd=cases.ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [cases.ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {str(path.relative_to(cases.ROOT)): path.stat().st_size for path in files if path.is_file()}
    sizes = {name: size for name, size in sizes.items() if name.startswith(DATA)}
    assert all(any(name.startswith(folder) for name in sizes) for folder in DATA)
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:40]
    table = "\n".join(f"{sizes[name]:>12,} {name}" for name in largest)
    assert sum(sizes.values()) <= LIMIT, (
        f"{sum(sizes.values()):,} bytes of data are tracked; the largest:\n{table}"
    )


def test_every_stored_file_is_unpacked(golden: Path) -> None:
    made = {path.relative_to(golden) for path in golden.rglob("*") if path.is_file()}
    kept = {path.relative_to(cases.FIXTURES) for path in cases.FIXTURES.rglob("*") if path.is_file()}
    made_of = {rule: name for name, rule in cases.RULES.items()}
    names = {path.with_name(path.name.removesuffix(cases.PACKED)) for path in kept}
    assert made == {path.with_name(made_of.get(path.name, path.name)) for path in names}
    assert not {path.suffix for path in made} & {".xz"}


@pytest.mark.parametrize("rule", DRAWN)
def test_draws_are_the_generator_s(rule: str) -> None:
    numbers, digest, first = DRAWN[rule]
    dtype, _, data = rules.draw(7, "model.weight", {"dtype": "F32", "shape": [3, 5], "rule": rule, **numbers})
    assert dtype == "F32"
    np.testing.assert_array_equal(np.frombuffer(data, "<f4")[:3], np.array(first, np.float32))
    assert hashlib.sha256(data).hexdigest()[:8] == digest


def test_fixed_buffers() -> None:
    def values(name: str, shape: list[int], **numbers: object) -> np.ndarray:
        spec = {"dtype": "F32", "shape": shape, "rule": name, **numbers}
        return np.frombuffer(rules.draw(0, "buffer", spec)[2], "<f4").reshape(shape)

    assert values("constant", [2], value=3).tolist() == [3, 3]
    grid = values("pos_grid", [6, 2], h=2, w=3)
    assert grid.tolist() == [[-1, -1], [0, -1], [1, -1], [-1, 1], [0, 1], [1, 1]]
    angle = 2 / 10000 ** (2 / 4)  # of the third position's second pair, in both tables
    for table in (values("sinusoid", [1, 3, 4])[0], values("cosine_1d", [3, 4])):
        assert table[0].tolist() == [0, 1, 0, 1]
        np.testing.assert_allclose(table[2], [np.sin(2), np.cos(2), np.sin(angle), np.cos(angle)], rtol=1e-6)
    plain = values("sinusoid_32", [1, 3, 4], frequencies=[1, 0.01], above=[], below=[]).ravel()
    np.testing.assert_array_equal(plain.reshape(3, 4), values("cosine_1d", [3, 4]))
    beside = values("sinusoid_32", [1, 3, 4], frequencies=[1, 0.01], above=[4, 1], below=[8]).ravel()
    assert np.flatnonzero(beside != plain).tolist() == [4, 5, 8]
    assert [beside[at] for at in (4, 5, 8)] == [
        np.nextafter(plain[at], np.float32(towards)) for at, towards in ((4, 2), (5, 2), (8, -2))
    ]


def test_a_file_of_drawn_taken_and_stored_tensors() -> None:
    held = rules.write(stored(b=np.ones((2, 2)), a=np.zeros(1)), {"format": "pt"})
    other = rules.write(stored(x=np.full(3, 5.0), unused=np.zeros(9)), None)
    made_of = {
        "seed": 1,
        "tensors": {"drawn": {"dtype": "I64", "shape": [2], "rule": "constant", "value": 4}},
        "taken": [
            {"file": "there", "prefix": "here.", "except": ["unused"]},
            {"file": "there", "names": {"again": "x"}},
        ],
    }
    with pytest.raises(ValueError, match="SHA-256") as said:
        rules.build({**made_of, "sha256": ""}, held, {"there": other}.__getitem__)
    complete = {**made_of, "sha256": str(said.value).split()[-1]}
    data = rules.build(complete, held, {"there": other}.__getitem__)
    found = load(data)
    assert {name: value.tolist() for name, value in found.items()} == {
        "b": [[1, 1], [1, 1]],
        "a": [0],
        "drawn": [4, 4],
        "again": [5, 5, 5],
        "here.x": [5, 5, 5],
    }
    assert list(rules.read(data)[0]) == ["b", "a", "again", "drawn", "here.x"]
    assert rules.read(data)[1] == {"format": "pt"}
    assert rules.write(*rules.read(data)) == data


def test_tensors_of_a_bundle(tmp_path: Path) -> None:
    """The package's golden bundle holds in bfloat16 what the checkpoint has in float32; other types are refused."""
    bundle = Bundle(cases.tiny_bundle())
    kinds = {info.type.name: name for name, info in bundle.infos.items()}
    assert kinds.keys() == {"F32", "BF16"}
    found = rules.from_bundle(cases.tiny_bundle(), {f"here.{name}": name for name in kinds.values()})
    for name in kinds.values():
        tensor = bundle.tensor(name)
        dtype, shape, data = found[f"here.{name}"]
        assert (dtype, shape) == ("F32", list(tensor.shape))
        np.testing.assert_array_equal(np.frombuffer(data, "<f4").reshape(shape), tensor.float().numpy())
    half = GGUFWriter(tmp_path / "half.gguf", "any")
    half.add_tensor("w", np.zeros(32, np.float16))
    half.write_header_to_file()
    half.write_kv_data_to_file()
    half.write_tensors_to_file()
    half.close()
    with pytest.raises(ValueError, match="w: expected F32 or BF16, got F16"):
        rules.from_bundle(tmp_path / "half.gguf", {"w": "w"})


def test_what_does_not_fit_is_refused_by_name() -> None:
    spec = {"dtype": "F32", "shape": [4], "rule": "constant", "value": 0}
    with pytest.raises(ValueError, match=r"w: expected one of the rules normal, .*, got 'zeros'"):
        rules.draw(0, "w", {**spec, "rule": "zeros"})
    with pytest.raises(ValueError, match=r"w: expected 4 values for \[4\], got 12"):
        rules.draw(0, "w", {**spec, "rule": "pos_grid", "h": 2, "w": 3})
    complete = as_rules({"seed": 0, "tensors": {"w": spec}})
    held = rules.write(stored(w=np.zeros(4)), None)
    with pytest.raises(ValueError, match="got both a stored tensor and a rule for w"):
        rules.build(complete, held, cases.content)
    changed = {**complete, "tensors": {"w": {**spec, "value": 1}}}
    with pytest.raises(ValueError, match=f"expected a file with SHA-256 {complete['sha256']}"):
        rules.build(changed, None, cases.content)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one small case, and a folder for temporary files of its own."""
    root = tmp_path / "check out"
    folder = root / "tests" / "fixtures" / "case" / "checkpoint"
    folder.mkdir(parents=True)
    complete = as_rules(
        {"seed": 3, "tensors": {"w": {"dtype": "F32", "shape": [8], "rule": "normal", "std": 1}}}
    )
    (folder / "weights.json").write_text(json.dumps(complete))
    (folder / "head.pt.xz").write_bytes(lzma.compress(b"head"))
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(cases, "ROOT", root)
    monkeypatch.setattr(cases, "FIXTURES", root / "tests" / "fixtures")
    monkeypatch.setattr(cases, "USED", ())
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return root


def find() -> Path:
    return cases.golden_cases.__wrapped__()


def test_unpacked_once_for_all_who_ask(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is a file's, which two threads that open it share no more than two processes do."""
    targets = []

    def slowly(source: Path, target: Path) -> None:
        targets.append(target)
        time.sleep(0.1)  # for the others to come while it is not there
        UNPACK(source, target)

    monkeypatch.setattr(cases, "unpack", slowly)
    with ThreadPoolExecutor(8) as pool:
        (home,) = {future.result() for future in [pool.submit(find) for _ in range(16)]}
    assert targets.count(home.with_suffix(".part")) == 1
    assert home.parent == checkout / "build" / "fixtures"
    assert sorted(path.name for path in home.parent.iterdir()) == [home.name, "lock"]
    folder = home / "case" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "head.pt", "model.safetensors"]
    assert (folder / "head.pt").read_bytes() == b"head"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert find() == home
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_changed_file_is_unpacked_anew(checkout: Path) -> None:
    first = find()
    (checkout / "tests" / "fixtures" / "case" / "checkpoint" / "head.pt.xz").write_bytes(
        lzma.compress(b"tail")
    )
    second = find()
    assert first != second
    assert (second / "case" / "checkpoint" / "head.pt").read_bytes() == b"tail"


def test_rules_may_lie_compressed(checkout: Path) -> None:
    plain = (find() / "case" / "checkpoint" / "model.safetensors").read_bytes()
    path = checkout / "tests" / "fixtures" / "case" / "checkpoint" / "weights.json"
    path.with_name("weights.json.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    folder = find() / "case" / "checkpoint"
    assert (folder / "model.safetensors").read_bytes() == plain
    assert not list(folder.glob("weights*"))


def test_a_part_that_was_left_is_no_case(checkout: Path) -> None:
    """Somebody was ended while he unpacked."""
    home = find()
    home.rename(home.with_suffix(".part"))
    (home.with_suffix(".part") / "case" / "left").write_text("over")
    assert find() == home
    assert not (home / "case" / "left").exists()


def test_a_checkout_that_cannot_be_written(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "build").mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may write where a mode forbids it
        original = cases._unpacked

        def refused(home: Path) -> Path:
            if checkout in home.parents:
                raise PermissionError(13, "read-only", str(home))
            return original(home)

        monkeypatch.setattr(cases, "_unpacked", refused)
    home = find()
    assert home.parent.parent == tmp_path / "tmp"
    assert (home / "case" / "checkpoint" / "config.json").read_text() == "{}"


def test_no_space_is_not_taken_for_a_read_only_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(home: Path) -> Path:
        raise OSError(28, "No space left on device", str(home))

    monkeypatch.setattr(cases, "_unpacked", full)
    with pytest.raises(OSError, match="No space left"):
        find()


def test_a_wrong_case_is_named(checkout: Path) -> None:
    path = checkout / "tests" / "fixtures" / "case" / "checkpoint" / "weights.json"
    path.write_text(path.read_text().replace('"std": 1', '"std": 2'))
    with pytest.raises(ValueError, match=r"case/checkpoint/weights\.json: expected a file with SHA-256"):
        find()

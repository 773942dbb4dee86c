"""Kernels that are compiled at home: what is taken down, packed, and found again by another process's launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.gpu import ahead

ROOT = Path(__file__).resolve().parents[3]
HERE = {"python": "3.12", "triton": "3.6.0", "triton_key": "k", "cache": "/tmp/tc"}

# Compiles the row norms of a tiny ladder, packs them; then, in the folder that was unpacked, again.
COMPILE = """
import json, sys
from pathlib import Path
from benchmarks.gpu import ahead

with ahead.pretending(90):
    found = ahead.of_model("smolvla", tiny=True)
some = {key: each for key, each in found.items() if each.kernel.__name__ == "row_norm_kernel"}
names = sorted({each.kernel.__name__ for each in found.values()})
alone = sorted({each.kernel.__name__ for each in ahead.of_model("groot", tiny=True).values()})
print(json.dumps([len(some), ahead.compile_all(some, 90), names, alone]))
if len(sys.argv) > 1:
    ahead.pack(Path(sys.argv[1]), ahead.facts())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tc"
    (folder / "AB").mkdir(parents=True)
    for name in ("x.cubin", "x.json", "__grp__x.json", "x.ttir", "x.ptx"):
        (folder / "AB" / name).write_text(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def test_machine_code_and_its_descriptions_are_packed_alone(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "tc.tgz"
    assert ahead.pack(out, HERE) == 1
    with tarfile.open(out) as archive:
        names = sorted(archive.getnames())
    assert names == ["tc/AB/__grp__x.json", "tc/AB/x.cubin", "tc/AB/x.json", f"tc/{ahead.MANIFEST}"]


@pytest.mark.parametrize("field", HERE)
def test_what_differs_is_named(cache: Path, tmp_path: Path, field: str) -> None:
    out = tmp_path / "tc.tgz"
    ahead.pack(out, HERE)
    assert ahead.differences(out, HERE) == []
    found = ahead.differences(out, HERE | {field: "other"})
    assert found == [f"{field}: expected {HERE[field]}, got other"]


def test_what_is_no_archive_of_kernels_is_an_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of this process, which main would change
    empty, broken = tmp_path / "empty.tgz", tmp_path / "broken.tgz"
    tarfile.open(empty, "w:gz").close()
    broken.write_bytes(b"\x1f\x8bnone")
    for path, said in (
        (empty, "expected a file ahead.json in the archive, found none"),
        (broken, ""),
        (tmp_path / "no", "No such"),
    ):
        assert ahead.main(["--check", str(path)]) == 1
        assert said in capsys.readouterr().out


def test_another_triton_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for wrong, said in (
        (["--triton", "0.1"], "--triton: expected 0.1, got"),
        (["--only", "checks,pi9"], "expected some of checks, pi0.5, pi0, smolvla, groot, got pi9"),
        (["--capability", "75"], "--capability: invalid choice"),
    ):
        with pytest.raises(SystemExit):
            ahead.main(["--out", str(tmp_path / "tc.tgz"), *wrong])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "tc.tgz").exists()


@pytest.mark.kernels
def test_what_was_carried_is_found(tmp_path: Path) -> None:
    """Unpacked where it lay, it is loaded: a compilation would leave its other files."""
    cache, out = tmp_path / "tc", tmp_path / "out" / "tc.tgz"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}

    def run(*arguments: str) -> list:
        command = [sys.executable, "-c", COMPILE, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    asked, compiled, kernels, alone = run(str(out))
    assert alone == ["fp8_quantize_kernel", "packed_attention_kernel", "weight_only_linear_kernel"]
    assert asked == compiled >= 3
    assert {"gated_mlp_kernel", "packed_attention_kernel", "fp8_quantize_kernel", "preprocess_kernel"} <= set(
        kernels
    )
    assert "weight_only_linear_kernel" in kernels
    made = len(list(cache.rglob("*.cubin")))
    cache.rename(tmp_path / "before")
    with tarfile.open(out) as archive:
        # Python 3.11.2, as Debian has it, knows no filters.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    held = sorted(path for path in cache.rglob("*") if path.is_file())
    assert sum(path.suffix == ".cubin" for path in held) == made > 0
    assert run()[:2] == [asked, compiled]
    assert sorted(path for path in cache.rglob("*") if path.is_file()) == held

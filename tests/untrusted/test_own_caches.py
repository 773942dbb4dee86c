"""Damaged files in this user's caches: a start ends in a value or in one line, and never waits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"

READERS = """
import os, sys
from pathlib import Path
import numpy as np
from sinew.bundle.digests import DigestCache
from sinew.convert.sources import cache
from sinew.core import PolicySpec, SinewError, machine
from sinew.engine import prepared, proofs
from sinew.engine.cpu.kernels.build import is_whole
from sinew.engine.cuda.fp8 import scales
from sinew.engine.fingerprint import fingerprint
from sinew_perf.machine import fit
from sinew.processing.files import read_image
from sinew.serve.wires.lerobot.agreements import Agreements
from sinew.bundle import Bundle
from sinew_client.control.adapter import Adapter
from sinew_client.control.safety import Limits

work, pen = Path(sys.argv[1]), Path(sys.argv[2])
DEEP = "[" * 200_000

def plant(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text(DEEP)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.write_bytes(b"\\xff\\xfe")
    return path

def lock(path):
    with cache._locked(path):
        return "locked"

def memo(path):
    return DigestCache(work, path.parent).entries

def proof(path):
    return proofs.lacking(pen, "onnx", "cpu"), proofs.records(pen)

spec = Bundle(pen).manifest.spec
for kind in sys.argv[3:]:
    home = work / kind
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    readers = {
        "lock": (home / "a" / ".entry.lock", lambda path: lock(path.parent / "entry")),
        "source.json": (home / "entry" / "source.json", lambda path: cache.CacheEntry(path.parent)),
        "digests": (DigestCache(work, home / "digests").path, memo),
        "proof": (proofs._path(pen, "onnx", "cpu"), proof),
        "prepared": (prepared._path(pen, "onnx"), lambda path: prepared.kept(pen, "onnx")),
        "fp8": (scales.path_of("a" * 64), lambda path: scales.load("a" * 64)),
        "calibration": (fit.path_of("cpu", 2, home / "fit", "eager"), lambda path: fit.load("cpu", 2, home / "fit")),
        "agreements": (home / "lerobot.json", lambda path: Agreements(2).open(path, spec)),
        "kernels": (home / "kernels" / "sha256", lambda path: is_whole(path.parent)),
        "bundle": (home / "b.gguf", fingerprint),
        "picture": (home / "p.png", lambda path: read_image(path, "front")),
        "adapter": (home / "a.safetensors", Adapter.read),
        "limits": (home / "l.json", lambda path: Limits.read(path, 2)),
        "limits in TOML": (home / "l.toml", lambda path: Limits.read(path, 2)),
    }
    for name, (path, read) in readers.items():
        plant(path, kind)
        print(kind, name, sep="|", end=": ", flush=True)
        try:
            print("value", repr(read(path))[:200].replace("\\n", " "))
        except (SinewError, OSError) as error:
            print("error", str(error)[:300].replace("\\n", " "))
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_damaged_caches(tmp_path: Path) -> None:
    """FIFOs in the places of a lock, a record and a digest hung `sinew serve`; a deep proof ended it."""
    kinds = ("fifo", "folder", "deep", "sparse", "bytes")
    done = processes.run([sys.executable, "-c", READERS, str(tmp_path), str(PEN), *kinds], timeout=300)
    assert done.returncode == 0, done.stderr
    texts: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for line in done.stdout.splitlines():
        where, text = line.split(": ", 1)
        kind, name = where.split("|")
        texts[kind][name] = text
    for kind, lines in texts.items():
        assert len(lines) == 14, kind
        assert lines["proof"].startswith("value ('engine onnx is not validated for this bundle"), kind
        assert lines["proof"].endswith(", [])"), kind
        assert lines["digests"] == "value {}", kind
        assert lines["prepared"] == "value None", kind
        assert lines["kernels"] == "value False", kind
        assert lines["agreements"] == "value None", kind
        for name in ("source.json", "fp8", "calibration", "adapter", "limits", "picture"):
            assert lines[name].startswith("error "), (kind, name)
    for name in ("lock", "source.json", "bundle"):
        assert "expected a regular file, got a FIFO" in texts["fifo"][name]

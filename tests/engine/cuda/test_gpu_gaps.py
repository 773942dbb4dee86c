"""What lies between kernels, in the interpreter and compiled for sm_80 and sm_90, and the baselines beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gaps, sections

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
ROOT = Path(__file__).resolve().parents[3]

# Without the interpreter, which the tests' own process has chosen.
COMPILE = """
import json, sys
from benchmarks.gpu import gaps
made = gaps.launches(gaps.WIDE, "meta")
wanted = [(name, each, capability) for name, each in made.items() for capability in (80, 90)]
text = {
    f"{name} {capability}": each.compile(capability).asm["ptx"]
    for name, each, capability in wanted
}
json.dump(text, sys.stdout)
"""


def test_links_and_reads_compute_what_is_checked_on_the_device() -> None:
    """A link reads its neighbour's block; a read sums all blocks of a program. The barrier needs programs that run at
    once, which those of the interpreter do not."""
    source, target = torch.rand(3, gaps.BLOCK), torch.zeros(3, gaps.BLOCK)
    gaps.link(source, target)()
    assert torch.equal(target, source.roll(-1, 0) + 1)
    read, sums = torch.rand(2, 3, gaps.READ), torch.zeros(2)
    gaps.read(read, sums, 2)()
    torch.testing.assert_close(sums, 2 * read.sum((1, 2)), rtol=1e-4, atol=0.0)


def test_they_compile() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ptx = json.loads(done.stdout)
    assert len(ptx) == 6
    for capability in (80, 90):
        assert "cp.async" in ptx[f"read {capability}"]
        # A sign that carries this program's stores, and a look that sees the others'.
        barrier = ptx[f"barrier {capability}"]
        assert "atom.global.gpu.acq_rel.add" in barrier
        assert "ld.global.gpu.acquire" in barrier or "atom.global.gpu.acquire" in barrier


def test_the_fair_baseline_computes_what_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the calls go through Dynamo and AOTAutograd; Inductor's code is a GPU's matter."""
    rows: list[dict] = []
    session = sections.Session(torch.device("cpu"), 300.0, rows.append, tiny=True)
    sections.fused_by_inductor("smolvla", session)
    (row,) = [row for row in rows if row.get("rung") == "graph + inductor" and "p50_ms" in row]
    assert row["differs_from_graph"] <= 1e-2
    assert row["l2"] <= 3e-2

"""What a load and a compiled layer need beside what they leave: bounds by arithmetic, in a process of their own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sinew.bundle import Bundle, TensorSource, write_bundle
from sinew.bundle.writer import ArraySlice
from sinew.core.fields import from_builtins
from sinew.core.registry import model_class
from sinew.engine.cpu.kernels.library import extension
from sinew.layers.stores.lowbit import HALVES, INTEGERS
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.models import build_on_meta
from tests import processes

ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
AROUND = 64 << 10  # bytes of a file that one fault brings at most, at either end of a tensor
LOADS = """
import json, sys
from sinew.core.machine import resident_bytes
from sinew.policy import load

small, large, engine, dtype = sys.argv[1:]
held, grown = [load(small, engine=engine, dtype=dtype, threads=1)], []
for path in (small, large):
    before = resident_bytes()["now"]
    held.append(load(path, engine=engine, dtype=dtype, threads=1))
    found = resident_bytes()
    grown.append((found["peak"] - before, found["now"] - before))
print(json.dumps(grown))
"""
LAYER = """
import json
import torch
from torch import nn
from sinew.core.machine import resident_bytes
from sinew.engine.cpu.kernels import layer_kernels
from sinew.engine.cpu.kernels.library import extension
from sinew.layers.linear import Linear, hold
from sinew.layers.stores.codes import codes

extension()

def layer():
    made = Linear(256, 256)
    hold(made, codes("int8", 256, 256))
    made.weight = nn.Parameter(torch.zeros(256, 256, dtype=torch.uint8), False)
    made.scale, made.bias = (nn.Parameter(torch.ones(256), False) for _ in range(2))
    return made

q, k, v, output, up, down = (layer() for _ in range(6))
before = layer_kernels.Projection(None, [q, k, v], 0, 64)
behind = layer_kernels.Finish(output, layer_kernels.NormOf(True, 1e-6), [up], "gelu_tanh", down)
with torch.inference_mode():
    layer_kernels.encode(before, behind, torch.ones(1, 8, 256))
    x = torch.ones(8, 1024, 256)
    start = resident_bytes()["now"]
    out = layer_kernels.encode(before, behind, x)
    print(json.dumps([x.nbytes, resident_bytes()["peak"] - start]))
"""


def measured(program: str, *arguments: object) -> list:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return json.loads(processes.run(command, check=True).stdout.splitlines()[-1])


def larger(path: Path, out: Path) -> Bundle:
    """Write the bundle of ``path`` with perceptrons of the language model that are 64 times as wide."""
    bundle = Bundle(path)
    language = bundle.manifest.config["language"]
    wide = {**language, "intermediate_size": 64 * language["intermediate_size"]}
    manifest = replace(bundle.manifest, config={**bundle.manifest.config, "language": wide})
    config = from_builtins(manifest.config, model_class(manifest.architecture).config_type, "config")
    shapes = build_on_meta(manifest.architecture, config).state_dict()
    arrays = {name: torch.full(tensor.shape, 0.01).numpy() for name, tensor in shapes.items()}
    sources = [
        TensorSource(name, array.shape, bundle.infos[name].type, array.nbytes, ArraySlice(array))
        for name, array in arrays.items()
    ]
    write_bundle(out, lambda: manifest, sources)
    return Bundle(out)


@ON_LINUX
@pytest.mark.parametrize(
    ("engine", "dtype"), [("eager", "bf16"), ("plan", "fp16"), ("cpu", "fp32"), ("cpu", "bf16")]
)
def test_weights_are_in_memory_once_while_they_are_converted(smolvla_bundle, tmp_path, engine, dtype) -> None:
    """A load of a larger bundle takes as much more than that of a small one as its weights in their new form are
    larger, and one weight in both: the file's pages go weight by weight."""
    small = smolvla_bundle("smolvla-2cam")
    large = larger(small, tmp_path / "large.gguf")
    if engine == "cpu" and not ({*INTEGERS} if dtype == "fp32" else {*HALVES}).intersection(
        extension().panels
    ):
        pytest.skip(f"{extension().kernels} kernels lay nothing out for {dtype}")
    if engine == "cpu" and dtype == "fp32":
        files = []
        for bundle in (Bundle(small), large):
            recipe = dict.fromkeys(("vision", "language", "head"), "int8")
            formats, manifest = plan_formats(bundle, recipe), bundle.manifest
            files.append(tmp_path / f"{len(files)}-int8.gguf")
            write_bundle(files[-1], lambda manifest=manifest: manifest, lowbit_sources(bundle, formats))
        small, large = files[0], Bundle(files[1])
    (usual, _), (peak, left) = measured(LOADS, small, large.path, engine, dtype)
    held = large.weights_nbytes // (1 if dtype == "fp32" else 2)
    both = 2 * max(info.nbytes for info in large.infos.values())
    assert left > 0.5 * held  # it is what is measured; a plan needs less
    assert peak <= usual + held + both + 2 * AROUND * len(large.infos)


@ON_LINUX
def test_a_layer_holds_keys_and_values_of_some_members() -> None:
    """The result, in whose place queries and what they see lie, and keys and values of 1,024 rows of 8,192: below two
    tensors of x's size, where all queries, keys and values beside it would need four."""
    if not extension().compiled:
        pytest.skip("no kernels")
    size, grown = measured(LAYER)
    assert size <= grown < 2 * size

"""Write a checkpoint of a family at its published sizes, made from the tiny fixture of the family.

The checkpoint has the same files, names and layout as the fixture, with noise as weights. A family is described by
data: the larger sizes for the dimensions of each tensor (by name), how often each layer is repeated, and the changes
of the JSON files. The sizes come from papers, from code and from the converters of vla.cpp. No published weights are
read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.checkpoints.noise import write_tensors
from benchmarks.checkpoints.plan import TensorPlan
from tests.cases import FILES_GIVEN, golden_cases

SHARD = 4 << 30  # bytes in one file of a checkpoint
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """The differences between the fixture of a family and a checkpoint at published size.

    Attributes:
        case: Name of the fixture.
        sizes: (pattern of names, {small size: large size} or the whole shape). The first pattern that matches counts.
        layers: (pattern with one group for the number of the layer, number of layers).
        edits: JSON file -> {path of keys or list positions: new value}.
        folder: Folder of the weights in the fixture.
        given: Options of the conversion. Paths are relative to the fixture.
        run: True if one inference fits 24 GiB of memory.
    """

    case: str
    sizes: tuple[tuple[str, dict[int, int] | Shape], ...]
    layers: tuple[tuple[str, int], ...]
    edits: dict[str, dict[str, Any]]
    folder: str = "checkpoint"
    given: dict[str, Any] = field(default_factory=dict)
    run: bool = True

    def options(self, out: Path) -> dict[str, Any]:
        """Return the options for the conversion of the checkpoint in ``out``."""
        return {key: out / value if key in FILES_GIVEN else value for key, value in self.given.items()}


def inflate(family: Family, out: Path, write: Callable[..., object] = write_tensors) -> int:
    """Write the folders of the fixture to ``out``, with full-size weights in its ``folder``.

    Args:
        family: The family.
        out: The folder to write.
        write: Writes one file of tensors.

    Returns:
        The size of the weights in bytes.
    """
    home = golden_cases() / family.case
    out.mkdir(parents=True)
    for folder in (part for part in home.iterdir() if part.is_dir()):
        shutil.copytree(
            folder, out / folder.name, ignore=shutil.ignore_patterns("model*.safetensors", "*.pt")
        )
    for name, values in family.edits.items():
        record = json.loads((out / name).read_text())
        for path, value in values.items():
            *parents, last = path.split(".")
            part = record
            for key in parents:
                part = part[int(key) if isinstance(part, list) else key]
            assert last in part, f"{name}: {path}"
            part[last] = value
        (out / name).write_text(json.dumps(record))
    source, target = home / family.folder, out / family.folder
    total = _safetensors(family, source, target, write)
    for file in source.glob("*.pt"):
        found = torch.load(file, weights_only=True)
        shapes = dict(inflated(family, {key: tuple(value.shape) for key, value in found.items()}))
        tensors = {key: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for key, shape in shapes.items()}
        torch.save(tensors, target / file.name)
        total += (target / file.name).stat().st_size
    return total


def _safetensors(family: Family, source: Path, target: Path, write: Callable[..., object]) -> int:
    small: dict[str, Shape] = {}
    for file in sorted(source.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as content:
            small |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    plans = [plan(*entry) for entry in inflated(family, small)]
    shards: list[list[TensorPlan]] = [[]]
    for entry in plans:
        if (
            sum(other.nbytes for other in shards[-1]) > SHARD
            and (source / "model.safetensors.index.json").exists()
        ):
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1 and not (source / "model.safetensors.index.json").exists():
        write(target / "model.safetensors", shards[0], {}, {"format": "pt"})
    else:
        where = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            write(target / name, shard, {}, {"format": "pt"})
            where |= {entry.name: name for entry in shard}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(entry.nbytes for entry in plans)


def inflated(family: Family, small: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of every tensor at full size. The layers repeat the layers of the fixture in turn."""
    for name, shape in small.items():
        sizes = next((table for pattern, table in family.sizes if re.search(pattern, name)), {})
        full = sizes if isinstance(sizes, tuple) else tuple(sizes.get(size, size) for size in shape)
        match, count = next(
            ((found, count) for pattern, count in family.layers if (found := re.search(pattern, name))),
            (None, 0),
        )
        if match is None:
            yield name, full
            continue
        start, end = match.span(1)
        there = {
            int(found[1])
            for other in small
            if (found := re.match(re.escape(name[:start]) + r"(\d+)\.", other))
        }
        for layer in range(int(match[1]), count, len(there)):
            yield f"{name[:start]}{layer}{name[end:]}", full


def plan(name: str, shape: Shape) -> TensorPlan:
    if len(shape) > 1:
        init = "embedding" if "embed_tokens" in name else "matrix"
    else:
        init = "norm" if "norm" in name and name.endswith("weight") else "bias"
    return TensorPlan(name, shape, init, "BF16")

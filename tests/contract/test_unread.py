"""Readers say what they did not use: every layout x an array that nothing reads, where weights and statistics lie.

A reader that asks for the names it knows loses what a fine-tune added: openpi's converter lost LoRA factors so. Each
golden checkpoint gets an array more in each of its files; the conversion fails and names it, or the bundle lists it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from tests.cases import FIXTURES, PACKED, RULES, cases

NEW = "brand_new"


# Cases whose layout is that of another case
ALIKE = (
    "act-3cam",
    "act-env",
    "act-sizes",
    "diffusion-ddpm",
    "eo1-fast",
    "mtdit-ddpm",
    "pi05-mem",
    "smolvla-3cam-padded",
    "smolvla-bf16-vlm",
    "xvla-auto",
    "vqbet-parallel",
    "wallx-2cam",
    "molmoact2-2cam",
)
SHARD = re.compile(r"-0000[2-9]-of-.*")
ALONE, BESIDE = "alone", "beside"


def layouts() -> Iterator[tuple[str, str, str]]:
    """Yield each layout, each kind of file in its checkpoint that holds arrays, and where an array is added."""
    made = {rule: name for name, rule in RULES.items()}
    for name, case in cases().items():
        folder, files = FIXTURES / case.home / case.checkpoint, set()
        for path in folder.rglob("*"):
            rule = path.name.removesuffix(PACKED)
            files.add(path.relative_to(folder).parent / made.get(rule, rule))
        held = [each for each in sorted(files) if each.suffix in (".safetensors", ".pt", ".pth")]
        for file in held if name not in ALIKE else ():
            if not SHARD.search(file.name):
                yield name, str(file), ALONE
                if file.name.startswith("model"):  # where LoRA factors would be
                    yield name, str(file), BESIDE


def with_array(file: Path, name: str) -> None:
    """Write a copy of ``file`` with one array more."""
    extra = torch.ones(2, 2)
    if file.suffix == ".safetensors":
        found = load_file(file)
        file.unlink()
        save_file({**found, name: extra}, file)
        return
    record = torch.load(file, weights_only=False)
    file.unlink()
    record[name] = {"weight": extra} if any(isinstance(each, dict) for each in record.values()) else extra
    torch.save(record, file)


@pytest.mark.parametrize(("case", "file", "place"), list(layouts()))
def test_an_array_that_nothing_reads_is_named(
    golden: Path, tmp_path: Path, case: str, file: str, place: str
) -> None:
    entry = cases()[case]
    home = tmp_path / entry.home
    shutil.copytree(golden / entry.home, home, copy_function=lambda a, b: Path(b).symlink_to(a))
    path = home / entry.checkpoint
    first = next(iter(load_file(path / file))) if place == BESIDE else f"{NEW}.weight"
    with_array(path / file, f"{first.rpartition('.')[0]}.{NEW}")
    assert NEW in outcome(path, tmp_path / "out.gguf", **entry.options(home))


def outcome(path: Path, out: Path, **given: Any) -> str:
    """Return the error, or what the bundle lists as not read."""
    try:
        provenance = Bundle(convert(path, out, **given)).manifest.provenance
    except ConvertError as error:
        return str(error)
    return " ".join((*provenance.dropped, *provenance.notes))

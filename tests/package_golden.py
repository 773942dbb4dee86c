"""Write the golden data of the package: ``python -m tests.package_golden FIXTURE_DIRECTORY``.

The folder contains ``checkpoint/``, ``vlm/`` and ``fixture.safetensors``, as the golden SmolVLA fixtures do (``python
-m tests.cases`` prints their folder).
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sinew.convert import convert
from sinew.families.smolvla.golden import BUNDLE, REFERENCE


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in bfloat16 if bfloat16 can hold all of them, which is so if the reference has rounded them."""
    half = tensor.to(torch.bfloat16)
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor


def build(fixture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = shutil.copytree(fixture / "checkpoint", Path(folder) / "checkpoint")
        weights = checkpoint / "model.safetensors"
        save_file({name: narrowed(tensor) for name, tensor in load_file(weights).items()}, weights)
        made = convert(checkpoint, Path(folder) / BUNDLE.stem, vlm=fixture / "vlm", name="golden-smolvla")
        BUNDLE.write_bytes(lzma.compress(made.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    with safe_open(fixture / "fixture.safetensors", framework="np") as stored:
        facts = stored.metadata()
        np.savez_compressed(
            REFERENCE,
            cameras=np.array(
                [key.removeprefix("observation.images.") for key in json.loads(facts["cameras"])]
            ),
            prompt=np.array(facts["task"]),
            state=stored.get_tensor("state_raw"),
            noise=stored.get_tensor("noise")[0],
            actions=stored.get_tensor("actions")[0],
        )


if __name__ == "__main__":
    build(Path(sys.argv[1]))

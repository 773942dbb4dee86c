"""The launches of one observation, compared with a file. Batches must not change them, because the latency of one
robot depends on them.

``python -m tests.engine.cuda.test_unbatched_launches`` writes the file again, after a change that is meant to change
launches.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels import tiles
from sinew.engine.cuda.kernels.launch import ALIGNMENT, Launch
from tests.engine.cuda.test_cuda_full_size import META, program

pytestmark = pytest.mark.kernels
FILE = Path(__file__).with_suffix(".json")
# model -> number of views, tokens of the prompt, size of the image
MODELS = {"pi0.5": (3, 200, 224), "pi0": (2, 16, 224), "smolvla": (2, 48, 512)}
CASES = [
    ("pi0.5", 90, torch.bfloat16),
    ("pi0", 90, torch.bfloat16),
    ("smolvla", 90, torch.bfloat16),
    ("smolvla", 90, torch.float32),
    ("pi0.5", 80, torch.bfloat16),
    ("smolvla", 89, torch.bfloat16),
]
# These operators compute nothing.
FREE = ("aten.empty", "aten._unsafe_view")


class Operators(TorchDispatchMode):
    """Counts the operators that compute, and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith(FREE):
            self.calls[str(func)] += 1
            self.elements[str(func)] += sum(
                each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)
            )
        return out


def described(launch: Launch) -> str:
    """Return everything that a launch passes to Triton. Arguments that are None do not reach the machine code."""

    def value(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        aligned = each.storage_offset() * each.element_size() % ALIGNMENT == 0
        return f"{each.dtype} {each.numel()}{'' if aligned else ' unaligned'}"

    kernel = getattr(launch.kernel, "fn", launch.kernel).__name__
    arguments = {name: value(each) for name, each in launch.arguments.items() if each is not None}
    return f"{kernel} {launch.grid} {launch.options()} {arguments}"


def recorded(name: str, capability: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the launches and operators of one observation's chunk.

    The record has the number of launches of each kernel, a digest of all launches in their order, and for each operator
    the number of calls and of elements."""
    seen: list[str] = []
    with (
        mock.patch.object(tiles, "capability", return_value=capability),
        mock.patch.object(Launch, "__call__", lambda launch: seen.append(described(launch))),
        torch.no_grad(),
    ):
        made = program(name, *MODELS[name], Kernels(META), dtype)
        made.chunk()  # fills the tables that later runs read
        seen.clear()
        with Operators() as operators:
            made.chunk()
    kernels = Counter(each.partition(" ")[0].removesuffix("_kernel") for each in seen)
    return {
        "launches": dict(sorted(kernels.items())),
        "digest": hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16],
        "operators": {
            name: [calls, operators.elements[name]] for name, calls in sorted(operators.calls.items())
        },
    }


def key(name: str, capability: int, dtype: torch.dtype) -> str:
    return f"{name} sm_{capability} {str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: key(*case))
def test_one_observation_launches_what_it_launched(case) -> None:
    assert recorded(*case) == json.loads(FILE.read_text())[key(*case)]


if __name__ == "__main__":
    rows = (f'"{key(*case)}": {json.dumps(recorded(*case))}' for case in CASES)
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")

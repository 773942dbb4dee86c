"""Launches of kernels: what they refuse, which tiles they take, what the compiler makes of them for GPUs that are
not here; and the tool of the first GPU session, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.shapes import arguments, cost, launch, problems
from sinew.engine.cuda.kernels import KERNELS, Workspace
from sinew.engine.cuda.kernels.lang import MissingTriton, triton
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.tiles import (
    ARCHITECTURES,
    SHARED_MEMORY,
    TILES,
    architecture,
    default,
    tile_for,
)
from tests.engine.cuda.kernel_checks import CHECKS, DEVICE, loaded, needs_triton
from tests.engine.cuda.kernel_compile import (
    IN_CI,
    IN_PARTS,
    LARGEST,
    TOO_LARGE,
    WITH_PDL,
    WITH_PREFETCH,
    architectures_of,
)

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def test_errors_name_the_tensor() -> None:
    x, w = torch.zeros(3, 32), torch.zeros(8, 32)
    with pytest.raises(ValueError, match=r"bias: expected shape \[8\], got \[9\]"):
        KERNELS["norm_linear"].launch(x, w, bias=torch.zeros(9))
    with pytest.raises(ValueError, match=r"weight: expected dtype torch.float32, got torch.bfloat16"):
        KERNELS["splitk_linear"].launch(x, w.bfloat16(), workspace=Workspace(1, 1, "cpu"))
    with pytest.raises(ValueError, match=r"weight: expected contiguous memory"):
        KERNELS["gated_mlp"].launch(x, torch.zeros(32, 8).T, activation="silu")
    deep = torch.zeros(3, 512), torch.zeros(8, 512)  # in parts, which are joined in the workspace
    with pytest.raises(ValueError, match=r"workspace: expected at least \d+ floats, got 1"):
        KERNELS["splitk_linear"].launch(*deep, workspace=Workspace(1, 1, "cpu"))
    heads = torch.zeros(3, 1, 16), torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    with pytest.raises(ValueError, match=r"workspace: expected one for a depth in 2 parts, got none"):
        KERNELS["qkv_rope"].launch(
            torch.zeros(3, 32), torch.zeros(48, 32), *2 * [torch.zeros(3, 8)], *heads, tile=Tile(split=2)
        )
    with pytest.raises(ValueError, match=r"activation: expected one of gelu_tanh, silu, got 'relu'"):
        KERNELS["gated_mlp"].launch(x, w, activation="relu")
    q, kv, mask = torch.zeros(2, 3, 24), (torch.zeros(4, 1, 24),) * 2, torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"q: expected a head size that is a power of two"):
        KERNELS["packed_attention"].launch(q, kv, mask, workspace=Workspace(1, 1, "cpu"))


@pytest.mark.skipif(triton is not None, reason="triton is installed")
def test_without_triton_a_launch_says_so() -> None:
    with pytest.raises(MissingTriton, match="pip install"):
        KERNELS["norm_linear"].launch(torch.zeros(3, 32), torch.zeros(8, 32))


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_problems_have_arguments_grids_and_costs(problem) -> None:
    made = launch(problem, "meta")
    assert all(isinstance(size, int) and size > 0 for size in made.grid)
    assert cost(problem).bytes > 0
    assert set(made.arguments) == set(arguments_of(problem.kernel))
    assert arguments(problem, "meta")[0]


def arguments_of(kernel: str) -> list[str]:
    function = KERNELS[kernel].kernel
    return list(
        getattr(function, "arg_names", None) or function.__code__.co_varnames[: function.__code__.co_argcount]
    )


class Allocations(TorchDispatchMode):
    """Operators whose result lies in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        held = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        made = {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        if made - held:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize(
    "name",
    [
        "norm_linear",
        "gated_mlp",
        "qkv_rope",
        "splitk_linear",
        "packed_attention",
        "row_norm",
        "activate",
        "rope",
    ],
)
def test_preparing_a_launch_allocates_nothing(name: str) -> None:
    small = {"M": 5, "K": 32, "N": 16, "H": 2, "KV": 1, "D": 16, "P": 9, "S": 3}
    found = next(p for p in problems() if p.kernel == name)
    sizes = {size: small.get(size, value) for size, value in found.sizes.items()}
    positional, options = arguments(replace(found, sizes=sizes), "cpu")
    with Allocations() as allocations:
        KERNELS[name].prepare(*positional, **options)
    assert allocations.found == []
    with allocations:
        torch.zeros(3) + 1
    assert allocations.found  # it would have been seen


def test_the_registry_the_tiles_and_the_problems_name_the_same_kernels() -> None:
    assert set(KERNELS) == set(TILES) == set(CHECKS) == {problem.kernel for problem in problems()}
    assert set(IN_CI) <= {problem.name for problem in problems()}


def test_architectures() -> None:
    assert [architecture(c) for c in (80, 86, 87, 89, 90, 100, 120)] == [80, 89, 80, 89, 90, 90, 89]
    with pytest.raises(ValueError, match=r"compute capability: expected 8\.0 or newer, got 7\.5"):
        architecture(75)


def test_without_a_gpu_tiles_are_those_of_the_oldest_architecture() -> None:
    problem = "splitk_linear", (50, 1024, 4096), torch.bfloat16
    assert tile_for(*problem, CPU) == default(*problem, min(ARCHITECTURES)) != default(*problem, 90)


def test_a_gpu_takes_the_tile_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "splitk_linear", (50, 1024, 4096), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tile_for(*problem, torch.device("cuda:0")) == default(*problem, 90)


def test_the_first_measurements_need_torch_and_triton_alone() -> None:
    others = {"PIL", "aiohttp", "cyclopts", "gguf", "msgspec", "rich", "safetensors", "tokenizers"}
    program = f"import sys; sys.modules.update(dict.fromkeys({others})); sys.argv = ['x', '--tables']; "
    program += "import runpy; runpy.run_path('benchmarks/gpu/kernels.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "computed, not measured" in done.stdout


def test_the_first_measurements_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    first = loaded("first", ROOT / "benchmarks" / "gpu" / "kernels.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    assert first.main() == 1
    said = capsys.readouterr().out
    assert "nothing was measured" in said
    assert "sees no CUDA device" in said
    assert all(problem.name in said for problem in problems())
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--only", "a,e"])
    with pytest.raises(SystemExit):
        first.main()
    assert "expected some of a, b, c, d, got e" in capsys.readouterr().err


@needs_triton
def test_the_first_measurements_check_before_they_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded("first", ROOT / "benchmarks" / "gpu" / "kernels.py")
    monkeypatch.setattr(first, "DEVICE", DEVICE)
    small = {"M": 5, "K": 32, "N": 16, "H": 2, "KV": 1, "D": 32, "P": 20, "S": 5}
    for name in ("pi0.5 head qkv", "pi0.5 head o", "pi0.5 head gate up", "pi0.5 head attention"):
        found = first.by_name(name)
        problem = replace(found, sizes={size: small.get(size, value) for size, value in found.sizes.items()})
        assert len(first.checked(problem, Tile(16, 16, 16, 2, stages=2), 1)) == 1
        reference = KERNELS[problem.kernel].reference
        broken = replace(
            KERNELS[problem.kernel],
            reference=lambda *a, reference=reference, **o: _shifted(reference(*a, **o)),
        )
        with monkeypatch.context() as patch:
            patch.setitem(first.KERNELS, problem.kernel, broken)
            with pytest.raises(AssertionError, match="against its reference"):
                first.checked(problem, Tile(16, 16, 16, 2, stages=2), 1)


def _shifted(result):
    return tuple(map(_shifted, result)) if isinstance(result, tuple) else result * 1.05


# The compiler, for GPUs that are not here.


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict]:
    """From a process of its own: Triton decides at import whether it compiles or interprets."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, "-m", "tests.engine.cuda.kernel_compile"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    return {(report["problem"], report["capability"]): report for report in reports}


COMPILED = [
    (problem.name, capability)
    for problem in problems()
    if problem.name in IN_CI
    for capability in architectures_of(problem)
]


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize(("name", "capability"), COMPILED)
def test_kernel_compiles_without_spills(compiled: dict, name: str, capability: int) -> None:
    report = compiled[name, capability]
    assert report["spilled"] == 0
    assert report["registers"] <= 255
    assert report["shared"] <= SHARED_MEMORY[capability]
    problem = next(p for p in problems() if p.name == name)
    if KERNELS[problem.kernel].uses_tensor_cores and not problem.sizes.get("wide"):
        rows = report["tile"]["m"]
        wanted = "wgmma.mma_async" if capability == 90 and rows >= 64 else "mma.sync"
        assert report["tensor_core"] == wanted
        tile, keys = report["tile"], problem.sizes.get("P", float("inf"))
        loops = problem.kernel != "packed_attention" or tile["n"] * tile["split"] < keys
        assert report["async_copies"] > 0 or tile["stages"] == 1 or not loops
        is_eight_bit = problem.kernel == "fp8_product"
        assert report["eight_bit"] == (report["tensor_core_count"] if is_eight_bit else 0)
    assert report["dependencies"] == 0


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("name", WITH_PDL)
def test_dependent_launch_compiles(compiled: dict, name: str) -> None:
    report = compiled[f"{name}, dependent", 90]
    assert report["dependencies"] == 2  # one lets the next kernel start, one waits
    assert report["early"] == ["griddepcontrol.launch_dependents"]  # no memory before the wait
    assert report["prefetches"] == 0


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("name", WITH_PREFETCH)
def test_only_the_weight_is_asked_for_before_the_wait(compiled: dict, name: str) -> None:
    report, plain = compiled[f"{name}, asks", 90], compiled[name, 90]
    blocks = 2 if report["kernel"] in ("gated_mlp", "qkv_rope") else 1
    assert report["early"] == [
        "griddepcontrol.launch_dependents",
        *["cp.async.bulk.prefetch.L2.global"] * blocks,
    ]
    assert report["prefetches"] == blocks
    assert (report["dependencies"], plain["dependencies"], plain["prefetches"]) == (2, 0, 0)
    assert (report["spilled"], report["shared"]) == (0, plain["shared"])
    assert report["registers"] <= plain["registers"] + 16


@pytest.mark.kernels
@needs_triton
def test_a_mask_of_keys_leaves_registers_for_the_largest_tile(compiled: dict) -> None:
    """With a byte per query and key, 128 bytes of it spill."""
    report = compiled[f"{LARGEST[0]}, largest", 90]
    assert (report["spilled"], report["tensor_core"]) == (0, "wgmma.mma_async")
    assert report["shared"] <= SHARED_MEMORY[90]


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("name", IN_PARTS)
def test_depths_in_parts_compile(compiled: dict, name: str, capability: int) -> None:
    report = compiled[f"{name}, in parts", capability]
    assert report["tile"]["split"] > 1
    assert report["spilled"] == 0
    assert report["registers"] * 32 * report["tile"]["warps"] <= 1 << 16  # what a multiprocessor has
    assert report["shared"] <= SHARED_MEMORY[capability]


@pytest.mark.kernels
@needs_triton
def test_spills_would_be_seen(compiled: dict) -> None:
    assert compiled[f"{TOO_LARGE[0]}, too large", 90]["spilled"] > 0

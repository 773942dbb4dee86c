"""Time every tile of a list for each kind of kernel launch of a chunk, with weights that are not in the GPU's cache.

The tables in ``sinew/engine/cuda/kernels/tiles.py`` come from such a sweep. A tile is the block size of a kernel. The
sweep records each launch with the tensors from the engine, and prepares the launch again with other tiles. The section
fails if the result of a tile differs from the result of the tile in the table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.rungs import launched
from benchmarks.gpu.session import NotHere, Row, Session
from benchmarks.gpu.timing import graph_ms
from sinew.engine.cuda.kernels import splitk_linear, tiles
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.workspace import Workspace

SWEPT = ("splitk_linear", "gated_mlp", "qkv_rope", "packed_attention", "norm_linear")
COLD = 100 << 20  # bytes of weights to use in rotation, which is twice the largest L2 cache
FEWEST, MOST = 16, 32  # smallest and largest number of copies of a weight
SAME = 2e-2  # largest relative L2 difference between the results of two tiles in bfloat16
BEST = 4
SHARED_MEMORY = 227 * 1024  # bytes that one program may use on an H100 or H200


@dataclass
class Problem:
    """The arguments with which a kernel was prepared, and how often a chunk runs the kernel."""

    kernel: str
    given: inspect.BoundArguments
    runs: int = 0

    def launches(
        self, tile: Tile, weight: Tensor | None = None, room: Workspace | None = None
    ) -> list[Launch]:
        """Return the launches of this problem with another tile, weight and workspace."""
        bound = self.given.signature.bind(*self.given.args, **self.given.kwargs)
        chosen: dict[str, Any] = {"tile": tile, "weight": weight, "workspace": room}
        bound.arguments |= {
            name: value
            for name, value in chosen.items()
            if value is not None and name in bound.signature.parameters
        }
        if self.kernel == "splitk_linear" and bound.arguments.get("squares") is not None:
            out = bound.arguments["out"]  # the output has one column for each block of columns
            columns = splitk_linear.blocks(out.shape[1], tile)
            bound.arguments["squares"] = torch.empty(
                len(out), columns, dtype=torch.float32, device=out.device
            )
        made = PREPARE[self.kernel](*bound.args, **bound.kwargs)
        return made if isinstance(made, list) else [made]

    @property
    def weight(self) -> Tensor | None:
        return self.given.arguments.get("weight")

    @property
    def result(self) -> Tensor:
        found = self.given.arguments
        return next(found[name] for name in ("out", "q", "k") if name in found and found[name].numel())

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the sizes by which ``tiles.default`` chooses a tile."""
        found = self.given.arguments
        if self.kernel == "packed_attention":
            (_, M, H, D), (_, P, KV, _) = found["q"].shape, found["kv"][0].shape
            return M * H // KV, P, 0 if found.get("own") is None else found["own"][0].shape[1], KV, D
        M, K = found["x"].shape
        N = len(found["weight"])
        if self.kernel == "qkv_rope":
            return M, N, K, found["q"].shape[-1]
        return M, N // 2 if self.kernel == "gated_mlp" else N, K


PREPARE = {name: importlib.import_module(f"sinew.engine.cuda.kernels.{name}").prepare for name in SWEPT}


def sweep(model: str, session: Session) -> None:
    """Emit a row for each problem of a chunk: the time of the tile in the table, and the fastest other tiles."""
    if not session.is_gpu:
        raise NotHere("tiles are timed on a GPU")
    _, made, sample = launched(model, session)
    with torch.inference_mode():
        with taken_down() as found:
            made.run(sample)
        room = Workspace(1 << 26, 1 << 16, session.device)
        with ThreadPoolExecutor(16, "compile") as pool:
            for problem in sorted(found.values(), key=lambda each: -each.runs):
                if session.left <= 0:
                    raise TimeoutError("the time limit ended before all problems were measured")
                session.emit(timed(problem, room, pool))


@contextmanager
def taken_down() -> Iterator[dict[Any, Problem]]:
    """Within the ``with`` block, record the arguments with which each kind of launch was prepared."""
    found: dict[Any, Problem] = {}

    def noting(name: str) -> Any:
        signature = inspect.signature(PREPARE[name])

        def prepare(*arguments: Any, **options: Any) -> Any:
            given = Problem(name, signature.bind(*arguments, **options))
            squares = given.given.arguments.get("squares") is not None
            found.setdefault((name, given.dims, squares), given).runs += 1
            return PREPARE[name](*arguments, **options)

        return prepare

    with ExitStack() as held:
        for name in SWEPT:
            module = importlib.import_module(f"sinew.engine.cuda.kernels.{name}")
            held.enter_context(mock.patch.object(module, "prepare", noting(name)))
        yield found


def timed(problem: Problem, room: Workspace, pool: ThreadPoolExecutor) -> Row:
    """Measure the time of a launch with each tile that fits, and return the fastest tiles as a row.

    Raises:
        ArithmeticError: A tile gives another result than the tile in the table.
    """
    weight = problem.weight
    own = problem.launches(own_tile(problem))[0].tile
    copies: list[Tensor | None] = [weight]
    if weight is not None:
        copies += [weight.clone() for _ in range(min(MOST - 1, COLD // weight.nbytes))]
    copies *= -(-FEWEST // len(copies))
    tried = [own, *(tile for tile in candidates(problem) if tile != own)]
    fits = pool.map(fit, [problem.launches(tile, None, room) for tile in tried])
    wanted, times = None, []
    for tile, good in zip(tried, fits, strict=True):
        if not good:
            continue
        for launch in problem.launches(tile, None, room):
            launch()
        found = problem.result.float()
        wanted = found.clone() if wanted is None else wanted
        off = float((found - wanted).norm() / wanted.norm())
        if not off <= SAME:
            raise ArithmeticError(f"{problem.kernel} {problem.dims}: {tile} differs by {off:.2g}")
        calls = [launch for each in copies for launch in problem.launches(tile, each, room)]
        ms = graph_ms(calls, 5)["min"] * (len(calls) / len(copies))
        times.append((1e3 * ms, tile))
    fastest = sorted(times, key=lambda pair: pair[0])[:BEST]
    return {
        "kernel": problem.kernel,
        "dims": str(problem.dims),
        "runs": problem.runs,
        "us": times[0][0],
        "tile": str(own),
        "fastest": [(us, str(tile)) for us, tile in fastest],
        "tried": len(times),
    }


def own_tile(problem: Problem) -> Tile:
    first = problem.given.arguments
    source = first["q"] if problem.kernel == "packed_attention" else first["weight"]
    return tiles.tile_for(problem.kernel, problem.dims, source.dtype, source.device)


def fit(launches: list[Launch]) -> bool:
    """Return True if the launches compile and the GPU has enough shared memory for them."""
    try:
        made = [launch.specialised().compile(90) for launch in launches]
    except Exception:  # noqa: BLE001 - a tile that does not compile is left out
        return False
    return all(each.metadata.shared <= SHARED_MEMORY for each in made)


@dataclass(frozen=True)
class Grid:
    """All combinations of these sizes of a tile."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...] = (64,)
    split: tuple[int, ...] = (1,)
    warps: tuple[int, ...] = (4,)
    stages: tuple[int, ...] = (4,)
    all: list[Tile] = field(init=False)

    def __post_init__(self) -> None:
        sizes = product(self.m, self.n, self.k, self.split, self.warps, self.stages)
        object.__setattr__(self, "all", [Tile(*size) for size in sizes])


GRIDS: dict[str, dict[str, Grid]] = {
    "splitk_linear": {
        "few": Grid((64,), (16, 32), (128, 256), (1, 2, 3, 4)),
        "some": Grid((64, 128), (32, 64), (64, 128), (1, 2)),
        "many": Grid((64, 128), (64, 128, 256), (64,), (1, 2), (4, 8), (3, 4)),
        "float32": Grid((16, 64), (16, 32), (64, 128), (1, 2, 4), stages=(2, 3)),
    },
    "qkv_rope": {
        "few": Grid((64,), (16, 32), (64, 128, 256), (1, 2), stages=(3, 4)),
        "some": Grid((64,), (16, 32), (64, 128), (1, 2)),
        "many": Grid((64, 128), (32, 64, 128), (64,), warps=(4, 8), stages=(3, 4)),
    },
    "gated_mlp": {
        "few": Grid((64,), (16, 32), (64, 128), stages=(4, 5)),
        "some": Grid((64,), (32, 64), (64, 128), stages=(3, 4)),
        "many": Grid((64, 128), (64, 128), (64,), warps=(4, 8), stages=(3, 4)),
    },
    "packed_attention": {
        "few": Grid((16, 32, 64), (32, 64), split=(4, 5, 6, 9, 17), warps=(4, 8), stages=(1, 2)),
        "narrow": Grid((16, 32), (32, 64, 128), split=(1, 2, 3, 4), stages=(1, 2)),
        "many": Grid((16, 32, 64, 128), (32, 64, 128), warps=(4, 8), stages=(1, 2)),
    },
    "norm_linear": {"float32": Grid((16, 64), (16, 32), (64, 128, 256), stages=(2, 3))},
}


def candidates(problem: Problem) -> list[Tile]:
    """Return the tiles to try: those for the size class of the problem in which every program has work."""
    weight, of_kernel = problem.weight, GRIDS[problem.kernel]
    wide = weight is not None and weight.dtype == torch.float32
    regime = "float32" if wide else tiles.regime(problem.kernel, problem.dims, of_kernel)
    grid = of_kernel.get(regime)
    return [tile for tile in grid.all if tiles.has_work(problem.kernel, problem.dims, tile)] if grid else []

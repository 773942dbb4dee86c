"""The four measurements that a first GPU session makes, because they steer the rest of the CUDA engine.

(a) fixed cost of a kernel in a graph, with and without programmatic dependent launch
(b) the head's skinny products at 64 rows: cuBLAS, these kernels, FP8
(c) the language model's gate/up product at 512, 768 and 968 rows: cuBLAS, this kernel, FP8
(d) PyTorch's attention against the packed one

``python benchmarks/gpu/kernels.py [--only a,b,c,d] [--out FILE]``. Needs torch, triton and a CUDA device,
no other dependency. Every kernel is checked against its reference before it is timed. Without a GPU it prints the
shapes, their rooflines and what is missing, and ends with status 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout is enough
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "packages" / "sinew-client" / "src"))

from benchmarks.gpu.shapes import Problem, arguments, cost, dims, launch, problems
from benchmarks.gpu.timing import graph_ms
from sinew.engine.cuda.kernels import KERNELS, tiles
from sinew.engine.cuda.kernels.lang import kernel, tl, triton, wait_for_input
from sinew.engine.cuda.kernels.launch import Launch, Tile

FLOPS, BANDWIDTH = 785e12, 4.30e12  # H200: measured ceilings that the rooflines are computed from
DEVICE = "cuda"
CHAIN = 1000  # kernels in a graph
HEAD_ROWS = 64
LANGUAGE_ROWS = (512, 768, 968)
STREAMED = 256 << 20  # bytes of weights to rotate through: several times any L2
TOLERANCE = 1e-2  # relative L2 in bfloat16
Row = dict[str, Any]


@kernel
def count_kernel(values, PDL: tl.constexpr):
    wait_for_input(PDL)
    at = values + tl.arange(0, 32)
    tl.store(at, tl.load(at) + 1.0)


def timed(what: str, launches: Sequence[Callable[[], Any]], replays: int, **facts: Any) -> Row:
    """One row of the table; ``flops`` and ``bytes`` among the facts become rates."""
    ms = graph_ms(launches, replays)
    row = {"what": what, "us": 1e3 * ms["p50"], "us_min": 1e3 * ms["min"], "us_max": 1e3 * ms["max"], **facts}
    if "flops" in facts:
        row["tflops"] = facts["flops"] / ms["p50"] / 1e9
    if "bytes" in facts:
        row["gb_s"] = facts["bytes"] / ms["p50"] / 1e6
    print(
        "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
    )
    return row


def fixed_cost(replays: int) -> Iterator[Row]:
    for pdl in (False, True):
        values = torch.zeros(32, device="cuda")
        count = Launch(count_kernel, (1,), {"values": values, "PDL": pdl}, Tile(warps=1, stages=1), pdl)
        row = timed(f"(a) chain of {CHAIN}, {'dependent' if pdl else 'plain'}", [count] * CHAIN, replays)
        torch.cuda.synchronize()
        expected = float(CHAIN * (replays + 4))  # once to compile, then every replay; capture runs nothing
        row["in_order"] = bool((values == expected).all())
        yield row
        assert row["in_order"], f"kernels overlapped: {values[0].item()} instead of {expected}"


def resized(problem: Problem, rows: int) -> Problem:
    return Problem(problem.model, problem.where, problem.kernel, problem.runs, problem.sizes | {"M": rows})


def checked(problem: Problem, tile: Tile | None, copies: int) -> list[Launch]:
    """Launches of a problem on ``copies`` sets of tensors, the first one compared with its reference."""
    made = []
    for index in range(copies):
        positional, options = arguments(problem, DEVICE)
        made.append(KERNELS[problem.kernel].prepare(*positional, **options, tile=tile))
        if index == 0:
            made[0]()
            compare(problem, positional, options)
    return made


def compare(problem: Problem, positional: list[Any], options: dict[str, Any]) -> None:
    """Raise unless what the kernel wrote is what its reference computes."""
    reference = KERNELS[problem.kernel].reference
    if problem.kernel == "qkv_rope":
        *inputs, q, k, v, _ = positional
        wanted = reference(*inputs, (q.shape[1], k.shape[1]), **options)
        got, want = (torch.cat([part.flatten(1) for part in parts], 1) for parts in ((q, k, v), wanted))
    else:
        inputs = {"packed_attention": 3, "fp8_product": 4}.get(problem.kernel, 2)  # then the output
        got, want = positional[inputs], reference(*positional[:inputs], **options)
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error <= TOLERANCE, f"{problem.name}: relative L2 error {error} against its reference"


def kernel_row(label: str, problem: Problem, replays: int) -> Iterator[Row]:
    """A problem with the tile that the engine takes; a row that says why where it does not run."""
    spent = cost(problem)
    copies = max(1, min(64, STREAMED // spent.bytes)) if problem.sizes.get("K") else 1
    gpu = torch.device("cuda", torch.cuda.current_device())
    tile = tiles.tile_for(problem.kernel, dims(problem), torch.bfloat16, gpu)
    facts = {"flops": spent.flops, "bytes": spent.bytes, "tile": asdict(tile)}
    try:
        yield timed(label, checked(problem, tile, copies), replays, **facts)
    except Exception as error:  # noqa: BLE001 - the other problems still count
        torch.cuda.synchronize()  # raises where the device answers nothing any more
        why = f"{type(error).__name__}: {error}"[:400]
        yield {"what": label, "error": f"{tile}: {why}", "wrong": isinstance(error, AssertionError)}


def products(rows: int, columns: int, depth: int, replays: int, label: str) -> Iterator[Row]:
    """The plain product in cuBLAS, and in FP8 with a scale per row."""
    flops, nbytes = 2 * rows * columns * depth, 2 * (rows * depth + columns * depth + rows * columns)
    copies = max(1, min(64, STREAMED // (2 * columns * depth)))
    weights = [torch.randn(columns, depth, device="cuda").bfloat16() for _ in range(copies)]
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    calls = [lambda w=w: torch.mm(x, w.T, out=out) for w in weights]
    yield timed(f"{label} torch.mm bf16", calls, replays, flops=flops, bytes=nbytes)
    if torch.cuda.get_device_capability() < (8, 9):
        return
    x8, scale_x = quantised(x)
    pairs = [quantised(w) for w in weights]
    fp8 = [partial(scaled_mm, x8, w, scale_x, s) for w, s in pairs]
    facts = {"flops": flops, "bytes": nbytes - (rows + columns) * depth}
    try:
        yield timed(f"{label} scaled_mm fp8", fp8, replays, **facts)
    except RuntimeError as error:
        yield {"what": f"{label} scaled_mm fp8", "error": str(error)[:300]}


def scaled_mm(x: Tensor, weight: Tensor, scale_x: Tensor, scale: Tensor) -> Tensor:
    """x, weight: e4m3 [M, K], [N, K]; scales: float32 [M, 1], [N, 1] -> bfloat16 [M, N], as the FP8 layers call it."""
    types = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(x, weight.T, scale_x, scale.T, **types)  # noqa: SLF001


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale per row: [R, K] -> e4m3 [R, K], float32 [R, 1]."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def by_name(name: str) -> Problem:
    return next(problem for problem in problems() if problem.name == name)


GIVEN = ", given"  # the form that all but the first layer ask for
HEAD = (
    ("qkv", f"pi0.5 head qkv{GIVEN}", 2560, 1024),
    ("qkv, scaled", "pi0.5 head qkv, scaled", 2560, 1024),
    ("o", "pi0.5 head o", 1024, 2048),
    ("gate up", f"pi0.5 head gate up{GIVEN}", 8192, 1024),
    ("gate up, scaled", "pi0.5 head gate up, scaled", 8192, 1024),
    ("down", "pi0.5 head down", 1024, 4096),
)


def skinny(replays: int) -> Iterator[Row]:
    for label, name, columns, depth in HEAD:
        yield from kernel_row(f"(b) {label} kernel", resized(by_name(name), HEAD_ROWS), replays)
        if name.endswith(", scaled"):
            continue
        yield from products(HEAD_ROWS, columns, depth, replays, f"(b) {label}")
        yield from narrow(f"(b) {label}", f"{name.removesuffix(GIVEN)}, fp8", HEAD_ROWS, replays)


def narrow(label: str, name: str, rows: int, replays: int) -> Iterator[Row]:
    """The FP8 kernel on a problem; nothing where the device has no such instructions."""
    if torch.cuda.get_device_capability() >= (8, 9):
        yield from kernel_row(f"{label} fp8 kernel", resized(by_name(name), rows), replays)


def gate_up(replays: int) -> Iterator[Row]:
    for count in LANGUAGE_ROWS:
        yield from products(count, 32768, 2048, replays, f"(c) {count} rows")
        problem = resized(by_name(f"pi0.5 language gate up{GIVEN}"), count)
        yield from kernel_row(f"(c) {count} rows kernel with norm and gelu", problem, replays)
        yield from narrow(f"(c) {count} rows", "pi0.5 language gate up, fp8", count, replays)


def attention(replays: int) -> Iterator[Row]:
    head, prefix = by_name("pi0.5 head attention"), by_name("pi0.5 language attention")
    shorter = Problem(head.model, head.where, head.kernel, head.runs, head.sizes | {"P": 550})
    for problem in (shorter, head, prefix):
        s = problem.sizes
        keys = s["P"] + s.get("S", 0)
        label = f"(d) {s['M']} x {s['H']} queries, {keys} keys"
        q = torch.randn(1, s["H"], s["M"], s["D"], device="cuda").bfloat16()
        k, v = (torch.randn(1, s["KV"], keys, s["D"], device="cuda").bfloat16() for _ in "kv")
        mask = torch.ones(1, 1, s["M"], keys, dtype=torch.bool, device="cuda")
        flat = q.view(1, 1, s["H"] * s["M"], s["D"])  # packed by hand, which a mask per query forbids
        spent = {"flops": cost(problem).flops}
        forms = {
            "SDPA grouped, mask": lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(
                q, k, v, m, enable_gqa=True
            ),
            "SDPA packed, no mask": lambda q=flat, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
        }
        for name, call in forms.items():
            yield timed(f"{label}, {name}", [call], replays, **spent)
        yield from kernel_row(f"{label}, packed kernel", problem, replays)


def ceilings(replays: int) -> list[Row]:
    """This device's own: a large product and a large copy."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
    out = torch.empty_like(a)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    few = max(3, replays // 10)
    return [
        timed("product 8192", [lambda: torch.mm(a, b, out=out)], few, flops=2 * 8192**3),
        timed("copy of 1 GiB", [lambda: to.copy_(source)], few, bytes=2 << 30),
    ]


def through_l2(problem: Problem) -> float:
    """Bytes that all programs of the sm_90 default read, each tensor as often as a program wants it.

    Weights come from memory once and then from the L2 cache; a narrow tile asks for the input again and again.
    """
    s = problem.sizes
    packed = problem.kernel == "packed_attention"
    dtype = torch.float32 if s.get("wide") else torch.bfloat16
    tile = tiles.default(problem.kernel, dims(problem), dtype, 90)
    if not packed and "K" not in s:
        return float(cost(problem).bytes)
    programs = math.prod(launch(problem, "meta", tile=tile).grid)
    if packed:
        return 2 * programs * s["D"] * (tile.m + 2 * (s["P"] + s.get("S", 0)) / tile.split)
    pair = 2 if problem.kernel in ("gated_mlp", "qkv_rope") else 1
    size = 1 if problem.kernel == "fp8_product" else 2  # bytes of an element
    return size * programs * (tile.m + pair * tile.n) * s["K"] / tile.split


def tables() -> None:
    """Work, rooflines and savings of the kernels' problems, from shapes and tiles alone."""
    heads = ("MFLOP", 9), ("MB", 7), ("MB L2", 7), ("us bound", 9), ("fewer", 6), ("MB spared", 10)
    print(f"{'problem':28} {'runs':>5} " + " ".join(f"{name:>{width}}" for name, width in heads))
    for problem in problems():
        c = cost(problem)
        numbers = c.flops / 1e6, c.bytes / 1e6, through_l2(problem) / 1e6, 1e6 * bound(problem)
        text = "{:9.1f} {:7.2f} {:7.1f} {:9.2f}".format(*numbers)
        print(f"{problem.name:28} {problem.runs:5} {text} {c.fewer:6} {c.spared / 1e6:10.2f}")
    print(f"\n{'per chunk':28} {'runs':>5} {'ms bound':>9} {'fewer':>6} {'MB spared':>10}")
    for key in dict.fromkeys((problem.model, problem.kernel) for problem in problems()):
        mine = [
            p
            for p in problems()
            if (p.model, p.kernel) == key and not p.where.endswith((", scaled", ", given", ", to fp8"))
        ]
        runs = sum(p.runs for p in mine)
        fewer, spared = (sum(p.runs * getattr(cost(p), what) for p in mine) for what in ("fewer", "spared"))
        total = sum(1e3 * p.runs * bound(p) for p in mine)
        print(f"{' '.join(key):28} {runs:5} {total:9.3f} {fewer:6} {spared / 1e6:10.1f}")
    print(
        f"bound: the larger of FLOP / {FLOPS:.3g} and bytes / {BANDWIDTH:.3g} (H200); computed, not measured"
    )


def bound(problem: Problem) -> float:
    """Seconds of one call that no implementation can undercut on the device of the ceilings."""
    c = cost(problem)
    peak = FLOPS * (2 if problem.kernel == "fp8_product" else 1)
    return max(c.flops / peak, c.bytes / BANDWIDTH)


def measurements(replays: int) -> dict[str, Callable[[], Iterator[Row]]]:
    """Return (a) to (d), each a call that yields its rows."""
    few = max(1, replays * 2 // 5)  # the products of (c) are long
    return {
        "a": lambda: fixed_cost(replays),
        "b": lambda: skinny(replays),
        "c": lambda: gate_up(few),
        "d": lambda: attention(replays),
    }


def missing() -> list[str]:
    found = []
    if triton is None:
        found.append("triton is not installed")
    if not torch.cuda.is_available():
        found.append(f"torch {torch.__version__} sees no CUDA device")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="a,b,c,d", help="which measurements, comma-separated")
    parser.add_argument("--replays", type=int, default=100, help="of each graph")
    parser.add_argument("--out", type=Path, help="also write the JSON document here")
    parser.add_argument("--tables", action="store_true", help="print shapes and rooflines, measure nothing")
    options = parser.parse_args()
    chosen, parts = options.only.split(","), measurements(options.replays)
    if unknown := set(chosen) - parts.keys():
        parser.error(f"--only: expected some of a, b, c, d, got {', '.join(sorted(unknown))}")
    if options.replays < 1:
        parser.error(f"--replays: expected 1 or more, got {options.replays}")
    lacking = missing()
    if options.tables or lacking:
        tables()
    if options.tables:
        return 0
    if lacking:
        print(f"nothing was measured: {'; '.join(lacking)}")
        return 1
    torch.manual_seed(0)
    rows = ceilings(options.replays)
    for name in chosen:
        rows += parts[name]()
    document = {
        "gpu": torch.cuda.get_device_name(0),
        "capability": torch.cuda.get_device_capability(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": sys.argv,
        "rows": rows,
    }
    text = json.dumps(document, default=str)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

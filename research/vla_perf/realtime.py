"""The lower bound of "Running VLAs at Real-time Speed" (arXiv 2510.26742) for pi0 on an RTX 4090, computed.

Its products by hand, as its table 2 counts them: the views of an observation attend to each other in the vision tower,
the last language layer projects queries that nobody reads, and all is bfloat16. Attention is two products. What the
traced program does instead is ``sinew perf run pi0 --traffic weights --operators``. Times that were measured there stay
what they are; sums of them are added up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MACS = 91.4e12  # bfloat16 multiply-adds per second of their card at 2.79 GHz
BANDWIDTH = 1.01e12  # bytes per second
MEASURED_MS = {1: 20.0, 2: 27.3, 3: 36.8}  # table 1, their implementation, by views
PATCHES, ROWS, STEPS = 256, 64, 10  # tokens per view; of a chunk of 63 and the state; solver steps
AE_RUNS, FRAMES_HZ = 16, 30  # action experts beside one frame of the camera, section 6.1
COLUMNS = ("cuBLAS", "Triton", "actual")
PARTS = ("vision", "language", "head")


@dataclass(frozen=True, slots=True)
class PrintedProduct:
    """``times`` products of N x K by K x M. heads: above 0 for attention, each of them two products of that size."""

    part: str
    times: int
    rows: int
    depth: int
    columns: int
    heads: int = 0

    @property
    def name(self) -> str:
        sizes: tuple[int, ...] = (self.rows, self.depth, self.columns)
        if self.heads:
            sizes = (self.heads, self.rows, self.columns, self.depth)
        called = "attention " if self.heads else ""
        return f"{self.part} {self.times} x {called}{'x'.join(map(str, sizes))}"

    @property
    def launches(self) -> int:
        return self.times * (2 if self.heads else 1)

    @property
    def compute_s(self) -> float:
        return self.launches * max(1, self.heads) * self.rows * self.depth * self.columns / MACS

    @property
    def memory_s(self) -> float:
        """Seconds of reading the second matrix, in two bytes per number; attention's is on the chip (section 5.1)."""
        return 0.0 if self.heads else self.times * 2 * self.depth * self.columns / BANDWIDTH

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)


def products(views: int) -> list[PrintedProduct]:
    """Table 2 for a number of views, its chunk of 63 and no prompt."""
    n, keys, heads = PATCHES * views, PATCHES * views + ROWS, 8 * ROWS
    steps, layers = STEPS, 18 * STEPS
    return [
        PrintedProduct("vision", 1, n, 588, 1152),
        PrintedProduct("vision", 27, n, 1152, 3456),
        PrintedProduct("vision", 27, n, 72, n, heads=16),
        PrintedProduct("vision", 27, n, 1152, 1152),
        PrintedProduct("vision", 27, n, 1152, 4304),
        PrintedProduct("vision", 27, n, 4304, 1152),
        PrintedProduct("language", 1, n, 1152, 2048),
        PrintedProduct("language", 18, n, 2048, 2560),
        PrintedProduct("language", 17, n, 256, n, heads=8),
        PrintedProduct("language", 17, n, 2048, 2048),
        PrintedProduct("language", 17, n, 2048, 32768),
        PrintedProduct("language", 17, n, 16384, 2048),
        PrintedProduct("head", 1, 1, 32, 1024),
        PrintedProduct("head", steps, ROWS - 1, 32, 1024),
        PrintedProduct("head", steps, ROWS - 1, 1024, 1024),
        PrintedProduct("head", layers, ROWS, 1024, 2560),
        PrintedProduct("head", layers, heads, 256, keys),
        PrintedProduct("head", layers, heads, keys, 256),
        PrintedProduct("head", layers, ROWS, 2048, 1024),
        PrintedProduct("head", layers, ROWS, 1024, 8192),
        PrintedProduct("head", layers, ROWS, 4096, 1024),
        PrintedProduct("head", steps, ROWS - 1, 1024, 32),
    ]


def bound_s(views: int) -> float:
    return sum(product.seconds for product in products(views))


def numbers(given: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """(where, quantity) -> value, of all that follows from something. given: what was measured, by the same names."""
    return {(where, quantity): value for where, quantity, value in _computed(given)}


def _computed(given: Mapping[tuple[str, str], float]) -> Iterator[tuple[str, str, float]]:
    rows = products(2)
    for row in rows:
        yield "T2", f"{row.name} roofline ms", 1e3 * row.seconds
    for part in (*PARTS, "all"):
        own = [row for row in rows if part in (row.part, "all")]
        yield "T2", f"sum {part} roofline ms", 1e3 * sum(row.seconds for row in own)
        for column in COLUMNS:
            listed = ((("T2", f"{row.name} {name} ms") for name in (column, "actual")) for row in own)
            # Attention was not tried by itself: its columns have the actual time.
            yield (
                "T2",
                f"sum {part} {column} ms",
                sum(given.get(first, given[last]) for first, last in listed),
            )
    yield "5.2", "matrix products", sum(row.launches for row in rows)
    baseline = given["T3", "fused, no sync ms"]
    for setting in ("Pytorch", "CUDA graph", "software barrier", "fused, no sync"):
        yield "T3", f"{setting} overhead ms", given["T3", f"{setting} ms"] - baseline
    wait = given["T3", "software barrier overhead ms"]
    for views, measured in MEASURED_MS.items():
        bound = 1e3 * bound_s(views)
        yield "5.1", f"bound {views} view ms", bound
        yield "5.2", f"bound with synchronisation {views} view ms", bound + wait
        yield "5.2", f"room that is left {views} view %", 100 * (1 - (bound + wait) / measured)
    yield "6.1", "VLM runs Hz", FRAMES_HZ
    yield "6.1", "AE runs Hz", AE_RUNS * FRAMES_HZ

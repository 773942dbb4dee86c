"""The measured times of the engines for one bundle on this machine. ``backend.choose`` uses them to choose an engine.

The folder of :mod:`sinew.engine.prepared` has one JSON file per bundle (by fingerprint), kind of device, precision and
number of threads. A file is valid for the same versions on the same hardware only, and contains two measurements:

* **chunks**: seconds of a whole chunk, measured by ``sinew prepare`` or in the background of ``sinew serve``.
* **products**: seconds of one small product, which :func:`sinew.engine.backend.choose` measures at once, because the
  same instruction set is fast on one CPU and slow on another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sinew_client.untrusted import read_json

from sinew.core import machine
from sinew.engine.fingerprint import fingerprint
from sinew.engine.prepared import conditions, folder

# An engine replaces an engine that comes earlier in ORDER only if its chunks are at least this many times as fast.
MARGIN = 1.05
PRODUCT_MARGIN = 1.5  # the ratio for small products; it is larger because a product is only a part of a chunk
TRIES = 10  # number of measurements of each small product
# The small product multiplies activations [ROWS, WIDTH] by a weight [WIDTH, WIDTH]. This takes 75 million
# multiplications and additions.
ROWS, WIDTH = 64, 768
MAX_RECORD = 1 << 16  # largest accepted size of a file in bytes
CHUNKS = "of a chunk"
PRODUCTS = "of a small product"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions under which the measured times of engines are valid on this machine.

    Attributes:
        bundle: The bundle's file.
        device: The device that the engines compute on, such as "cpu" or "cuda:0".
        precision: The precision that was requested: "fp32", "bf16", "fp16" or "native".
        threads: Number of threads.
        recipe: False if the bundle's quantisation recipe is ignored.
    """

    bundle: Path
    device: str
    precision: str
    threads: int = 1
    recipe: bool = True

    @property
    def path(self) -> Path:
        """Return the path of the JSON file that stores times for these conditions."""
        kind = self.device.partition(":")[0]
        words = [fingerprint(self.bundle)[:16], "times", kind, self.precision, str(self.threads)]
        return folder() / f"{'-'.join([*words, *([] if self.recipe else ['ignored'])])}.json"


@dataclass(frozen=True, slots=True)
class Times:
    """The measured seconds of each engine. The engines were measured alternately, so their times can be compared.

    Attributes:
        chunks: For each engine, the seconds for a whole chunk. On a CPU with one thread, these are seconds of processor
            time.
        products: For each engine, the seconds for one small matrix product on a CPU.
        unit: The unit of the chunks' times in messages: "processor ms" or "ms".
        note: The reason why the measurement of the chunks is less exact, or "".
        threads: Number of threads that the chunks were measured with.
    """

    chunks: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    unit: str = "processor ms"
    note: str = ""
    threads: int = 1

    def of(self, *engines: str) -> tuple[str, Mapping[str, float]] | None:
        """Return the best measurement that contains all of these engines: its name, and the seconds of each engine;
        None if no measurement contains all of them.
        """
        for what, seconds in ((CHUNKS, self.chunks), (PRODUCTS, self.products)):
            if seconds.keys() >= {*engines}:
                return what, seconds
        return None

    def faster(self, engine: str, than: str, margin: float = MARGIN) -> bool:
        """Return True if ``engine`` was measured to be faster than another engine. False without a measurement.

        Args:
            engine: The engine.
            than: The other engine.
            margin: The smallest ratio of the two times that counts as faster, if chunks were measured.
        """
        best = self.of(engine, than)
        if best is None:
            return False
        what, seconds = best
        return seconds[engine] * (margin if what == CHUNKS else PRODUCT_MARGIN) < seconds[than]

    def text(self, engine: str, others: set[str]) -> str:
        """Return a text with the measured times of ``engine`` and of the engines ``others``; "" without a
        measurement.
        """
        for what, seconds in ((CHUNKS, self.chunks), (PRODUCTS, self.products)):
            shown = {name: took for name, took in seconds.items() if name in {engine, *others}}
            if engine in shown and len(shown) > 1:
                return self._words(what, shown)
        return ""

    def _words(self, what: str, seconds: Mapping[str, float]) -> str:
        unit = self.unit if what == CHUNKS else "ms"
        where = f"{unit} {what}, measured on this machine"
        if self.threads != 1 and what == CHUNKS:
            where += f" with {self.threads} threads"
        listing = ", ".join(f"{name} {1e3 * took:.3g}" for name, took in seconds.items())
        return f"{where}: {listing}" + (f" ({self.note})" if self.note and what == CHUNKS else "")


def stored(under: Conditions) -> Times:
    """Return the stored times for these conditions, these versions and this hardware. Without a measurement, the result
    has no times.

    If the chunks were measured with one thread only, those times are used for another number of threads.
    """
    times = _read(under)
    if under.threads != 1 and not times.chunks:
        one = _read(replace(under, threads=1))
        times = replace(times, chunks=one.chunks, unit=one.unit, note=one.note, threads=1)
    return times


def _read(under: Conditions) -> Times:
    try:
        record = read_json(under.path, MAX_RECORD)
        if any(record[name] != present for name, present in conditions(under.device).items()):
            return Times(threads=under.threads)
        chunks, products = (_seconds(record[name]) for name in ("chunks", "products"))
        unit = "processor ms" if record["unit"] == "processor ms" else "ms"
        return Times(chunks, products, unit, str(record["note"])[:300], under.threads)
    except Exception:  # noqa: BLE001 - no file, a damaged file, or a device that is not there: nothing was measured
        return Times(threads=under.threads)


def _seconds(record: Mapping[str, Any]) -> dict[str, float]:
    seconds = {str(name): float(took) for name, took in record.items()}
    if not all(0 < took < math.inf for took in seconds.values()):
        raise ValueError("times: expected positive numbers of seconds")
    return seconds


def store(under: Conditions, **changes: Any) -> Times:
    """Write measured times, and return all times for these conditions.

    Args:
        under: The conditions.
        **changes: New values for attributes of :class:`Times`. The other attributes stay unchanged.

    Raises:
        OSError: The file cannot be written.
    """
    times = replace(_read(under), threads=under.threads, **changes)
    record = json.dumps({**asdict(times), **conditions(under.device)}, indent=2) + "\n"
    machine.write_whole(under.path, record.encode())
    return times


def add(under: Conditions, engine: str, chunks: Mapping[str, float], **changes: Any) -> Times:
    """Write the seconds of chunks, and keep the stored seconds of the engines that were not measured again.

    The stored seconds are multiplied by the ratio of the new to the stored seconds of ``engine``, with which all
    engines were compared.

    Args:
        under: The conditions.
        engine: The engine with which the others were compared.
        chunks: For each engine that was measured, the seconds of a chunk. They contain ``engine``.
        **changes: New values for other attributes of :class:`Times`.

    Raises:
        OSError: The file cannot be written.
    """
    before = _read(under).chunks
    others = {name: took for name, took in before.items() if name not in chunks} if engine in before else {}
    scaled = {name: took * chunks[engine] / before[engine] for name, took in others.items()}
    return store(under, chunks={**chunks, **scaled}, **changes)


def time_products(products: Mapping[str, Callable[[], object]], threads: int) -> dict[str, float]:
    """Return the seconds that each engine's small matrix product takes.

    The products are measured alternately. The result is the shortest of :data:`TRIES` times.

    Args:
        products: For each engine, a function that computes the engine's small product.
        threads: Number of threads of PyTorch and of the compiled kernels.
    """
    import time

    import torch

    before = torch.get_num_threads()
    best = dict.fromkeys(products, math.inf)
    torch.set_num_threads(threads)
    try:
        for attempt in range(TRIES + 1):
            for name, product in products.items():
                begin = time.perf_counter()
                product()
                if attempt:  # the first call also allocates memory, so its time does not count
                    best[name] = min(best[name], time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return best

"""Find by trying how many threads a policy computes fastest with.

Threads that wait for each other either sleep, and waking them costs tens of microseconds per matrix product, or spin,
and lose everything once another program wants a core. A policy of a few million parameters spends less on a product
than on waking a thread for it, so one thread computes it faster; a large one gains from every core. docs/log has
the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 3
TOO_LONG_S = 1.0  # an inference of this length gains from all cores, and trying would cost seconds


def tune_threads(
    infer: Callable[[], object], set_threads: Callable[[int], None], many: int
) -> tuple[int, str]:
    """Leave the faster of ``many`` threads and one set, and say why. Call where inference will run: pools of threads
    belong to the thread that uses them. ``infer`` must have run before."""
    if many == 1:
        return 1, "this process may use one"
    set_threads(many)
    first = _seconds(infer)
    if first > TOO_LONG_S:
        return many, f"one per core; an inference takes {first:.1f} s"
    shared = min(first, *(_seconds(infer) for _ in range(TRIES - 1)))
    set_threads(1)
    alone = min(_seconds(infer) for _ in range(TRIES))
    found = f"measured: {1e3 * alone:.1f} ms with 1, {1e3 * shared:.1f} ms with {many}"
    if alone <= shared:
        return 1, found
    set_threads(many)
    return many, found


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin

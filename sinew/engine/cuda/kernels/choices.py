"""Choice between implementations of a problem: the fastest measured on this device, with the reason.

A choice holds for one device, one version of torch and Triton, and one text of the kernel. It is kept beside the
tuned tiles, in ``$XDG_CACHE_HOME/sinew/choices/<device>.json``. Without a measurement the caller's default
is taken and the reason says so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sinew.engine.cuda.kernels import tuning

log = logging.getLogger(__name__)
WHAT = "measured choices"
UNMEASURED = "default: not measured on this device"
NO_TILE = "no tile does: "


def pick(
    kernel: str,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    ways: Mapping[str, Callable[[], Any]],
    measure: Callable[[Callable[[], Any]], float],
    unusable: str = "",
) -> dict[str, Any]:
    """Time each of ``ways`` (milliseconds), keep the fastest on disk, return its entry.

    A way that raises is out, and the entry says why; that none works is an error. unusable: why the way that would be
    the default is not among them, which the reason then begins with.
    """
    return pick_named(key(kernel, dims, dtype), device, ways, measure, unusable=unusable)


def pick_named(
    name: str,
    device: torch.device,
    ways: Mapping[str, Callable[[], Any]],
    measure: Callable[[Callable[[], Any]], float],
    *,
    margin: float = 0.0,
    unusable: str = "",
) -> dict[str, Any]:
    """As :func:`pick`, under a key of the caller's own (:func:`key_of`). margin: part of its time by which the first
    way has to be beaten."""
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for way, call in ways.items():
        try:
            times[way] = measure(call)
        except Exception as error:  # noqa: BLE001 - another library's; it is recorded and shown
            failed[way] = f"{type(error).__name__}: {error}"[:300]
            log.info("%s: %s does not run: %s", name, way, failed[way])
    if not times:
        raise RuntimeError(f"{name}: nothing runs on {device}: {failed}")
    best = min(times, key=lambda way: times[way])
    first = next(iter(times))
    if times[best] > (1 - margin) * times[first]:
        best = first
    others = [f"{way} {ms:.4f} ms" for way, ms in times.items() if way != best]
    others += [f"{way} does not run" for way in failed]
    reason = f"measured: {best} {times[best]:.4f} ms" + (f", {', '.join(others)}" if others else "")
    if unusable:
        reason = f"{NO_TILE}{unusable}; {reason}"[:1000]
    entry = {"way": best, "reason": reason, "ms": times, "failed": failed}
    path = cache_file(device)
    tuning.write_json(path, tuning.read_json(path, WHAT, _is_entry) | {name: entry})
    choose.cache_clear()
    return entry


@lru_cache(maxsize=4096)
def choose(
    kernel: str, dims: tuple[int, ...], dtype: torch.dtype, device: torch.device, default: str
) -> tuple[str, str]:
    """(way, why it was chosen)."""
    return choose_named(key(kernel, dims, dtype), device, default)


def choose_named(name: str, device: torch.device, default: str) -> tuple[str, str]:
    """As :func:`choose`, of :func:`pick_named`'s; the file is read each time."""
    if device.type != "cuda":
        return default, "default: no GPU"
    entry = tuning.read_json(cache_file(device), WHAT, _is_entry).get(name)
    if entry is None:
        return default, UNMEASURED
    return entry["way"], entry["reason"]


def key(kernel: str, dims: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{tuning.key(kernel, dims, dtype)}/{_library()}"


def key_of(name: str, *facts: object) -> str:
    """Return the key of a choice that depends on these facts and on the text of every kernel."""
    from sinew.engine.cuda.kernels import KERNELS

    text = "\n".join([*map(str, facts), *(tuning.digest(kernel) for kernel in sorted(KERNELS))])
    return f"{name}/{hashlib.sha256(text.encode()).hexdigest()[:12]}/{_library()}"


def _library() -> str:
    """Return the version of the library that competes."""
    return hashlib.sha256(torch.__version__.encode()).hexdigest()[:8]


def cache_file(device: torch.device) -> Path:
    tiles = tuning.cache_file(device)
    return tiles.parents[1] / "choices" / tiles.name


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("ms"), dict):
        return False
    return isinstance(entry.get("reason"), str) and entry.get("way") in entry["ms"]

"""Which of several implementations a problem gets: the fastest measured on this device, with the reason.

A choice holds for one device, one version of torch and Triton, and one text of the kernel. It is kept beside the
tuned tiles, in ``$XDG_CACHE_HOME/sinew/choices/<device>.json``. Without a measurement the caller's default
is taken and the reason says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sinew.engine.kernels import tuning

log = logging.getLogger(__name__)


def pick(
    kernel: str,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    ways: Mapping[str, Callable[[], Any]],
    measure: Callable[[Callable[[], Any]], float],
) -> dict[str, Any]:
    """Time each of ``ways`` (milliseconds), keep the fastest on disk, return its entry.

    A way that raises is out, and the entry says why; that none works is an error.
    """
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, way in ways.items():
        try:
            times[name] = measure(way)
        except Exception as error:  # noqa: BLE001 - another library's; it is recorded and shown
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            log.info("%s %s: %s does not run: %s", kernel, dims, name, failed[name])
    if not times:
        raise RuntimeError(f"{kernel} {dims}: nothing runs on {device}: {failed}")
    best = min(times, key=lambda name: times[name])
    others = [f"{name} {ms:.4f} ms" for name, ms in times.items() if name != best]
    others += [f"{name} does not run" for name in failed]
    reason = f"measured: {best} {times[best]:.4f} ms" + (f", {', '.join(others)}" if others else "")
    entry = {"way": best, "reason": reason, "ms": times, "failed": failed}
    path = cache_file(device)
    tuning.write_json(path, _read(path) | {key(kernel, dims, dtype): entry})
    choose.cache_clear()
    return entry


@lru_cache(maxsize=4096)
def choose(
    kernel: str, dims: tuple[int, ...], dtype: torch.dtype, device: torch.device, default: str
) -> tuple[str, str]:
    """(way, why it was chosen)."""
    if device.type != "cuda":
        return default, "default: no GPU"
    entry = _read(cache_file(device)).get(key(kernel, dims, dtype))
    if entry is None:
        return default, "default: not measured on this device"
    return entry["way"], entry["reason"]


def key(kernel: str, dims: tuple[int, ...], dtype: torch.dtype) -> str:
    version = hashlib.sha256(torch.__version__.encode()).hexdigest()[:8]  # of the library that competes
    return f"{tuning.key(kernel, dims, dtype)}/{version}"


def cache_file(device: torch.device) -> Path:
    tiles = tuning.cache_file(device)
    return tiles.parents[1] / "choices" / tiles.name


def _read(path: Path) -> dict[str, Any]:
    """The entries of a file, those that are none left out with a warning."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries = {name: entry for name, entry in found.items() if _is_entry(entry)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("measured choices: %s is not readable (%s); the defaults are used", path, error)
        return {}
    if len(entries) < len(found):
        log.warning("measured choices: %d entries of %s are malformed", len(found) - len(entries), path)
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("ms"), dict):
        return False
    return isinstance(entry.get("reason"), str) and entry.get("way") in entry["ms"]

"""Tile of a launch: the tuned one of this device if it is on disk, else the first of the table.

A tuned choice holds for one device, one version of Triton and one text of the kernel; the file of a device is
``$XDG_CACHE_HOME/sinew/tiles/<device>.json`` (``~/.cache`` by default). Without a GPU nothing is read, so that
tests and compile checks see the same tiles everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sinew.engine.cuda.kernels.lang import source_of, triton
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import LARGEST_SPLIT, candidates

log = logging.getLogger(__name__)
WHAT = "tuned tiles"
NO_GPU = 80  # whose defaults stand in where there is no GPU
LIMITS = {"m": 256, "n": 1024, "k": 1024, "split": LARGEST_SPLIT, "warps": 16, "stages": 8}
Dims = tuple[int, ...]  # the first one counts rows, except of preprocess
Prepare = Callable[[Tile], Launch]
Measure = Callable[[Launch], float]  # milliseconds


class NoTile(RuntimeError):  # noqa: N818 - reads as what it says
    """Every tile of a problem failed, or computes something else; the text says which and why."""


def tile_for(kernel: str, dims: Dims, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile for a problem, decided once per process."""
    return choose(kernel, dims, dtype, device)[0]


@lru_cache(maxsize=4096)
def choose(kernel: str, dims: Dims, dtype: torch.dtype, device: torch.device) -> tuple[Tile, str]:
    """(tile, why it was chosen)."""
    default = _offered(kernel, dims, dtype, device)[0]
    if device.type != "cuda":
        return default, "default: no GPU"
    entry = read_json(cache_file(device), WHAT, _is_entry).get(key(kernel, dims, dtype))
    if entry is None:
        return default, "default: not tuned on this device"
    if (tile := Tile(**entry["tile"])).cooperative and tile not in _offered(kernel, dims, dtype, device):
        return (
            default,
            f"default: the tuned tile is not offered with {multiprocessors(device)} multiprocessors",
        )
    return tile, f"tuned: {entry['ms']:.4f} ms, default {entry['default_ms']:.4f} ms"


def tune(
    kernel: str, dims: Dims, dtype: torch.dtype, device: torch.device, prepare: Prepare, measure: Measure
) -> dict[str, Any]:
    """Time every candidate for a problem, keep the fastest on disk, return its entry.

    prepare: tile -> launch on tensors that the caller owns; measure: its milliseconds. A candidate for which either
    raises, because it does not fit the device or computes something else, is left out, and ``failed`` of the entry
    says why. Raises :class:`NoTile` where none is left, and whatever a device says that answers nothing any more.
    """
    times: dict[Tile, float] = {}
    failed: list[str] = []
    offered = _offered(kernel, dims, dtype, device)
    for tile in offered:
        try:
            times[tile] = measure(prepare(tile))
        except Exception as error:  # noqa: BLE001 - the other tiles still count
            fits = type(error).__name__ != "OutOfResources"  # Triton's; not importable where triton is not
            if fits and device.type == "cuda":
                torch.cuda.synchronize(device)  # raises again what an illegal access left in the context
            failed.append(f"{tile}: {type(error).__name__}: {error}"[:300])
            log.info("%s %s: left out: %s", kernel, dims, failed[-1])
    if not times:
        raise NoTile(f"{kernel} {dims}: no tile does on {device}: {'; '.join(failed)}")
    best = min(times, key=lambda tile: times[tile])
    default = times.get(offered[0], times[best])
    entry = {"tile": asdict(best), "ms": times[best], "default_ms": default, "failed": failed}
    path = cache_file(device)
    write_json(path, read_json(path, WHAT, _is_entry) | {key(kernel, dims, dtype): entry})
    choose.cache_clear()
    return entry


def tuned(device: torch.device) -> int:
    """Problems whose tiles were tuned on this device, for the kernels as they are."""
    from sinew.engine.cuda.kernels import KERNELS

    names = [name.split("/") for name in read_json(cache_file(device), WHAT, _is_entry)]
    return sum(kernel in KERNELS and rest[-1:] == [digest(kernel)] for kernel, *rest in names)


def key(kernel: str, dims: Sequence[int], dtype: torch.dtype) -> str:
    return f"{kernel}/{'x'.join(map(str, dims))}/{str(dtype).removeprefix('torch.')}/{digest(kernel)}"


def capability(device: torch.device) -> int:
    if device.type != "cuda":
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def multiprocessors(device: torch.device) -> int | None:
    """Return how many programs run at once, each on a multiprocessor of its own; None where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None


def _offered(kernel: str, dims: Dims, dtype: torch.dtype, device: torch.device) -> list[Tile]:
    return candidates(kernel, dims, dtype, capability(device), multiprocessors(device))


def cache_file(device: torch.device) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return Path(base) / "sinew" / "tiles" / f"{name.lower().replace(' ', '-').replace('/', '-')}.json"


@lru_cache
def digest(kernel: str) -> str:
    """Hash what a tuned time depends on besides the problem: Triton's version and the kernel's text."""
    from sinew.engine.cuda.kernels import KERNELS, fp8_quantize, lang, norm_linear, rope

    version = "none" if triton is None else triton.__version__
    # The files with helpers of several kernels.
    shared = (lang.dot, norm_linear.given_squares, fp8_quantize.to_e4m3, rope.write_turned)
    text = "\n".join(source_of(each) for each in (KERNELS[kernel].kernel, *shared))
    return hashlib.sha256(f"{version}\n{text}".encode()).hexdigest()[:12]


def read_json(path: Path, what: str, is_entry: Callable[[Any], bool]) -> dict[str, Any]:
    """The entries of a file, those that are none left out with a warning. what: they are, for people."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries = {name: entry for name, entry in found.items() if is_entry(entry)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s: %s is not readable (%s); the defaults are used", what, path, error)
        return {}
    if len(entries) < len(found):
        log.warning("%s: %d entries of %s are malformed", what, len(found) - len(entries), path)
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("tile"), dict):
        return False
    tile, times = entry["tile"], (entry.get("ms"), entry.get("default_ms"))
    fields = tile.keys() == {*LIMITS, "cooperative"} and type(tile["cooperative"]) is bool
    sizes = fields and all(
        type(tile[name]) is int and 1 <= tile[name] <= limit for name, limit in LIMITS.items()
    )
    return sizes and all(isinstance(ms, (int, float)) for ms in times)


def write_json(path: Path, entries: dict[str, Any]) -> None:
    """In one step, so that another process reads the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=1, sort_keys=True)
    os.replace(name, path)

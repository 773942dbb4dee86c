"""Findings of ``sinew prepare``: a faster form of a bundle was made, verified and measured on this machine.

One JSON file per bundle (by fingerprint) and engine in ``$XDG_CACHE_HOME/sinew/prepared`` (``~/.cache`` by default).
A finding of other versions, other hardware or compared with another engine is ignored: it is made again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sinew_client.untrusted import read_json

from sinew import __version__
from sinew.core import machine
from sinew.engine import proofs
from sinew.engine.fingerprint import fingerprint

LIBRARIES = ("torch", "onnxruntime", "onnxscript", "onnx", "numpy")  # what makes, runs and measures the forms


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """engine: that was prepared. against: what runs the bundle without it. taken: it is faster here, and proved. why:
    in a sentence. seconds: of a chunk by engine, as measured, processor time on a CPU; empty where it did not come to
    that. device: where. threads: that computed.
    """

    engine: str
    against: str
    taken: bool
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1

    def keep(self, bundle: Path) -> Path:
        """Write it down for the next start. Raises OSError."""
        record = json.dumps({**asdict(self), **conditions(self.device)}, indent=2) + "\n"
        return machine.write_whole(_path(bundle, self.engine, self.threads), record.encode())


def folder() -> Path:
    return machine.cache_folder("prepared")


def lock_of(bundle: Path, engine: str) -> Path:
    """Return the file that is held by the process that prepares a bundle for an engine."""
    return _path(bundle, engine).with_suffix(".lock")


def kept(bundle: Path, engine: str, threads: int | None = None) -> EngineFinding | None:
    """Return the finding about an engine for a bundle, by these versions on this hardware; None without one."""
    threads = threads or 1
    try:
        record = read_json(_path(bundle, engine, threads))
        device = str(record["device"])
        if any(record[name] != wanted for name, wanted in conditions(device).items()):
            return None
        seconds = {str(name): float(took) for name, took in record["seconds"].items()}
        if (
            not all(0 < took < math.inf for took in seconds.values())
            or record["engine"] != engine
            or record["threads"] != threads
        ):
            return None
        against, why = str(record["against"]), str(record["why"])[:1000]
        return EngineFinding(engine, against, record["taken"] is True, why, seconds, device, threads)
    except Exception:  # noqa: BLE001 - a damaged record, or a device that is not there: none
        return None


def forget(bundle: Path, engine: str, threads: int | None = None) -> None:
    """Remove what was found, so that the next start tries again."""
    with contextlib.suppress(OSError):
        _path(bundle, engine, threads or 1).unlink()


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def conditions(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that a finding or a measurement counts for, ready for JSON."""
    return {"sinew": __version__, "libraries": _versions(), "hardware": proofs.hardware(device)}


def _path(bundle: Path, engine: str, threads: int = 1) -> Path:
    return folder() / f"{fingerprint(bundle)[:16]}-{engine}-{threads}.json"

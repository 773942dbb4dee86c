"""Store the results of ``sinew prepare``, which prepares, verifies and measures a faster engine for a bundle.

The folder ``$XDG_CACHE_HOME/sinew/prepared`` (``~/.cache`` by default) has one JSON file per bundle (by fingerprint)
and engine. A result for other versions, for other hardware, or in comparison with another engine is ignored. Then the
engine is prepared again.
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

# A stored result is valid only for the same versions of these libraries, because they make, run and measure the
# prepared engine.
LIBRARIES = ("torch", "onnxruntime", "onnxscript", "onnx", "numpy")


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """The result of the preparation of one engine for a bundle.

    Attributes:
        engine: The engine that was prepared.
        against: The engine that runs the bundle without the preparation.
        taken: True if the prepared engine is verified, and is faster than ``against`` on this machine.
        why: The reason, as a sentence without times. ``EngineChoice.times`` states the times of all engines.
        seconds: For each engine, the measured seconds for a chunk. On a CPU, processor seconds. Empty if no chunk was
            measured.
        device: The device.
        threads: The number of threads that computed.
    """

    engine: str
    against: str
    taken: bool
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1

    @classmethod
    def parse(cls, record: Mapping[str, Any], device: str, threads: int) -> EngineFinding:
        """Decode a stored or printed result, which may be damaged.

        Args:
            record: The result as a dict.
            device: The device of the preparation.
            threads: The number of threads of the preparation.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has another type.
            ValueError: A number is not valid.
        """
        seconds = {str(name): float(took) for name, took in dict(record["seconds"]).items()}
        if not all(0 < took < math.inf for took in seconds.values()):
            raise ValueError("seconds: expected positive numbers")
        engine, against, why = (str(record[name]) for name in ("engine", "against", "why"))
        return cls(engine, against, record["taken"] is True, why[:1000], seconds, device, threads)

    def keep(self, bundle: Path) -> Path:
        """Write the result of the preparation to a file, for the next start of Sinew.

        Raises:
            OSError: The file cannot be written.
        """
        record = json.dumps({**asdict(self), **conditions(self.device)}, indent=2) + "\n"
        return machine.write_whole(_path(bundle, self.engine, self.threads), record.encode())


def folder() -> Path:
    return machine.cache_folder("prepared")


def lock_of(bundle: Path, engine: str) -> Path:
    """Return the path of the lock file for the preparation of a bundle for an engine."""
    return _path(bundle, engine).with_suffix(".lock")


def kept(bundle: Path, engine: str, threads: int | None = None) -> EngineFinding | None:
    """Return the stored result of ``sinew prepare`` for a bundle and an engine; None if there is none for these
    versions and this hardware.
    """
    threads = threads or 1
    try:
        record = read_json(_path(bundle, engine, threads))
        device = str(record["device"])
        if any(record[name] != expected for name, expected in conditions(device).items()):
            return None
        finding = EngineFinding.parse(record, device, threads)
        return finding if finding.engine == engine and record["threads"] == threads else None
    except Exception:  # noqa: BLE001 - a damaged record, or a device that is not there: no finding
        return None


def forget(bundle: Path, engine: str, threads: int | None = None) -> None:
    """Remove the stored result for an engine, so that the next start prepares the engine again."""
    with contextlib.suppress(OSError):
        _path(bundle, engine, threads or 1).unlink()


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def conditions(device: str) -> dict[str, Any]:
    """Return the versions and the hardware for which a stored result or measurement is valid, as a JSON-ready dict."""
    return {"sinew": __version__, "libraries": _versions(), "hardware": proofs.hardware(device)}


def _path(bundle: Path, engine: str, threads: int = 1) -> Path:
    return folder() / f"{fingerprint(bundle)[:16]}-{engine}-{threads}.json"

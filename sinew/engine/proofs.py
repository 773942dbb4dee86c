"""Read which engines have been verified (compared with the reference engine) for an architecture or a bundle.

``proofs.json`` in this folder lists the comparisons of the project's tests: [family, engine, precision]. The command
``python -m tests.proofs`` writes it. A record of ``sinew validate`` states that, on this machine, the engine computed
the same as the reference for one bundle.

The folder ``$XDG_CACHE_HOME/sinew/proofs`` (``~/.cache`` by default) has one JSON file per bundle (by fingerprint),
engine and kind of device. A record from another version of Sinew or other hardware is ignored.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from sinew_client.untrusted import read_json

from sinew import __version__
from sinew.core import machine
from sinew.engine.fingerprint import fingerprint

RECORD = Path(__file__).with_name("proofs.json")
MAX_RECORD = 1 << 22  # largest accepted size of a record in bytes


@cache
def proved(architecture: str, engine: str) -> frozenset[str]:
    """Return the precisions in which tests have compared an engine with the reference engine on a CPU."""
    rows = read_json(RECORD, MAX_RECORD)
    precisions = [precision for family, name, precision in rows if (family, name) == (architecture, engine)]
    return frozenset(word for words in precisions for word in words.split(", "))


def folder() -> Path:
    return machine.cache_folder("proofs")


def hardware(device: str) -> str:
    """Return the name of the GPU or CPU that computes on ``device``. A CPU's name includes its instruction sets,
    because they decide the kernels."""
    if device.partition(":")[0] != "cuda":
        return f"{machine.cpu_model()} ({machine.instructions()})"
    import torch

    return torch.cuda.get_device_name(device)


def keep(bundle: Path, engine: str, device: str, report: dict[str, Any]) -> Path:
    """Store the result of a validation (``sinew validate``) on this machine.

    Args:
        bundle: The bundle's file.
        engine: The engine that was compared with the reference.
        device: The device.
        report: The report of the validation, which passed or failed.

    Returns:
        The path of the stored record.
    """
    record = {**report, "sinew": __version__, "hardware": hardware(device)}
    return machine.write_whole(_path(bundle, engine, device), (json.dumps(record, indent=2) + "\n").encode())


def lacking(bundle: Path, engine: str, device: str) -> str:
    """Return the reason why the engine is not verified for the bundle on this machine; "" if it is verified."""
    command = f"`sinew validate {bundle} --engine {engine} --device {device}`"
    try:
        record = read_json(_path(bundle, engine, device), MAX_RECORD)
        outcome = record["passed"], record["sinew"], record["hardware"]
    except (OSError, ValueError, TypeError, KeyError):
        return f"engine {engine} is not validated for this bundle on {device}: run {command}"
    if outcome[1:] != (__version__, hardware(device)):
        return f"engine {engine} was validated by sinew {outcome[1]} on {outcome[2]}: run {command} again"
    return (
        ""
        if outcome[0] is True
        else f"engine {engine} failed its validation for this bundle: run {command} for the details"
    )


def records(bundle: Path) -> list[dict[str, Any]]:
    """Return all records of a bundle on this machine, for every engine, passed or failed. Unreadable files are
    skipped."""
    reports = []
    for path in sorted(folder().glob(f"{fingerprint(bundle)[:16]}-*.json")):
        try:
            record = read_json(path, MAX_RECORD)
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            reports.append(record)
    return reports


def _path(bundle: Path, engine: str, device: str) -> Path:
    return folder() / f"{fingerprint(bundle)[:16]}-{engine}-{device.partition(':')[0]}.json"

"""Observe a robot for some seconds without moving it, or read a server's recording, and report what looks wrong."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.control import NoObservation, Stopped
from sinew_client.control.facts import facts_of

from sinew.bundle.schema import Manifest, Seen
from sinew.checks.wiring import WRONG, Finding, WiringWatch, findings, mismatch
from sinew.checks.wiring.thumbnails import Gathering
from sinew.core import Observation, SinewError
from sinew.processing import Processor
from sinew.processing.given import observation as as_given
from sinew.records import parts
from sinew.records.recorder import Record, read_records

PATIENCE_S = 5.0  # an observation that takes more seconds counts as blocked
HZ = 10.0  # observations per second if the policy states no rate
MAX_LOOKS = 1000


def live(
    robot: Any,
    manifest: Manifest,
    seconds: float,
    patience: float = PATIENCE_S,
    kept: list[Observation] | None = None,
) -> tuple[int, list[Finding]]:
    """Observe a robot for some seconds without moving it. Only ``observe`` is called.

    Args:
        robot: The robot.
        manifest: The policy's bundle.
        seconds: How long to observe.
        patience: If one observation takes more seconds, observing ends. The blocked call stays in its own thread.
        kept: Receives the first and the last observation, if the policy accepts them.

    Returns:
        The number of observations, and the findings.
    """
    watch, processor = WiringWatch(), Processor(manifest)
    first: list[Finding] = []
    rate = manifest.spec.control_hz or HZ
    beat, over, ended = threading.Event(), threading.Event(), threading.Event()

    def look() -> None:
        until = time.monotonic() + seconds
        while not over.is_set() and watch.looks + sum(watch.faults.values()) < MAX_LOOKS:
            started = time.monotonic()
            try:
                seen = robot.observe()
                now = time.monotonic()
                if not isinstance(seen, Mapping):
                    raise TypeError(f"expected a mapping with images and state, got {type(seen).__name__}")
                if over.is_set():
                    return
                if not watch.looks and (rejection := mismatch(processor, seen)) is not None:
                    first.append(rejection)
                watch.add(seen, now, now - started)
                if kept is not None and not first:
                    kept[1:] = [_copied(seen, manifest)]
            except Stopped:
                break
            except Exception as error:  # noqa: BLE001 - a driver may raise any error, and each error is a finding
                watch.fault(
                    str(error)
                    if isinstance(error, NoObservation)
                    else f"{type(error).__name__}: {error}"[:300]
                )
            beat.set()
            if time.monotonic() >= until:
                break
            over.wait(max(0.0, started + 1 / rate - time.monotonic()))
        ended.set()
        beat.set()

    threading.Thread(target=look, name="sinew-observe", daemon=True).start()
    while not ended.is_set():
        if not beat.wait(patience):
            over.set()
            text = f"`observe` has not returned after {patience:g} s (observation {watch.looks + 1})"
            advice = "add a time-out to the read, and check that the camera or bus is connected"
            return watch.looks, [Finding("robot", WRONG, "blocks", text, "an observation", advice), *first]
        beat.clear()
    return watch.looks, first + findings(watch, manifest, manifest.spec.control_hz)


def _copied(seen: Mapping[str, Any], manifest: Manifest) -> Observation:
    """Return an observation with copies of the frames, because a driver may write the next frame into the same
    memory."""
    copies = {key: copy.deepcopy(seen[key]) for key in ("images", "state", "prompt") if key in seen}
    return as_given(copies, manifest.spec)


def recorded(folder: Path, manifest: Manifest) -> tuple[int, list[Finding]]:
    """Read the recording of ``sinew serve --record``, session by session.

    Args:
        folder: The recording.
        manifest: The policy's bundle.

    Returns:
        The number of records, and the findings.
    """
    processor, watches, first, count = Processor(manifest), dict[str, WiringWatch](), list[Finding](), 0
    for record in read_records(folder):
        count += 1
        name = str(record.observation.session or record.wire)
        seen: dict[str, Any] = {"images": record.observation.images, "state": record.observation.state}
        if (when := record.observation.time) is not None:
            seen["time"] = when
        watch = watches.setdefault(name, WiringWatch())
        if not watch.looks and (rejection := mismatch(processor, seen)) is not None:
            first.append(rejection)
        watch.add(seen)
    results = first
    undecided = dict[tuple[str, str], Finding]()
    for name, watch in watches.items():
        for each in findings(watch, manifest):
            if not each.amiss:
                undecided.setdefault((each.subject, each.seen), each)
            elif len(watches) == 1:
                results.append(each)
            else:
                results.append(_in_session(each, name))
    return count, results + list(undecided.values())


def _in_session(finding: Finding, session: str) -> Finding:
    shown = session if session.isprintable() and len(session) <= 64 else repr(session[:64])
    return Finding(
        f"{finding.subject} of session {shown}",
        finding.level,
        finding.kind,
        finding.seen,
        finding.expected,
        finding.advice,
    )


def learnt(folder: Path, manifest: Manifest) -> Seen:
    """Return a record of cameras and joints, computed from recordings of a correctly wired robot.

    Raises:
        SinewError: The folder contains no record, or a record cannot be read.
    """
    gathering, names, dim = (
        Gathering(),
        {camera.name for camera in manifest.spec.cameras},
        manifest.spec.state.dim,
    )
    for record in read_records(folder):
        gathering.add(_frames(record, names), _numbers(record, dim))
    return gathering.seen(f"{gathering.frames} recorded requests")


def _frames(record: Record, names: set[str]) -> Mapping[str, np.ndarray]:
    strange = [name for name in record.observation.images if name not in names]
    if strange:
        raise SinewError(
            f"{record.path}: expected frames of {', '.join(sorted(names))}, got {strange[0]!r}; pass recordings of this"
            " policy"
        )
    return {name: parts.pixels(record, name) for name in record.observation.images}


def _numbers(record: Record, dim: int) -> np.ndarray:
    numbers = parts.numbers(record)
    if numbers.shape != (dim,) or not np.isfinite(numbers).all():
        raise SinewError(f"{record.path}: state: expected {dim} finite numbers, got {list(numbers.shape)}")
    return numbers


@contextlib.contextmanager
def closing(robot: Any) -> Iterator[Any]:
    """Close a robot at the end, if it has a ``close`` method. A call that blocks is abandoned after some seconds."""
    try:
        yield robot
    finally:
        if (close := facts_of(robot).close) is not None:
            ending = threading.Thread(target=close, name="sinew-close", daemon=True)
            ending.start()
            ending.join(PATIENCE_S)

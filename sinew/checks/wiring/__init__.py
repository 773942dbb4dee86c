"""What a program can see of a wrongly wired robot: `sinew doctor POLICY --observe ROBOT`, and the dashboard.

A robot's frames and states are compared with what a bundle knows of its training data (``sinew.seen``, else the
statistics of the normalisation). No robot is commanded by anything here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sinew.bundle.rename import renames_for
from sinew.bundle.schema import Manifest, Seen
from sinew.checks.wiring.cameras import CameraFit
from sinew.checks.wiring.finding import CANNOT_TELL, LOOKS_WRONG, SPARE, WRONG, Finding
from sinew.checks.wiring.joints import JointFit
from sinew.checks.wiring.watch import WiringWatch
from sinew.core import PolicySpec, SinewError
from sinew.processing import Processor
from sinew.processing.given import observation as as_given
from sinew.processing.image import larger

__all__ = ["CANNOT_TELL", "LOOKS_WRONG", "WRONG", "Finding", "WiringWatch", "findings", "mismatch"]

ORDER = (WRONG, LOOKS_WRONG, CANNOT_TELL, SPARE)
SHAPE = 0.1  # largest relative difference of the aspect ratio
NOTHING = Seen("nothing", 0)


def mismatch(processor: Processor, seen: Mapping[str, Any]) -> Finding | None:
    """Return why the policy would refuse an observation; None where it takes it."""
    try:
        known = {key: seen[key] for key in ("images", "state") if key in seen}
        given = {"prompt": "look", **known}
        processor.check(as_given(given, processor.spec))
    except SinewError as error:
        names = [camera.name for camera in processor.spec.cameras]
        shown = seen.get("images")
        cameras = [str(name) for name in shown] if isinstance(shown, Mapping) else []
        renames = renames_for(names, cameras)
        return Finding(
            "robot",
            WRONG,
            "refused",
            f"the policy refuses what it shows: {error}",
            f"cameras {', '.join(names)} (the robot has {', '.join(cameras) or 'none'}) and {processor.spec.state.dim}"
            " numbers of state",
            f"say which camera is which: {renames}" if renames else "",
        )
    return None


def findings(watch: WiringWatch, manifest: Manifest, hz: float | None = None) -> list[Finding]:
    """Return the suspicious findings, then those that cannot be decided. hz: Required observations per second."""
    spec, seen = manifest.spec, manifest.seen or NOTHING
    names, cameras, joints = [each.name for each in spec.cameras], CameraFit(seen), JointFit.of(manifest)
    lit = {name: sum(each.mean) / 3 for name, each in seen.cameras.items()}
    runs = {name: each.still for name, each in seen.cameras.items() if each.still}
    found = [
        Finding(
            "robot", WRONG, "raises", f"{count} of {count + watch.looks} looks failed: {text}", "observations"
        )
        for text, count in watch.faults.items()
    ]
    found += [
        Finding(f"camera {name}", WRONG, "no frame", what, "uint8, or floats in [0, 1], [height, width, 3]")
        for name, what in watch.odd.items()
    ]
    found += (
        watch.pictures(names, cameras, lit)
        + watch.numbers(joints)
        + watch.still(joints, runs)
        + watch.clock(hz)
    )
    found += cameras.undecided(names) + _shapes(watch, spec)
    found += joints.undecided() if spec.state.dim else []
    found += _larger(watch, manifest)
    return sorted(found, key=lambda each: ORDER.index(each.level))


def _shapes(watch: WiringWatch, spec: PolicySpec) -> list[Finding]:
    """Return the cameras whose frames have another aspect ratio than the bundle states."""
    found = []
    for camera in spec.cameras:
        height, width = (
            shown.size if (shown := watch.cameras.get(camera.name)) else (camera.height, camera.width)
        )
        if abs(width * camera.height / (height * camera.width) - 1) > SHAPE:
            found.append(
                Finding(
                    f"camera {camera.name}",
                    CANNOT_TELL,
                    "shape",
                    f"frames of {height}x{width}, and {camera.height}x{camera.width} in the bundle: another part of the"
                    " scene, or the same one squeezed?",
                )
            )
    return found


def _larger(watch: WiringWatch, manifest: Manifest) -> list[Finding]:
    """Return the cameras whose frames have far more pixels than the policy reads."""
    found = []
    for camera in manifest.spec.cameras:
        if (shown := watch.cameras.get(camera.name)) is None:
            continue
        frame, trained = np.zeros((*shown.size, 3), np.uint8), (camera.height, camera.width)
        if text := larger(frame, manifest.processing.image, trained):
            found.append(Finding(f"camera {camera.name}", SPARE, "larger than read", text))
    return found

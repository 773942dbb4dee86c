"""Find a wrongly wired robot, for `sinew doctor POLICY --observe ROBOT` and the dashboard.

A robot's frames and states are compared with the training data: the record in the bundle (``sinew.seen``), or the
statistics of the normalisation if there is no record. These checks never send a command to the robot.
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
SHAPE = 0.1  # largest relative difference of aspect ratios that is not reported
NOTHING = Seen("nothing", 0)


def mismatch(processor: Processor, seen: Mapping[str, Any]) -> Finding | None:
    """Return a finding if the policy would reject the observation ``seen``; None if the policy accepts it."""
    try:
        present = {key: seen[key] for key in ("images", "state") if key in seen}
        processor.check(as_given({"prompt": "look", **present}, processor.spec))
    except SinewError as error:
        names = [camera.name for camera in processor.spec.cameras]
        shown = seen.get("images")
        cameras = [str(name) for name in shown] if isinstance(shown, Mapping) else []
        renames = renames_for(names, cameras)
        return Finding(
            "robot",
            WRONG,
            "refused",
            f"the policy rejects the robot's observation: {error}",
            f"cameras {', '.join(names)} (the robot has {', '.join(cameras) or 'none'}) and {processor.spec.state.dim}"
            " numbers of state",
            f"map the cameras by name, for example {renames}" if renames else "",
        )
    return None


def findings(watch: WiringWatch, manifest: Manifest, hz: float | None = None) -> list[Finding]:
    """Return the findings about a robot (statements about what looks wrong), the suspicious ones first.

    Args:
        watch: The observed frames and states.
        manifest: The policy's bundle.
        hz: Required observations per second; None if unknown.
    """
    spec, seen = manifest.spec, manifest.seen or NOTHING
    names, cameras, joints = [each.name for each in spec.cameras], CameraFit(seen), JointFit.of(manifest)
    lit = {name: sum(each.mean) / 3 for name, each in seen.cameras.items()}
    runs = {name: each.still for name, each in seen.cameras.items() if each.still}
    results = [
        Finding(
            "robot",
            WRONG,
            "raises",
            f"{count} of {count + watch.looks} observations failed: {text}",
            "observations without errors",
        )
        for text, count in watch.faults.items()
    ]
    results += [
        Finding(f"camera {name}", WRONG, "no frame", what, "uint8, or floats in [0, 1], [height, width, 3]")
        for name, what in watch.odd.items()
    ]
    results += (
        watch.pictures(names, cameras, lit)
        + watch.numbers(joints)
        + watch.still(joints, runs)
        + watch.clock(hz)
    )
    results += cameras.undecided(names) + _shapes(watch, spec)
    results += joints.undecided() if spec.state.dim else []
    results += _larger(watch, manifest)
    return sorted(results, key=lambda each: ORDER.index(each.level))


def _shapes(watch: WiringWatch, spec: PolicySpec) -> list[Finding]:
    """Return a finding for each camera whose frames have another aspect ratio than the bundle states."""
    results = []
    for camera in spec.cameras:
        height, width = (
            shown.size if (shown := watch.cameras.get(camera.name)) else (camera.height, camera.width)
        )
        if abs(width * camera.height / (height * camera.width) - 1) > SHAPE:
            results.append(
                Finding(
                    f"camera {camera.name}",
                    CANNOT_TELL,
                    "shape",
                    f"frames are {height}x{width}, and the bundle states {camera.height}x{camera.width}. Check whether"
                    " the frames show another part of the scene, or are squeezed",
                )
            )
    return results


def _larger(watch: WiringWatch, manifest: Manifest) -> list[Finding]:
    """Return a finding for each camera whose frames have far more pixels than the policy reads."""
    results = []
    for camera in manifest.spec.cameras:
        if (shown := watch.cameras.get(camera.name)) is None:
            continue
        frame, trained = np.zeros((*shown.size, 3), np.uint8), (camera.height, camera.width)
        if text := larger(frame, manifest.processing.image, trained):
            results.append(Finding(f"camera {camera.name}", SPARE, "larger than read", text))
    return results

"""A golden check that travels with the package: a tiny SmolVLA with random weights, one observation, and
the actions that LeRobot 0.6.2 computed for it. ``sinew doctor`` runs it; no download, about a second.

The data is written by ``python -m tests.package_golden`` from the reference's stored inputs and outputs.
The frames are drawn as the reference's were.
"""

from __future__ import annotations

import contextlib
import logging
import lzma
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sinew_client.untrusted import read_npz

from sinew.families.smolvla.golden.frames import grey_frame

DATA = Path(__file__).parent
BUNDLE = DATA / "smolvla-tiny.gguf.xz"
REFERENCE = DATA / "reference.npz"
FRAMES = {"seed": 0, "skip": 192, "word": 8}  # as tests/fixtures/smolvla-2cam/fixture.json has them
MAX_ABS, COSINE_GAP = 1e-4, 1e-7  # the project's bound for the eager float32 engine

Check = tuple[str, bool, str]  # name, passed, detail


@contextlib.contextmanager
def unpacked() -> Iterator[Path]:
    """Yield the bundle as a file of its own."""
    with tempfile.TemporaryDirectory(prefix="sinew-doctor-") as folder:
        bundle = Path(folder) / BUNDLE.stem
        packed = BUNDLE.read_bytes()  # own file: in an installed package
        bundle.write_bytes(lzma.decompress(packed))
        yield bundle


def observation() -> dict:
    """The stored observation, frames and noise included."""
    stored = read_npz(REFERENCE)
    cameras = [str(name) for name in stored["cameras"]]
    return {
        "images": {name: grey_frame(index, **FRAMES) for index, name in enumerate(cameras)},
        "state": stored["state"],
        "prompt": str(stored["prompt"]),
        "noise": stored["noise"],
    }


def check() -> list[Check]:
    """Run the stored observation and compare with the stored actions."""
    import sinew

    log = logging.getLogger("sinew.policy")
    with unpacked() as bundle, sinew.load(bundle, "cpu", "fp32", "eager") as policy:
        log.addFilter(nothing := lambda _: False)  # what it says of these frames is of no user's camera
        try:
            actions = policy.infer(observation()).actions.astype(np.float64)
        finally:
            log.removeFilter(nothing)
    reference = read_npz(REFERENCE)["actions"].astype(np.float64)
    worst = float(np.abs(actions - reference).max())
    gap = 1.0 - float((actions * reference).sum() / np.sqrt((actions**2).sum() * (reference**2).sum()))
    passed = worst <= MAX_ABS and gap <= COSINE_GAP
    detail = (
        f"actions differ from LeRobot's by at most {worst:.1e} (bound {MAX_ABS:.0e}), 1 - cosine {gap:.1e}"
        f" (bound {COSINE_GAP:.0e})"
    )
    if not passed:
        detail += "; this installation computes wrong actions: reinstall torch from the constraints file"
    return [("golden SmolVLA", passed, detail)]

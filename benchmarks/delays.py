"""Measured delays of a simulated arm compared with its true delays: what `sinew doctor --observe --delays` finds.

    python -m benchmarks.delays [OUT.json]

The arm is that of tests/robots/test_delays.py, with frames at 30 Hz, in simulated time. Each combination of an
actuator delay, a camera delay, and a camera that is polled or waited for is measured once. The figure of docs/wiring.md
is drawn from the result (`python -m benchmarks.figures delays.png`).
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from sinew.checks.delays import measure
from tests.robots.delayed_arm import Clock, DelayedArm
from tests.robots.test_delays import wobbled

RESULTS = Path(__file__).parent / "results" / "delays.json"
ACTUATION_S, CAMERA_S = (0.0, 0.012, 0.045, 0.1), (0.0, 0.033, 0.067, 0.12)


def row(name: str, true: float, waits: bool, got: Any) -> dict[str, Any]:
    """Return a row with a measured delay and the true delay, in milliseconds."""
    seconds = {"measured": got.seconds, "low": got.low, "high": got.high}
    return {"of": name, "true": 1e3 * true, "waits": waits} | {
        k: round(1e3 * v, 3) for k, v in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=RESULTS)
    out = parser.parse_args().out
    rows = []
    for actuation, camera, waits in itertools.product(ACTUATION_S, CAMERA_S, (False, True)):
        found = measure(wobbled(DelayedArm(Clock(), actuation, camera, waits)))
        rows += [row("state", actuation, waits, joint) for joint in found.joints.values()]
        rows.append(row("image", camera, waits, found.cameras["front"].transfer))
        print(rows[-3:], flush=True)
    out.write_text(json.dumps(rows, indent=None).replace("}, ", "},\n") + "\n")
    for name in ("state", "image"):
        own = [each for each in rows if each["of"] == name]
        errors = [abs(each["measured"] - each["true"]) for each in own]
        inside = sum(each["low"] <= each["true"] <= each["high"] for each in own)
        print(
            f"{name}: {len(own)} delays, error at most {max(errors):.2f} ms, {inside} intervals contain the delay"
        )


if __name__ == "__main__":
    main()

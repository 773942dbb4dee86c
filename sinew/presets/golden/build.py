"""Write the package's golden data: ``python -m sinew.presets.golden.build FIXTURE_DIRECTORY``.

The directory holds ``checkpoint/``, ``vlm/`` and ``fixture.safetensors`` as the golden SmolVLA fixtures do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from sinew.convert import convert
from sinew.presets.golden import BUNDLE, DATA, REFERENCE


def build(fixture: Path) -> None:
    convert(fixture / "checkpoint", BUNDLE, vlm=fixture / "vlm", name="golden-smolvla")
    with safe_open(fixture / "fixture.safetensors", framework="np") as stored:
        facts = stored.metadata()
        names = []
        for key in json.loads(facts["cameras"]):
            names.append(key.removeprefix("observation.images."))
            (DATA / f"{names[-1]}.png").write_bytes(stored.get_tensor(f"frame.{key}").tobytes())  # a PNG file
        np.savez_compressed(
            REFERENCE,
            cameras=np.array(names),
            prompt=np.array(facts["task"]),
            state=stored.get_tensor("state_raw"),
            noise=stored.get_tensor("noise")[0],
            actions=stored.get_tensor("actions")[0],
        )


if __name__ == "__main__":
    build(Path(sys.argv[1]))

"""Write a built-in SmolVLA as a checkpoint that LeRobot opens: ``python -m research.policies.smolvla_reference blocks
OUT``.

LeRobot's own inference of this checkpoint is then a second policy for the same episodes. In an environment with LeRobot
0.6.1, transformers and Sinew (``python -m benchmarks.peers --how``), serve it from the folder OUT, because the
checkpoint names its tokenizer and its language model by relative paths:

    cd OUT && python -m lerobot_policy_sinew.reference . --bundle .../sinew/assets/blocks.gguf
    sinew eval blocks --compare tcp://127.0.0.1:5556 --episodes 200 --seed 30000 --workers 1
"""

from __future__ import annotations

import sys
from pathlib import Path

import sinew_eval.sim  # noqa: F401 - the policies' modules need the environments
from sinew_eval.training.checkpoint import Design, write_configs, write_weights

from research.policies import blocks, pen
from research.policies.committed import ASSETS, statistics_of
from sinew.core import SinewError
from sinew.families.smolvla.model import SmolVLA
from sinew.policy import load

DESIGNS: dict[str, Design] = {"blocks": blocks.DESIGN, "pen": pen.DESIGN}


def write(name: str, out: Path) -> None:
    """Write the checkpoint of a built-in policy.

    Args:
        name: A key of ``DESIGNS``.
        out: Folder of the checkpoint.

    Raises:
        SinewError: There is no such policy, or its bundle has other sizes than its design.
    """
    if name not in DESIGNS:
        raise SinewError(f"{name}: expected one of {', '.join(DESIGNS)}")
    with load(ASSETS / f"{name}.gguf", engine="eager") as policy:
        model = policy.engine.model
        if (
            not isinstance(model, SmolVLA)
            or write_configs(out, DESIGNS[name], statistics_of(policy)) != model.config
        ):
            raise SinewError(
                f"{name}: the bundle has other sizes than the design of research/policies/{name}.py"
            )
        write_weights(out, model, model.state_dict())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    write(sys.argv[1], Path(sys.argv[2]))

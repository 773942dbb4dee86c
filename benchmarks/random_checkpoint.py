"""Write a random SmolVLA checkpoint: ``python benchmarks/random_checkpoint.py OUT --dtype native``.

Full size is 450,046,176 parameters: 1.8 GB in float32, 1.2 GB in LeRobot's native mixture.
"""

from __future__ import annotations

import time
from pathlib import Path

from cyclopts import run
from rich.console import Console
from rich.progress import Progress

from sinew.families.smolvla.checkpoint import write_checkpoint
from sinew.families.smolvla.layout import TINY, StorageRecipe


def main(
    out: Path,
    /,
    *,
    dtype: StorageRecipe = "float32",
    cameras: int = 2,
    state_dim: int = 6,
    action_dim: int = 6,
    legacy: bool = False,
    tiny: bool = False,
) -> None:
    """Write OUT/checkpoint and OUT/vlm.

    Args:
        dtype: float32, native (language model and expert in bfloat16), bf16-vlm (vision too).
        legacy: the layout before processor files: statistics as buffers among the weights.
        tiny: small widths, for tests.
    """
    started = time.perf_counter()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("writing")
        result = write_checkpoint(
            out,
            dtype=dtype,
            cameras=cameras,
            state_dim=state_dim,
            action_dim=action_dim,
            legacy=legacy,
            widths=TINY if tiny else None,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.perf_counter() - started
    print(f"{result.policy}: {result.parameters:,} parameters, {result.nbytes:,} bytes in {seconds:.1f} s")
    print(f"convert: sinew convert {result.policy} {out / 'policy.gguf'} --vlm {result.vlm}")


if __name__ == "__main__":
    run(main)

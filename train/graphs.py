"""The graphs that let the embedded policies play without torch: ``python -m train.graphs`` writes them again.

They hold no weights (``sinew/engine/onnx/borrowed.py``), and lie in folders named after the content of their policies,
so that they are never taken for another's.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from sinew.bundle import Bundle
from sinew.engine.onnx.borrowed import SHIPPED, borrow, shipped_folder
from sinew.engine.onnx.cache import publish
from sinew.engine.onnx.opening import write_graphs

POLICIES = sorted(SHIPPED.parent.glob("*.gguf"))


def write(policy: Path, folder: Path) -> None:
    """Export one policy to ``folder``, and take its weights out."""
    bundle = Bundle(policy)
    write_graphs(bundle, folder, shipped_folder(policy), folded=False)
    borrow(folder, bundle)


def main() -> None:
    SHIPPED.mkdir(exist_ok=True)
    for old in SHIPPED.iterdir():
        shutil.rmtree(old)
    for policy in POLICIES:
        partial = Path(tempfile.mkdtemp(dir=SHIPPED))
        write(policy, partial)
        publish(partial, shipped_folder(policy))


if __name__ == "__main__":
    main()

"""The graphs that let the embedded policies play without torch: ``python -m research.policies.graphs [POLICY ...]``
writes them.

They hold no weights (``sinew/engine/onnx/borrowed.py``), and lie in folders named after the content of their policies,
so that they are never taken for another's.
"""

from __future__ import annotations

import shutil
import sys
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


def main(*names: str) -> None:
    """Write those of the named policies, or of all, and remove what belongs to none."""
    SHIPPED.mkdir(exist_ok=True)
    chosen = [policy for policy in POLICIES if not names or policy.stem in names]
    kept = {shipped_folder(policy) for policy in POLICIES} - {shipped_folder(policy) for policy in chosen}
    for old in set(SHIPPED.iterdir()) - kept:
        shutil.rmtree(old)
    for policy in chosen:
        partial = Path(tempfile.mkdtemp(dir=SHIPPED))
        write(policy, partial)
        publish(partial, shipped_folder(policy))


if __name__ == "__main__":
    main(*sys.argv[1:])

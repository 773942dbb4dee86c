"""Write the rule files (tests/rules.py) of a new case, for the scripts that make a case (tests/fixtures/*/make.py)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from tests import cases, rules


def write(
    path: Path, seed: int, tensors: dict[str, dict[str, Any]], stored: bytes | None = None, **more: Any
) -> bytes:
    """Write a rule file, and next to it a file with the tensors that no rule generates. Returns the generated whole
    file."""

    def other(name: str) -> bytes:
        return cases.content(cases.FIXTURES / name)

    record = {"seed": seed, "tensors": tensors, **more}
    try:
        rules.build({**record, "sha256": ""}, stored, other)
    except ValueError as error:
        record["sha256"] = str(error).split("got ")[1]
    text = json.dumps(record, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.xz").write_bytes(packed(text))
    return rules.build(record, stored, other)


def packed(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 2}]
    return lzma.compress(data, filters=filters)

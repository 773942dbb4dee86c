"""The golden cases: inputs and outputs of the reference implementations, unpacked once from tests/fixtures.

``python -m tests.cases`` prints the folder of the unpacked cases. Programs call :func:`golden_cases`. A large file is
stored in tests/fixtures in one of these forms:

* compressed (``NAME.xz``)
* as rules from which the file is generated (tests/rules.py)
* both: ``weights.json`` and ``model.safetensors.xz`` give ``model.safetensors``, and ``fixture.json`` and
  ``fixture.safetensors.xz`` give ``fixture.safetensors``

Rules may be compressed too. ``checkpoint.json`` gives ``latest-checkpoint.pt``, a file of torch. The torch files of
OmniVLA and of Evo-1's original checkpoint are also made so, and their stored part is a safetensors file. All other
files are stored unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import lzma
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import rules

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
GOLDEN = ROOT / "sinew" / "families" / "smolvla" / "golden"
USED = (  # files outside of tests/fixtures on which the unpacked cases depend
    Path(__file__),
    Path(rules.__file__),
    GOLDEN / "frames.py",
    GOLDEN / "smolvla-tiny.gguf.xz",
)
RULES = {  # name of a file -> name of the file with its rules
    "model.safetensors": "weights.json",
    "fixture.safetensors": "fixture.json",
    "latest-checkpoint.pt": "checkpoint.json",
    "mp_rank_00_model_states.pt": "model_states.json",
    "omnivla-edge.pth": "omnivla-edge.json",
    "turbovla_libero.pth": "turbovla_libero.json",
    "action_head--120000_checkpoint.pt": "action_head.json",
    "pose_projector--120000_checkpoint.pt": "pose_projector.json",
}
PACKED = ".xz"
FILES_GIVEN = (
    "vlm",
    "arch",
    "base",
    "stats",
)  # options of a conversion whose files are in the folder of the golden case
FILES_SHARED = ("tokenizer",)  # options of a conversion whose files are in the folder of another golden case


@dataclass(frozen=True)
class Case:
    """The fields of ``case.json``, which describes a golden case.

    Attributes:
        home: Folder of the case.
        architecture: Architecture, as the bundle names it.
        checkpoint: Folder of the checkpoint to convert.
        given: Options of the conversion.
        neighbour: Another checkpoint whose weights do not fit this one. None if no test needs it.
        statistics: Files with the statistics.
        also: Further cases in the same folder.
    """

    home: str
    architecture: str
    checkpoint: str
    given: dict[str, Any]
    neighbour: str | None = None
    statistics: tuple[str, ...] = ()
    also: dict[str, dict[str, Any]] = field(default_factory=dict)

    def options(self, home: Path) -> dict[str, Any]:
        """Return the options of the conversion, for a case in the folder ``home``."""
        given = {key: home / value if key in FILES_GIVEN else value for key, value in self.given.items()}
        return given | {key: golden_cases() / given[key] for key in FILES_SHARED if key in given}


@functools.cache
def cases() -> dict[str, Case]:
    """Return all golden cases by name. A folder may contain further cases (``also``), whose names begin with its
    name."""
    found = {}
    for path in sorted(FIXTURES.glob("*/case.json")):
        record = {"home": path.parent.name, **json.loads(path.read_text())}
        found[path.parent.name] = Case(**{**record, "statistics": tuple(record.get("statistics", ()))})
        for name, other in record.get("also", {}).items():
            found[name] = Case(path.parent.name, record["architecture"], **other)
    return found


@functools.cache
def golden_cases() -> Path:
    """Return the folder of all unpacked cases: build/fixtures, or a temporary folder if the checkout is read-only.

    The name of the folder is a hash of the source files, so that each version is unpacked only once. One process
    unpacks, and other processes wait.
    """
    name = _digest()
    homes = [ROOT / "build" / "fixtures", Path(tempfile.gettempdir()) / f"sinew-fixtures-{os.getuid()}"]
    for home in homes:
        try:
            return _unpacked(home / name)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    raise PermissionError(f"expected a writable folder for unpacked fixtures, got {homes[0]} and {homes[1]}")


def content(path: Path) -> bytes:
    """Return the unpacked content of a file, which tests/fixtures stores unchanged, compressed, or as rules."""
    stored = _stored(path)
    rule = path.with_name(RULES.get(path.name, path.name))
    if rule != path and (found := _stored(rule)) is not None:
        try:
            made = rules.build(json.loads(found), stored, lambda name: content(FIXTURES / name))
        except ValueError as error:
            raise ValueError(f"{rule}: {error}") from None
        return made if path.suffix == ".safetensors" else of_torch(made, FORMS.get(path.name, dict))
    return path.read_bytes() if stored is None else stored


def of_torch(tensors: bytes, form: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """Return a file of torch.

    Args:
        tensors: A safetensors file.
        form: Builds the object to save from the tensors by name.
    """
    import torch
    from safetensors.torch import load

    torch.save(form(load(tensors)), file := io.BytesIO())
    return file.getvalue()


def prismatic(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"model": {SECTION: {NAME: tensor}}}`` for tensors named SECTION.NAME, as Prismatic's training writes
    them."""
    sections: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = tensor
    return {"model": sections}


def deepspeed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"module": tensors}`` with an OrderedDict, which is also the type of a module's ``state_dict``."""
    return {"module": OrderedDict(tensors)}


def with_config(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"model_state_dict": tensors, "model_config": ...}``. The configuration is stored as a tensor of JSON
    bytes."""
    config = json.loads(tensors["model_config"].numpy().tobytes())
    state = OrderedDict((name, tensor) for name, tensor in tensors.items() if name != "model_config")
    return {"model_state_dict": state, "model_config": config}


FORMS = {
    "latest-checkpoint.pt": prismatic,
    "mp_rank_00_model_states.pt": deepspeed,
    "turbovla_libero.pth": with_config,
}  # all other files contain the tensors by name


def _stored(path: Path) -> bytes | None:
    """Return the content of a stored or compressed file. None if there is neither."""
    packed = path.with_name(path.name + PACKED)
    if packed.exists():
        return lzma.decompress(packed.read_bytes())
    return path.read_bytes() if path.exists() else None


def unpack(source: Path, target: Path) -> None:
    """Write all files below ``source`` to ``target``, unpacked."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            unpack(path, target / path.name)
    made_of = {rule: name for name, rule in RULES.items()}
    names = {path.name.removesuffix(PACKED) for path in source.iterdir() if path.is_file()}
    for name in {made_of.get(name, name) for name in names}:
        (target / name).write_bytes(content(source / name))


@functools.cache
def tiny_bundle() -> Path:
    """Return the tiny bundle that `sinew doctor` runs, as a temporary file that exists until this process ends."""
    from sinew.families.smolvla import golden

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(golden.unpacked())


def _digest() -> str:
    """Return a hash of all files on which the unpacked cases depend."""
    found = hashlib.sha256()
    for path in [*USED, *sorted(path for path in FIXTURES.rglob("*") if path.is_file())]:
        found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _unpacked(home: Path) -> Path:
    """Return the folder ``home``. If it does not exist, fill a temporary folder and rename it, so that it is never
    incomplete."""
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            part = home.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            unpack(FIXTURES, part)
            part.rename(home)
    return home


if __name__ == "__main__":
    print(golden_cases())

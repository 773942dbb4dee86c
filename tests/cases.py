"""The golden cases as the references wrote them, unpacked once from tests/fixtures.

``python -m tests.cases`` prints the folder in which they are; programs call :func:`golden_cases`. In tests/fixtures a
large file is stored compressed (``NAME.xz``) or by rule (tests/rules.py), or partly one and partly the other:
``weights.json`` and ``model.safetensors.xz`` give ``model.safetensors``, ``fixture.json`` and
``fixture.safetensors.xz`` give ``fixture.safetensors``; rules may lie compressed too. ``checkpoint.json`` gives a file
of torch's, ``latest-checkpoint.pt``, and so do those of OmniVLA and of Evo-1's original, whose stored part is a
safetensors file. Everything else is stored as it is.
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
USED = (  # beside the fixtures
    Path(__file__),
    Path(rules.__file__),
    GOLDEN / "frames.py",
    GOLDEN / "smolvla-tiny.gguf.xz",
)
RULES = {  # file -> its rules
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
)  # arguments of a conversion whose files are in the folder of the case
FILES_SHARED = ("tokenizer",)  # and those of another case


@dataclass(frozen=True)
class Case:
    """What a golden case says of itself in ``case.json``.

    home: its folder. architecture: as its bundle says it. checkpoint: the folder in it that is converted, with
    ``given``. neighbour: another checkpoint whose weights do not fit it; None where nobody asks. statistics: the files
    that hold its statistics. also: further cases of the folder.
    """

    home: str
    architecture: str
    checkpoint: str
    given: dict[str, Any]
    neighbour: str | None = None
    statistics: tuple[str, ...] = ()
    also: dict[str, dict[str, Any]] = field(default_factory=dict)

    def options(self, home: Path) -> dict[str, Any]:
        """Return what its conversion is given, for a case that lies in ``home``."""
        given = {key: home / value if key in FILES_GIVEN else value for key, value in self.given.items()}
        return given | {key: golden_cases() / given[key] for key in FILES_SHARED if key in given}


@functools.cache
def cases() -> dict[str, Case]:
    """Return all cases by name; a folder may hold further ones (``also``) under names that begin with its own."""
    found = {}
    for path in sorted(FIXTURES.glob("*/case.json")):
        record = {"home": path.parent.name, **json.loads(path.read_text())}
        found[path.parent.name] = Case(**{**record, "statistics": tuple(record.get("statistics", ()))})
        for name, other in record.get("also", {}).items():
            found[name] = Case(path.parent.name, record["architecture"], **other)
    return found


@functools.cache
def golden_cases() -> Path:
    """Return the folder of all cases: build/fixtures, or a folder for temporary files where the checkout is read-only.

    Its name is a hash of what it was made from, so that it is made once, whoever asks: one process makes it, and
    others wait.
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
    """Return a file's bytes as unpacked, whether tests/fixtures stores them, packs them or has rules for them."""
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
    """Return a file of torch's with what ``form`` makes of a safetensors file's tensors by name."""
    import torch
    from safetensors.torch import load

    torch.save(form(load(tensors)), file := io.BytesIO())
    return file.getvalue()


def prismatic(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"model": {SECTION: {NAME: tensor}}}`` of tensors SECTION.NAME: as Prismatic's training writes them."""
    sections: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = tensor
    return {"model": sections}


def deepspeed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"module": tensors}``, in the kind of dict that a module's ``state_dict`` is."""
    return {"module": OrderedDict(tensors)}


def with_config(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"model_state_dict": tensors, "model_config": ...}``; the second is a tensor of JSON's bytes."""
    config = json.loads(tensors["model_config"].numpy().tobytes())
    state = OrderedDict((name, tensor) for name, tensor in tensors.items() if name != "model_config")
    return {"model_state_dict": state, "model_config": config}


FORMS = {
    "latest-checkpoint.pt": prismatic,
    "mp_rank_00_model_states.pt": deepspeed,
    "turbovla_libero.pth": with_config,
}  # others: the tensors by name


def _stored(path: Path) -> bytes | None:
    """Return what lies under a name or, compressed, beside it; None where neither does."""
    packed = path.with_name(path.name + PACKED)
    if packed.exists():
        return lzma.decompress(packed.read_bytes())
    return path.read_bytes() if path.exists() else None


def unpack(source: Path, target: Path) -> None:
    """Write ``target`` with every file below ``source``, unpacked."""
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
    """Return the bundle that `sinew doctor` computes, as a file of this process."""
    from sinew.families.smolvla import golden

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(golden.unpacked())


def _digest() -> str:
    """Return a hash of all that the unpacked files depend on."""
    found = hashlib.sha256()
    for path in [*USED, *sorted(path for path in FIXTURES.rglob("*") if path.is_file())]:
        found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _unpacked(home: Path) -> Path:
    """Return ``home``; fill it first if it is not there, which it is only when complete."""
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

"""Upstream checkpoints -> bundles. One file per family; adding one adds a line to ``FAMILIES``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from sinew.bundle.writer import Progress
from sinew.convert.conversion import Conversion, Options
from sinew.convert.families import openpi
from sinew.convert.families.lerobot import LeRobotCheckpoint
from sinew.convert.tokenizer_files import download
from sinew.core import ConvertError

FAMILIES = {  # config.json "type" -> reader
    "smolvla": "sinew.convert.families.smolvla",
    "pi0": "sinew.convert.families.pi",
    "pi05": "sinew.convert.families.pi",
}
COMPAT = ("lerobot-0.4", "lerobot-0.6", "openpi")
CHECKPOINT_FILES = ["*.json", "*.safetensors", "tokenizer/*"]


def convert(
    source: str | Path,
    out: str | Path,
    *,
    vlm: Path | None = None,
    tokenizer: Path | None = None,
    arch: Path | None = None,
    stats: Path | None = None,
    compat: str = "lerobot-0.6",
    cameras: tuple[str, ...] = (),
    openpi_config: str = "",
    control_hz: float | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint directory, a hub name or a vla.cpp GGUF file into the bundle ``out``.

    Weights are streamed; nothing is written to ``out`` unless all of it is there. ``progress`` is called
    with the number of bytes just written. Raises :class:`ConvertError`.
    """
    options = Options(vlm, tokenizer, arch, stats, compat, tuple(cameras), openpi_config, control_hz)
    conversion = read(source, options)
    conversion.write(Path(out), name or conversion.spec.name, options, progress)
    return Path(out)


def read(source: str | Path, options: Options) -> Conversion:
    """Recognise ``source`` and read all of it but the weights."""
    if options.control_hz is not None and not 0 < options.control_hz <= 10_000:
        raise ConvertError(f"--control-hz {options.control_hz}: expected actions per second, above 0")
    if options.compat not in COMPAT:
        raise ConvertError(f"--compat {options.compat!r} is not one of {', '.join(COMPAT)}")
    path = Path(source)
    if not path.exists():
        parts = str(source).split("/")
        if len(parts) != 2 or not all(parts):
            raise ConvertError(f"{source}: no such file or directory")
        path = download(str(source), CHECKPOINT_FILES, "download it and give the directory")
    if path.is_file():
        return import_module("sinew.convert.families.vlacpp").read(path, options)
    if openpi.is_checkpoint(path):
        return openpi.read(path, options)
    checkpoint = LeRobotCheckpoint(path, options.stats)
    family = FAMILIES.get(str(checkpoint.type))
    if family is None:
        raise ConvertError(
            f"{path / 'config.json'}: checkpoint type {checkpoint.type!r} is not one of {', '.join(FAMILIES)}"
        )
    return import_module(family).read(checkpoint, options)

"""Rewrite a bundle of an older format in the present one: with a new header, and every tensor byte for byte."""

from __future__ import annotations

from pathlib import Path

from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.reader import Bundle
from sinew.bundle.schema import KEY_VERSION, READS
from sinew.bundle.upgrade import NEWS
from sinew.bundle.writer import Progress, rewrite
from sinew.convert.options import ConvertOptions
from sinew.core import BundleError, ConvertError


def is_bundle(path: Path) -> bool:
    """Return True for a bundle's file, of whichever format."""
    try:
        return path.is_file() and KEY_VERSION in GGUFFile(path).metadata
    except BundleError:
        return False


def upgrade(
    source: Path, out: Path, options: ConvertOptions, progress: Progress | None = None, **more: object
) -> tuple[Bundle, tuple[str, ...]]:
    """Write ``source``, a bundle, in the present format; return what was written and what is new in it.

    ``out`` may be ``source``, where a link stays one; it takes its name when it is complete and on the disk. Exported
    graphs, proofs and FP8 scales of the old file are not the new one's. Raises :class:`ConvertError` for options and
    what else is for checkpoints, ``more``, for a bundle of the present format and for a damaged one.
    """
    for name in (*options.given, *(name for name, value in more.items() if value)):
        raise ConvertError(f"--{name.replace('_', '-')}: expected a checkpoint, got the bundle {source}")
    opened = Bundle(source.resolve())
    before, now = opened.file.metadata[KEY_VERSION], READS[-1]
    if before == now:
        raise ConvertError(
            f"{source}: expected a checkpoint or a bundle before format {now}, got one of format {now}"
        )
    if (
        changed := opened.verify() if opened.hashes is not None else ()
    ):  # new hashes would bless what is damaged
        raise ConvertError(
            f"{source}: {len(changed)} tensors differ from what was written, {changed[0]} first; nothing was written"
        )
    target = opened.path if out.exists() and out.samefile(source) else out
    rewrite(opened, opened.manifest, target, progress, durable=True)
    made = Bundle(target)
    if made.manifest != opened.manifest or (opened.hashes or made.hashes) != made.hashes:
        raise AssertionError("an upgraded bundle reads as another one")
    told = "; ".join(NEWS[version] for version in range(before + 1, now + 1))
    hashes = "" if opened.hashes else ", which had no hashes and have them now"
    notes = (f"format {before} to {now} ({told})", f"{len(made.infos)} tensors as they were{hashes}")
    return made, notes

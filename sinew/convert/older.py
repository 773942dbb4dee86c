"""Rewrite a bundle of an older format in the present format: the header is new, and every tensor is copied byte for
byte."""

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
    """Return True if ``path`` is a bundle, of any format."""
    try:
        return path.is_file() and KEY_VERSION in GGUFFile(path).metadata
    except BundleError:
        return False


def upgrade(
    source: Path, out: Path, options: ConvertOptions, progress: Progress | None = None, **more: object
) -> tuple[Bundle, tuple[str, ...]]:
    """Write the bundle ``source`` in the present format. Return the new bundle, and notes about its differences.

    ``out`` may be ``source``; a symbolic link stays a link. The new file takes its name when it is complete and on the
    disk. Exported graphs, proofs and FP8 scales of the old file are not valid for the new file.

    Raises :class:`ConvertError` if there are options or other arguments (``more``) that are valid for checkpoints only,
    for a bundle of the present format, and for a damaged bundle.
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
    written = Bundle(target)
    if written.manifest != opened.manifest or (opened.hashes or written.hashes) != written.hashes:
        raise AssertionError("an upgraded bundle reads as another one")
    news = "; ".join(NEWS[version] for version in range(before + 1, now + 1))
    hashes = "" if opened.hashes else ", which had no hashes and have them now"
    notes = (f"format {before} to {now} ({news})", f"{len(written.infos)} tensors as they were{hashes}")
    return written, notes

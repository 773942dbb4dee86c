"""Rewrite a bundle of an older format in the current format: the header is new, and every tensor is copied byte for
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
    """Write the bundle ``source`` in the current format.

    The new file replaces ``out`` when it is complete and on the disk. Exported graphs, proofs and FP8 scales of the old
    file are not valid for the new file.

    Args:
        source: A bundle of an older format.
        out: The file to write. It may be ``source``. A symbolic link remains a link.
        options: Options of the conversion. An older bundle accepts none.
        progress: Called with the number of bytes that were just written.
        **more: Further arguments, which only checkpoints accept.

    Returns:
        The new bundle, and notes about its differences.

    Raises:
        ConvertError: There are options, the bundle has the current format already, or the bundle is damaged.
    """
    for name in (*options.non_defaults, *(name for name, value in more.items() if value)):
        raise ConvertError(
            f"--{name.replace('_', '-')}: expected a checkpoint, got the bundle {source}; omit this option"
        )
    opened = Bundle(source.resolve())
    before, now = opened.file.metadata[KEY_VERSION], READS[-1]
    if before == now:
        raise ConvertError(
            f"{source}: expected a checkpoint or a bundle before format {now}, got one of format {now}, which needs no"
            " conversion"
        )
    # Stop here if a tensor is damaged, because new hashes would make the damaged file look valid.
    if damaged := opened.verify() if opened.hashes is not None else ():
        raise ConvertError(
            f"{source}: {len(damaged)} tensors are damaged, {damaged[0]} first; nothing was written. Copy or convert"
            " the bundle again"
        )
    target = opened.path if out.exists() and out.samefile(source) else out
    rewrite(opened, opened.manifest, target, progress, durable=True)
    written = Bundle(target)
    if written.manifest != opened.manifest or (opened.hashes or written.hashes) != written.hashes:
        raise AssertionError("the upgraded bundle has other contents than the old bundle; please report this")
    news = "; ".join(NEWS[version] for version in range(before + 1, now + 1))
    hashes = "" if opened.hashes else ", and their hashes were added"
    notes = (f"format {before} to {now} ({news})", f"{len(written.infos)} tensors are unchanged{hashes}")
    return written, notes

"""``sinew upgrade``: a bundle of an older format in the present one, on disk. Verbs read both alike."""

from __future__ import annotations

from pathlib import Path

from sinew import progress
from sinew.cli import terminal
from sinew.core import SinewError


def upgrade(bundle: Path, /, *, out: Path | None = None) -> int:
    """Rewrite a bundle of an older format in the present one: the header anew, every tensor byte for byte.

    Every verb reads older formats as they are; this is for files that other programs shall read, or that are kept. The
    new file takes its name when it is complete and on the disk. Exported graphs, proofs and FP8 scales of the old file
    are not the new one's and are made again.

    Args:
        bundle: a bundle's file.
        out: file to write, which is not there yet; the bundle itself is replaced if absent.
    """
    from sinew.bundle import Bundle
    from sinew.bundle.schema import KEY_VERSION
    from sinew.bundle.upgrade import NEWS, READS
    from sinew.bundle.writer import rewrite

    if not bundle.is_file():
        raise SinewError(
            f"{bundle}: expected a bundle's file, got {'a folder' if bundle.is_dir() else 'none'}"
        )
    if out is not None and out.exists():
        raise SinewError(f"--out {out}: expected a file that is not there yet")
    path = bundle.resolve()  # a link stays one
    opened = Bundle(path)
    before, now = opened.file.metadata[KEY_VERSION], READS[-1]
    target = out or path
    record = {"bundle": str(bundle), "from": before, "to": now, "tensors": len(opened.infos)}
    console = terminal.console(markup=False)
    if before == now:
        console.print(f"{bundle}: of format {now} already; nothing was written")
        terminal.emit({**record, "written": None})
        return 0
    if opened.hashes is not None:  # new hashes would bless what is damaged
        with progress.task(f"comparing {bundle} with its hashes"):
            changed = opened.verify()
        if changed:
            raise SinewError(
                f"{bundle}: {len(changed)} tensors differ from what was written, {changed[0]} first;"
                " nothing was written"
            )
    with progress.task(f"writing {target}"):
        rewrite(opened, opened.manifest, target, durable=True)
    made = Bundle(target)
    if made.manifest != opened.manifest or (opened.hashes or made.hashes) != made.hashes:
        raise AssertionError("an upgraded bundle reads as another one")
    told = "; ".join(NEWS[version] for version in range(before + 1, now + 1))
    console.print(f"{out or bundle}: format {before} to {now} ({told})")
    hashes = "" if opened.hashes else ", which had no hashes and have them now"
    console.print(
        f"  {len(made.infos)} tensors as they were{hashes}; the header is new, so its hash is another"
    )
    terminal.emit(
        {**record, "written": str(target), "changes": [NEWS[v] for v in range(before + 1, now + 1)]}
    )
    return 0

"""``sinew hub pull`` and ``sinew hub push``: download bundles from the Hugging Face hub, and upload them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.options import Flag
from sinew.convert.sources import hub, resolve
from sinew.core import SinewError, progress


def pull(name: str, /, *, out: Path | None = None) -> int:
    """Download a policy from the hub, convert it if it is a checkpoint, and compare every tensor with its hash.

    Other commands download hub names by themselves. Use this command before a robot goes offline.

    Args:
        name: Repository to download: ORG/NAME or hf://ORG/NAME[@REVISION][/FILE.gguf].
        out: File to copy the bundle to. Default: it stays in the cache, and Sinew prints its path.
    """
    from sinew.bundle import Bundle

    parsed = _parse(name)
    if out is not None and out.exists():
        raise SinewError(f"--out {out}: the file exists; choose another name")
    bundle = resolve(str(parsed))
    if not bundle.is_file():
        raise SinewError(
            f"{parsed}: expected a bundle or a checkpoint, got a folder of `sinew export`; pass it to `sinew serve`"
        )
    opened = Bundle(bundle)
    with progress.task(f"comparing {bundle} with its hashes"):
        damaged = opened.verify()
    if damaged:
        raise SinewError(
            f"{parsed}: {len(damaged)} tensors are damaged, {damaged[0]} first; remove {bundle.resolve()} and run the"
            " command again"
        )
    if out is not None:
        bundle = hub.copy(bundle, out)
    manifest = opened.manifest
    compared = "every tensor is unchanged" if opened.hashes else "it has no hashes to compare with"
    terminal.console(markup=False).print(
        f"{bundle}: {manifest.name} ({manifest.architecture}), {bundle.stat().st_size / 1e6:.1f} MB; {compared}"
    )
    terminal.emit(
        {"source": str(parsed), "bundle": str(bundle), "name": manifest.name, "verified": bool(opened.hashes)}
    )
    return 0


def push(
    bundle: Path,
    name: str,
    /,
    *,
    report: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    license: str = "",  # noqa: A002 - the hub uses this word
    base_model: str = "",
    dataset: str = "",
    private: Flag = False,
    card: Path | None = None,
    dry: Flag = False,
) -> int:
    """Upload a bundle with a model card: its inputs, its origin, and the measurements of this file.

    The card includes the validations that `sinew validate` stored on this machine. The token for the hub is that of
    `hf auth login`, or HF_TOKEN.

    Args:
        bundle: Policy to upload: a bundle, a checkpoint or a training run.
        name: Repository: ORG/NAME or hf://ORG/NAME[@BRANCH]. Sinew creates it if it does not exist.
        report: report.json of `sinew validate --out` or `sinew eval --out` for this bundle. Repeatable.
        license: Licence of the weights in the hub's spelling: apache-2.0, mit, ...
        base_model: Hub name of the model that was fine-tuned.
        dataset: Hub name of the training data set.
        private: Create a private repository.
        card: File to which the model card is also written.
        dry: Upload nothing.
    """
    from sinew.bundle import Bundle
    from sinew.bundle.digests import sha256
    from sinew.convert.sources import card as cards

    parsed = _parse(name)
    if parsed.file is not None:
        raise SinewError(f"{name}: expected a repository, got a file in a repository; pass ORG/NAME")
    path = resolve(bundle)
    if not path.is_file():
        raise SinewError(
            f"{bundle}: expected a bundle with weights, got a folder of `sinew export`; pass the bundle"
        )
    opened = Bundle(path)
    with progress.task(f"reading {path}"):
        digest = sha256(path, path.stat().st_size)
    records = cards.records_of(path, report, digest)
    facts = {"license": license, "base_model": base_model, "datasets": dataset}
    text = cards.card(opened, digest, records, parsed.repository, facts)
    if card is not None:
        if card.exists() and card.samefile(path):
            raise SinewError(f"--card {card}: this is the bundle; choose another file for the card")
        card.write_text(text, encoding="utf-8")
    console = terminal.console(markup=False)
    url = None
    if dry:
        console.print(text)
    else:
        files: dict[str, Path | bytes] = {hub.BUNDLE: path, "README.md": text.encode()}
        message = f"{opened.manifest.name}: bundle and card"
        url = hub.push(parsed, files, message, private)
        console.print(f"{url}: {hub.BUNDLE} ({path.stat().st_size / 1e6:.1f} MB) and README.md")
    terminal.emit(
        {
            "repository": parsed.repository,
            "commit": url,
            "bundle": str(path),
            "sha256": digest,
            "records": len(records),
        }
    )
    return 0


def _parse(name: str) -> hub.HubName:
    if (parsed := hub.parse(name)) is None:
        raise SinewError(f"{name}: expected ORG/NAME or hf://ORG/NAME[@REVISION]")
    return parsed

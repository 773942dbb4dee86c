"""Download and upload policies on the Hugging Face hub.

A name is ``org/name[@revision]`` or ``hf://org/name[@revision][/file.gguf]``. ``huggingface_hub`` downloads files into
its own cache. If the hub cannot be reached, the files in this cache are used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinew.convert import CHECKPOINT_FILES
from sinew.convert.sources.identity import sha256
from sinew.core import SinewError, progress, scratch
from sinew.core.extras import MissingPackageError

# The hub returns these statuses if the user cannot read the repository. Any other status is a failure of the hub or of
# a proxy in front of it.
REFUSED = (401, 403, 404)
BUNDLE = "policy.gguf"  # the default name of a repository's bundle
TIMEOUT_S = 10.0  # timeout of the first request, because robots are often offline
MAX_NAMED = 10  # an error lists at most this many files of a repository
MAX_WORDS = 300  # an error shows at most this many characters of the hub's own error
# The pattern also accepts `hf:/`, because pathlib turns `hf://` into it. A name on the hub begins and ends with a
# letter, a digit or _.
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<hub>hf://?)?(?P<repository>{_WORD}/{_WORD})(?:@(?P<revision>[A-Za-z0-9][\w./-]*?))?"
    r"(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True)
class HubName:
    """A repository on the hub.

    Attributes:
        repository: The repository, ORG/NAME.
        revision: The revision; None for the main branch.
        file: The bundle's file in the repository; None to look for the bundle.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision, file = f"@{self.revision}" if self.revision else "", f"/{self.file}" if self.file else ""
        return f"hf://{self.repository}{revision}{file}"


def parse(text: str) -> HubName | None:
    """Return the repository that ``text`` names; None if ``text`` is not a name on the hub."""
    match = _NAME.fullmatch(text)
    if match is None or (not match["hub"] and (match["file"] or text.endswith((".gguf", ".safetensors")))):
        return None
    if ".." in text or "--" in match["repository"]:
        return None
    return HubName(match["repository"], match["revision"], match["file"])


def fetch(name: HubName) -> Path:
    """Return the bundle of a repository, or the folder of its checkpoint. Files come from the hub or from its cache.

    Nothing is downloaded if the disk has too little free space. Downloaded files are compared with the size and the
    SHA-256 that the hub states.

    Raises:
        MissingPackageError: huggingface_hub is not installed.
        SinewError: The repository or the revision does not exist, or the hub cannot be reached and the cache has no
            copy.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise MissingPackageError(
            f"{name}: no such file or folder on this machine, and the hub", "huggingface_hub"
        ) from None
    try:
        info = HfApi().model_info(
            name.repository, revision=name.revision, timeout=TIMEOUT_S, files_metadata=True
        )
        files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status not in REFUSED:
            return _cached(
                name, f"the hub {constants.ENDPOINT} answers with status {status} ({_words(error)})"
            )
        raise SinewError(
            f"{name}: no file or folder here, and the hub answers: {_words(error)}; check the name, or log in with"
            " `hf auth login`"
        ) from None
    except Exception as error:  # noqa: BLE001 - the hub cannot be reached: many types across versions
        return _cached(name, f"the hub {constants.ENDPOINT} cannot be reached ({_words(error)})")
    bundle = _bundle_of(name, list(files))
    new = _new(name, [each for each in files.values() if _wanted(each.rfilename, bundle)], info.sha)
    nbytes = sum(each.size or 0 for each in new)
    _refuse_without_room(name, nbytes, Path(constants.HF_HUB_CACHE))
    size = f", {nbytes / 1e6:.1f} MB to fetch" if nbytes else ""
    progress.say(f"{name}: from the hub {constants.ENDPOINT}{size}")
    fetched = _fetched(name, bundle)
    folder = fetched if bundle is None else fetched.parents[bundle.count("/")]
    for each in new:
        _compare(name, folder, each)
    return fetched


def copy(bundle: Path, out: Path) -> Path:
    """Copy a bundle to ``out`` and return that path. The copy is written next to ``out`` and renamed when it is
    complete, so ``out`` is never incomplete.
    """
    try:
        with scratch.beside(out) as folder:
            shutil.copyfile(bundle, folder / out.name)
            os.replace(folder / out.name, out)
    except OSError as error:
        raise SinewError(f"--out {out}: {error.strerror}") from None
    return out


def push(name: HubName, files: Mapping[str, Path | bytes], message: str, private: bool = False) -> str:
    """Upload files as one commit, and return the commit's address. The repository is created if it is missing.

    Args:
        name: The repository.
        files: Name in the repository -> local file, or content.
        message: Message of the commit.
        private: Create a private repository.

    Raises:
        MissingPackageError: huggingface_hub is not installed.
        SinewError: The upload failed. The token is huggingface_hub's own (HF_TOKEN, or `hf auth login`).
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise MissingPackageError("the hub", "huggingface_hub") from None
    api = HfApi(library_name="sinew")
    operations = [
        CommitOperationAdd(path_in_repo=where, path_or_fileobj=what) for where, what in files.items()
    ]
    try:
        with progress.task(f"uploading to {name}"):
            api.create_repo(name.repository, private=private, exist_ok=True)
            return str(
                api.create_commit(
                    name.repository, operations, commit_message=message, revision=name.revision
                ).commit_url
            )
    except HfHubHTTPError as error:
        raise SinewError(f"{name}: the hub answers: {_words(error)}") from None
    except Exception as error:  # noqa: BLE001 - the hub or a file cannot be read: many types across versions
        raise SinewError(
            f"{name}: not uploaded to {constants.ENDPOINT} ({_words(error)}); run the command again"
        ) from None


def _wanted(file: str, bundle: str | None) -> bool:
    from huggingface_hub.utils import filter_repo_objects

    return (
        file == bundle
        if bundle
        else any(filter_repo_objects([file], allow_patterns=CHECKPOINT_FILES.split()))
    )


def _new(name: HubName, files: Sequence[Any], commit: str | None) -> list[Any]:
    """Return those files of a repository that are not in this machine's cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    return [
        each
        for each in files
        if not isinstance(try_to_load_from_cache(name.repository, each.rfilename, revision=commit), str)
    ]


def _refuse_without_room(name: HubName, nbytes: int, cache: Path) -> None:
    there = next(each for each in (cache, *cache.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise SinewError(
            f"{name}: expected at most {free / 1e9:.1f} GB, the free space in {cache}, got {nbytes / 1e9:.1f} GB; free"
            " some space, or set HF_HOME to a folder on another disk"
        )


def _compare(name: HubName, folder: Path, file: Any) -> None:
    """Check a downloaded file against the size and the hash that the hub states.

    Args:
        name: The repository.
        folder: The folder of the download.
        file: The hub's record of the file.

    Raises:
        SinewError: Size or hash differ. The file is removed from the cache.
    """
    path, expected_hash = folder / file.rfilename, getattr(file.lfs, "sha256", None)
    if not path.is_file() or file.size is None:
        return  # huggingface_hub did not download the file, or the hub does not state its size
    size = path.stat().st_size
    got = sha256(path, size) if expected_hash and size == file.size else None
    if size == file.size and got == expected_hash:
        return
    blob = path.resolve()
    path.unlink()
    # If the file is a link into the cache, remove its content too. On systems without links, the file is the content.
    if blob.parent == folder.parent.parent / "blobs":
        blob.unlink(missing_ok=True)
    got_text = f"{size} bytes" if got is None else f"SHA-256 {got}"
    expected = f"{file.size} bytes" if got is None else f"SHA-256 {expected_hash}"
    raise SinewError(
        f"{name}: {file.rfilename}: expected {expected} as the hub states, got {got_text}; the file was removed, run"
        " the command again"
    )


def _fetched(name: HubName, file: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        with progress.task(f"fetching {name}"):
            if file is not None:
                # End the download with an exception on a signal, so that huggingface_hub removes incomplete files.
                with scratch.ended_by_signals():
                    return Path(hf_hub_download(name.repository, file, revision=name.revision))
            return Path(
                snapshot_download(
                    name.repository, allow_patterns=CHECKPOINT_FILES.split(), revision=name.revision
                )
            )
    except Exception as error:  # noqa: BLE001 - network, access, disk: many types across versions
        raise SinewError(
            f"{name}: could not be fetched from the hub ({_words(error)}); run the command again to continue"
        ) from None


def _cached(name: HubName, reason: str) -> Path:
    """Return the bundle or the checkpoint folder of a repository from this machine's cache of the hub. It is used if
    the hub does not answer.

    Args:
        name: The repository.
        reason: Why the hub does not answer, for messages.

    Raises:
        SinewError: The cache has no complete copy, or the repository has several bundles.
    """
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    file = try_to_load_from_cache(name.repository, name.file or BUNDLE, revision=name.revision)
    try:
        if isinstance(file, str):
            path = Path(file)
        elif name.file is None:
            folder = Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
            bundle = _bundle_of(name, [each.relative_to(folder).as_posix() for each in folder.rglob("*")])
            path = folder if bundle is None else folder / bundle
        else:
            raise FileNotFoundError(name.file)
    except SinewError:
        raise  # _bundle_of has already explained that the repository has several bundles
    except Exception:  # noqa: BLE001 - the copy is missing or incomplete: many types across versions
        raise SinewError(
            f"{name}: no file or folder here, {reason}, and its cache {constants.HF_HUB_CACHE} does not have it;"
            f" run `hf download {name.repository} --local-dir DIR` on a machine that can reach the hub, and pass DIR"
        ) from None
    progress.say(f"{name}: {reason}; using the copy in the hub's cache {constants.HF_HUB_CACHE}")
    return path


def _bundle_of(name: HubName, files: list[str]) -> str | None:
    """Return the name of the bundle among a repository's files; None if the repository contains a checkpoint instead.

    Raises:
        SinewError: The repository contains several bundles.
    """
    if name.file is not None:
        if name.file not in files:
            raise SinewError(
                f"{name}: expected one of the repository's files {_named(files)}, got {name.file}"
            )
        return name.file
    bundles = [file for file in files if file.endswith(".gguf") and "/" not in file]
    if BUNDLE in bundles:
        return BUNDLE
    if "config.json" in files or not bundles:
        return None
    if len(bundles) > 1:
        raise SinewError(
            f"{name}: expected one bundle, got {_named(bundles)}; choose one with hf://{name.repository}/FILE"
        )
    return bundles[0]


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
    return ", ".join(each[:100] for each in sorted(files)[:MAX_NAMED]) + more


def _words(error: Exception) -> str:
    """Return the first line of an error's message; the name of the error's class if the message is empty."""
    lines = [line for line in str(error).strip().splitlines() if line and "Client Error" not in line]
    return next(iter(lines), "")[:MAX_WORDS] or type(error).__name__

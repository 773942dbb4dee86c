"""Names of the Hugging Face hub: ``org/name[@revision]`` and ``hf://org/name[@revision][/file.gguf]``.

Files come through ``huggingface_hub`` into its own cache, which also serves them where the hub is out of reach.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sinew import progress
from sinew.convert import CHECKPOINT_FILES
from sinew.core import MissingPackageError, SinewError

REFUSED = (401, 403, 404)  # it has none for us; with anything else it is ill, or something before it is
BUNDLE = "policy.gguf"  # what a repository calls its bundle, unless it has a single other one
TIMEOUT_S = 10.0  # of the first question; robots are often offline
# `hf:/` is what is left of `hf://` in a path. A name of the hub begins and ends with a letter, a digit or _.
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<hub>hf://?)?(?P<repository>{_WORD}/{_WORD})(?:@(?P<revision>[A-Za-z0-9][\w./-]*?))?"
    r"(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Name:
    """A repository, and what of it: ``revision`` (None: its main branch) and ``file`` (None: to be found)."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision, file = f"@{self.revision}" if self.revision else "", f"/{self.file}" if self.file else ""
        return f"hf://{self.repository}{revision}{file}"


def parse(text: str) -> Name | None:
    """Return the repository that ``text`` names, or None where it is no name of the hub."""
    found = _NAME.fullmatch(text)
    if found is None or (not found["hub"] and (found["file"] or text.endswith((".gguf", ".safetensors")))):
        return None
    if ".." in text or "--" in found["repository"]:
        return None
    return Name(found["repository"], found["revision"], found["file"])


def fetch(name: Name) -> Path:
    """Return the bundle of a repository, or the folder of its checkpoint, fetched or from the hub's cache.

    Raises :class:`MissingPackageError` without huggingface_hub, and :class:`SinewError` where the repository, the
    revision or the hub is not there.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise MissingPackageError(
            f"{name}: no such file or folder here, and the hub", "huggingface_hub"
        ) from None
    try:
        found = HfApi().model_info(name.repository, revision=name.revision, timeout=TIMEOUT_S)
        files = [sibling.rfilename for sibling in found.siblings or ()]
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status not in REFUSED:
            return _cached(
                name, f"the hub {constants.ENDPOINT} answers with status {status} ({_words(error)})"
            )
        raise SinewError(f"{name}: no file or folder here, and the hub says: {_words(error)}") from None
    except Exception as error:  # noqa: BLE001 - what cannot be reached: many types across versions
        return _cached(name, f"the hub {constants.ENDPOINT} cannot be reached ({_words(error)})")
    progress.say(f"{name}: from the hub {constants.ENDPOINT}")
    return _fetched(name, _bundle_of(name, files))


def push(name: Name, files: Mapping[str, Path | bytes], message: str, private: bool = False) -> str:
    """Upload files as one commit, making the repository where there is none, and return the commit's address.

    files: name in the repository -> file here, or its content. The hub's token is huggingface_hub's own (HF_TOKEN, or
    `hf auth login`). Raises :class:`MissingPackageError` and :class:`SinewError`.
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
    except HfHubHTTPError as error:  # it answers, and refuses
        raise SinewError(f"{name}: the hub says: {_words(error)}") from None
    except Exception as error:  # noqa: BLE001 - what cannot be reached or read: many types across versions
        raise SinewError(f"{name}: not uploaded to {constants.ENDPOINT} ({_words(error)})") from None


def _fetched(name: Name, file: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        with progress.task(f"fetching {name}"):
            if file is not None:
                return Path(hf_hub_download(name.repository, file, revision=name.revision))
            return Path(
                snapshot_download(name.repository, allow_patterns=CHECKPOINT_FILES, revision=name.revision)
            )
    except Exception as error:  # noqa: BLE001 - network, access, disk: many types across versions
        raise SinewError(f"{name}: could not be fetched from the hub ({_words(error)})") from None


def _cached(name: Name, reason: str) -> Path:
    """What the hub's cache has of a repository, where the hub does not answer."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    file = try_to_load_from_cache(name.repository, name.file or BUNDLE, revision=name.revision)
    try:
        if isinstance(file, str):
            found = Path(file)
        elif name.file is None:
            folder = Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
            bundle = _bundle_of(name, [each.relative_to(folder).as_posix() for each in folder.rglob("*")])
            found = folder if bundle is None else folder / bundle
        else:
            raise FileNotFoundError(name.file)
    except SinewError:
        raise  # it has several
    except Exception:  # noqa: BLE001 - not there, not complete: many types across versions
        raise SinewError(
            f"{name}: no file or folder here, {reason}, and its cache {constants.HF_HUB_CACHE} does not have it;"
            f" `hf download {name.repository} --local-dir DIR` where it can be reached, and give DIR"
        ) from None
    progress.say(f"{name}: {reason}; from its cache {constants.HF_HUB_CACHE}")
    return found


def _bundle_of(name: Name, files: list[str]) -> str | None:
    """Return which of a repository's files is its bundle; None for a checkpoint. Raises :class:`SinewError`."""
    if name.file is not None:
        if name.file not in files:
            raise SinewError(
                f"{name}: expected one of the repository's files {', '.join(files)}, got {name.file}"
            )
        return name.file
    bundles = [file for file in files if file.endswith(".gguf") and "/" not in file]
    if BUNDLE in bundles:
        return BUNDLE
    if "config.json" in files or not bundles:
        return None
    if len(bundles) > 1:
        raise SinewError(
            f"{name}: expected one bundle, got {', '.join(sorted(bundles))}; hf://{name.repository}/FILE takes one"
        )
    return bundles[0]


def _words(error: Exception) -> str:
    """Return the first line of an error, or its type."""
    lines = [line for line in str(error).strip().splitlines() if line and "Client Error" not in line]
    return next(iter(lines), "") or type(error).__name__

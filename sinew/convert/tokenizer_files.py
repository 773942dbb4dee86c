"""Find the tokenizer and the language model's configuration to which a checkpoint refers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sinew_client.typed_names import OutsideName, require_typed
from tokenizers import AddedToken, Tokenizer

from sinew.convert.options import ConvertOptions
from sinew.convert.read.bpe import bpe_tokenizer, is_bpe
from sinew.convert.read.files import read_json, read_text
from sinew.convert.read.sentencepiece import tokenizer_json
from sinew.core import ConvertError
from sinew.core.extras import install
from sinew.steps.tokenizer import open_tokenizer, tokenizer_record

# Allowed names of folders inside a checkpoint and of repositories on the hub. No part of such a name begins with a dot.
INSIDE = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?")
HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
# A checkpoint may name only models of these organisations on the hub. Published policies build on their models.
PUBLISHERS = (
    *("HuggingFaceTB", "Qwen", "nvidia", "OpenGVLab", "openai", "google", "microsoft"),
    "x-square-robot",
    "allenai",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a ``tokenizer.json``, with other facts that inference needs.

    Attributes:
        text: The content of ``tokenizer.json``.
        path: The file.
        pad_token_id: Id of the token that pads prompts; None if it is not stated.
        tokenizer: The tokenizer of ``text``.
        eos_token_id: Id of the token that ends a text; None if it is not stated.
        config: The content of ``tokenizer_config.json``.
    """

    text: str
    path: Path
    pad_token_id: int | None
    tokenizer: Tokenizer
    eos_token_id: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens in the text become their ids."""
        return self.tokenizer.encode(text).ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token.

        Raises:
            ConvertError: The tokenizer does not have this id.
        """
        text = self.tokenizer.id_to_token(token_id)
        if text is None:
            raise ConvertError(
                f"{self.path}: the tokenizer has no token of id {token_id}; pass the right one with --tokenizer"
            )
        return text

    def with_tokens(self, tokens: Sequence[str]) -> TokenizerFiles:
        """Return a tokenizer to which ``tokens`` were added as special tokens. Tokens that the tokenizer already has
        keep their ids."""
        tokenizer = Tokenizer.from_str(self.text)
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens])
        return replace(self, text=tokenizer.to_str(), tokenizer=tokenizer)

    def token_id(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ConvertError(
                f"{self.path}: the tokenizer has no token {token!r}; pass the policy's tokenizer with --tokenizer"
            )
        return number


def find_tokenizer(options: ConvertOptions, *beside: Path, whose: str = "it") -> TokenizerFiles:
    """Return the tokenizer of ``--tokenizer``, or of the checkpoint.

    Args:
        options: The user's options.
        *beside: Files or folders of the checkpoint. The first one with a tokenizer is used.
        whose: Text for the error message that names the owner of the tokenizer, such as "CLIP's".

    Raises:
        ConvertError: There is no tokenizer.
    """
    candidates = [options.tokenizer] if options.tokenizer else [*beside]
    return load_tokenizer(candidates, f"pass {whose} with --tokenizer FILE_OR_DIR")


def load_tokenizer(candidates: list[Path], missing: str) -> TokenizerFiles:
    """Return the tokenizer of the first candidate that contains a tokenizer.

    Args:
        candidates: Files or directories.
        missing: The next step for the user, at the end of the error's message.

    Raises:
        ConvertError: No candidate contains a tokenizer, or the tokenizer is not valid.
    """
    for candidate in candidates:
        path = candidate / "tokenizer.json" if candidate.is_dir() else candidate
        if candidate.is_dir() and not path.is_file() and is_bpe(candidate):
            path = candidate / "vocab.json"
        if path.is_file():
            break
    else:
        tried = ", ".join(str(candidate) for candidate in candidates) or "no folder"
        raise ConvertError(f"no tokenizer.json found (looked in {tried}); {missing}")
    if path.name == "vocab.json":
        text = bpe_tokenizer(path.parent)
    else:
        text = tokenizer_json(path) if path.suffix == ".model" else read_text(path)
    tokenizer = open_tokenizer(text, ConvertError, f"{path}: the tokenizer")
    config = path.with_name("tokenizer_config.json")
    settings = read_json(config) if config.exists() else {}
    pad, eos = (_token(settings.get(key)) for key in ("pad_token", "eos_token"))
    if pad is None:
        padding = tokenizer_record(text).get("padding")
        pad = padding.get("pad_token") if isinstance(padding, dict) else None
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else None for token in (pad, eos)]
    return TokenizerFiles(text, path, ids[0], tokenizer, ids[1], settings)


def _token(value: Any) -> Any:
    """Return the text of a token in tokenizer_config.json: a text, or a serialised AddedToken (a JSON object)."""
    return value.get("content") if isinstance(value, dict) else value


def find_model_dir(name: str, typed: Path | None, near: Path, flag: str, patterns: str) -> Path:
    """Return the directory of a model that a checkpoint names. It is the directory that the user typed, else a
    directory next to the checkpoint, else a download from the hub.

    A checkpoint's own configuration is untrusted data. It may not name a folder of this machine, and on the hub it may
    only name models of the organisations that the published policies build on. With the ``[hub]`` extra the files in
    ``patterns`` are downloaded, or taken from the hub's cache.

    Args:
        name: The model's name in the checkpoint.
        typed: The value of ``flag``: a directory, or a name on the hub; None if the user did not pass the flag.
        near: The path of the checkpoint.
        flag: The option's name, for messages.
        patterns: Patterns of file names, separated by spaces.

    Raises:
        ConvertError: There is no such model.
        UntypedNameError: The checkpoint names a folder of this machine or another organisation's model.
    """
    otherwise = f"pass a directory with its config.json and tokenizer.json with {flag} DIR"
    if typed is not None:
        return given_folder(typed, flag, patterns)
    if INSIDE.fullmatch(name):
        for parent in (near, near.parent):
            if (parent / name / "config.json").is_file():
                return parent / name
    if HUB_NAME.fullmatch(name) is None or name.partition("/")[0] not in PUBLISHERS:
        require_typed(near, [OutsideName("its configuration's model", name, flag)], {})
    return download(name, patterns, otherwise)


def given_folder(path: Path, flag: str, patterns: str, revision: str | None = None) -> Path:
    """Return the folder that a flag names: a folder of this machine, or a download of a hub repository.

    Args:
        path: The value of the flag: a folder, or ORG/NAME.
        flag: The option's name, for messages.
        patterns: Patterns of the files to download, separated by spaces.
        revision: Revision of the repository; None for the newest.

    Raises:
        ConvertError: There is neither such a folder nor such a repository.
    """
    if path.is_dir():
        return path
    if path.exists():
        raise ConvertError(f"{flag} {path}: expected a folder, got a file; pass the folder that contains it")
    if path.is_absolute() or len(path.parts) != 2:
        raise ConvertError(
            f"{flag} {path}: not a directory; expected a folder on this machine, or a hub name ORG/NAME"
        )
    try:
        return download(path.as_posix(), patterns, f"pass its folder with {flag} DIR", revision=revision)
    except ConvertError as error:
        raise ConvertError(f"{flag} {path}: no such folder on this machine, and {error}") from None


def download(
    name: str, patterns: str, otherwise: str, repo_type: str = "model", revision: str | None = None
) -> Path:
    """Download files of a Hugging Face repository, and return their folder.

    Args:
        name: The repository, ORG/NAME.
        patterns: Patterns of file names, separated by spaces.
        otherwise: The next step for the user, at the end of each error's message.
        repo_type: "model" or "dataset".
        revision: Revision of the repository; None for the newest.

    Raises:
        ConvertError: huggingface_hub is not installed, or the download failed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConvertError(
            f"{name!r} is not a local directory; {otherwise}, or install the hub extra ({install('huggingface_hub')})"
        ) from None
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns.split(), repo_type=repo_type, revision=revision)
        )
    except Exception as error:  # noqa: BLE001 - network, access, name: many types across versions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConvertError(f"{name!r} could not be fetched from the hub ({reason}); {otherwise}") from None

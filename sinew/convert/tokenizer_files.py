"""Find the tokenizer and the language model's config that a checkpoint refers to."""

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

# Names of folders inside a checkpoint, and names on the hub: no part begins with a dot.
INSIDE = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?")
HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
# Organisations on the hub whose models the published policies build on: a checkpoint may name models of these only.
PUBLISHERS = (
    *("HuggingFaceTB", "Qwen", "nvidia", "OpenGVLab", "openai", "google", "microsoft"),
    "x-square-robot",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a ``tokenizer.json``, with other facts that inference needs."""

    text: str
    path: Path
    pad_token_id: int | None
    tokenizer: Tokenizer
    eos_token_id: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # content of tokenizer_config.json

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens in the text become their ids."""
        return self.tokenizer.encode(text).ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token. Raises :class:`ConvertError` for an id that the tokenizer does not have."""
        text = self.tokenizer.id_to_token(token_id)
        if text is None:
            raise ConvertError(f"{self.path}: the tokenizer has no token of id {token_id}")
        return text

    def with_tokens(self, tokens: Sequence[str]) -> TokenizerFiles:
        """Return the tokenizer with special tokens appended. Tokens that the tokenizer already has keep their ids."""
        tokenizer = Tokenizer.from_str(self.text)
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens])
        return replace(self, text=tokenizer.to_str(), tokenizer=tokenizer)

    def token_id(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ConvertError(f"{self.path}: the tokenizer has no token {token!r}")
        return number


def find_tokenizer(options: ConvertOptions, *beside: Path, whose: str = "it") -> TokenizerFiles:
    """Return the tokenizer of ``--tokenizer``, or of the first file or folder ``beside`` the checkpoint that has one.

    ``whose`` names the tokenizer's owner, for the error message.
    """
    candidates = [options.tokenizer] if options.tokenizer else [*beside]
    return load_tokenizer(candidates, f"give {whose} with --tokenizer FILE_OR_DIR")


def load_tokenizer(candidates: list[Path], missing: str) -> TokenizerFiles:
    """Return the tokenizer of the first candidate (file or directory) that has one. If none has one, the text of the
    raised :class:`ConvertError` ends with ``missing``."""
    for candidate in candidates:
        path = candidate / "tokenizer.json" if candidate.is_dir() else candidate
        if candidate.is_dir() and not path.is_file() and is_bpe(candidate):
            path = candidate / "vocab.json"
        if path.is_file():
            break
    else:
        tried = ", ".join(str(candidate) for candidate in candidates) or "nothing"
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
    return value.get("content") if isinstance(value, dict) else value  # a dict is a serialised AddedToken


def find_model_dir(name: str, given: Path | None, near: Path, flag: str, patterns: str) -> Path:
    """Return the directory of a model that a checkpoint names. The directory is the one that the user typed, else a
    directory beside the checkpoint, else a download from the hub.

    A checkpoint's own configuration is untrusted data. It may not name a folder of this machine, and on the hub it may
    only name models of the organisations that the published policies build on. With the ``[hub]`` extra the files in
    ``patterns`` are downloaded, or taken from the hub's cache.

    Args:
        name: The model's name in the checkpoint.
        given: The value of ``flag``: a directory, or a name on the hub; None if the user typed none.
        near: The path of the checkpoint.
        flag: The option's name, for messages.
        patterns: Patterns of file names, separated by spaces.

    Raises:
        ConvertError: There is no such model.
        UntypedNameError: The checkpoint names another place.
    """
    otherwise = f"give a directory with its config.json and tokenizer.json with {flag} DIR"
    if given is not None:
        return given_folder(given, flag, patterns)
    if INSIDE.fullmatch(name):
        for parent in (near, near.parent):
            if (parent / name / "config.json").is_file():
                return parent / name
    if HUB_NAME.fullmatch(name) is None or name.partition("/")[0] not in PUBLISHERS:
        require_typed(near, [OutsideName("its configuration's model", name, flag)], {})
    return download(name, patterns, otherwise)


def given_folder(path: Path, flag: str, patterns: str, revision: str | None = None) -> Path:
    """Return the folder that a flag names: a folder of this machine, or a download of the hub's repository ORG/NAME.

    ``revision`` is the revision of the repository; None is the newest. Raises :class:`ConvertError` if there is neither
    a folder nor a repository.
    """
    if path.is_dir():
        return path
    if path.exists():
        raise ConvertError(f"{flag} {path}: expected a folder, got a file")
    if path.is_absolute() or len(path.parts) != 2:
        raise ConvertError(
            f"{flag} {path}: not a directory; expected a folder that is here, or a hub name ORG/NAME"
        )
    try:
        return download(path.as_posix(), patterns, f"give its folder with {flag} DIR", revision=revision)
    except ConvertError as error:
        raise ConvertError(f"{flag} {path}: no file or folder of this name is here, and {error}") from None


def download(
    name: str, patterns: str, otherwise: str, repo_type: str = "model", revision: str | None = None
) -> Path:
    """Return the folder with the files of a Hugging Face repository. Every error names the next step.

    ``patterns`` lists patterns of file names, separated by spaces.
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

"""Convert a Qwen2 tokenizer stored as vocab.json and merges.txt to the tokenizer.json of a bundle.

Source: transformers ``convert_slow_tokenizer.py`` (``Qwen2Converter``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sinew.convert.read.files import read_json, read_text
from sinew.core import ConvertError

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def is_bpe(directory: Path) -> bool:
    """Return True for a directory with vocab.json and merges.txt."""
    return (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()


def bpe_tokenizer(directory: Path) -> str:
    """Return the tokenizer.json of a directory with vocab.json, merges.txt and tokenizer_config.json.

    Raises:
        ConvertError: A file is not valid, or the tokenizer has another class, which would split text differently.
    """
    config = read_json(directory / "tokenizer_config.json")
    if config.get("tokenizer_class") not in CLASSES:
        raise ConvertError(
            f"{directory}: expected a tokenizer.json, or the files of a Qwen2Tokenizer; got the files of"
            f" {config.get('tokenizer_class')!r}. Save tokenizer.json with the model's fast tokenizer"
        )
    vocab = read_json(directory / "vocab.json")
    lines = read_text(directory / "merges.txt").splitlines()
    pairs = [
        (a, b) for a, _, b in (line.partition(" ") for line in lines if not line.startswith("#version")) if b
    ]
    added: dict[str, Any] = config.get("added_tokens_decoder") or {}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, fuse_unk=False, byte_fallback=False))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        for number, entry in sorted(added.items(), key=lambda item: int(item[0])):
            flags = {
                name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            (tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens)([token])
            if tokenizer.token_to_id(entry["content"]) != int(number):
                raise ConvertError(
                    f"{directory}: token {entry['content']!r} has id {number} in tokenizer_config.json, and vocab.json"
                    " gives another id; copy both files from one model"
                )
        return tokenizer.to_str()
    except ConvertError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ConvertError(
            f"{directory}: vocab.json and merges.txt are not a valid tokenizer ({error}); download both files again"
        ) from None

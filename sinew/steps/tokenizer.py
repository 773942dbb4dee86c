"""Open a tokenizer from an untrusted file.

The work of the tokenizer is limited, and a crash (panic) of its Rust code becomes a Python error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sinew_client.untrusted import parse_json
from sinew_client.untrusted.texts import MAX_TOKENIZER_VALUES

from sinew.core import BundleError, SinewError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_GROWTH = 64  # largest number of characters that normalisation may make of one character
MAX_SPECIAL = 256  # largest number of tokens that post-processing may add
MAX_DEPTH = 32
MAX_NESTING = 4 * MAX_DEPTH  # largest depth of the JSON; each step is an object in a list
TRIAL = "Pick up the red cube, then stop.\n" + "a" * 200 + " " * 200 + "1" * 200 + "!" * 200 + "é中"


def tokenizer_record(text: str) -> Any:
    """Parse a ``tokenizer.json``. Unlike in standard JSON, scores may be infinite.

    Raises:
        UntrustedError: The text is not valid JSON, or is too large.
    """
    return parse_json(text, max_depth=MAX_NESTING, max_values=MAX_TOKENIZER_VALUES, finite=False)


def open_tokenizer(
    text: str, error: type[SinewError] = BundleError, where: str = "the tokenizer"
) -> Tokenizer:
    """Return the tokenizer that a ``tokenizer.json`` describes, after a test.

    Truncation and padding, which a training run may have stored in the file, are removed.

    Args:
        text: The content of the file.
        error: Class of the errors.
        where: The tokenizer's name in error messages.

    Raises:
        SinewError: The text is not a tokenizer, the tokenizer would multiply its input or use random numbers, or it
            cannot encode a short text.
    """
    # Import the package here, because policies whose clients send token ids do not need it.
    from tokenizers import Tokenizer

    try:
        record = tokenizer_record(text)
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        record["truncation"] = record["padding"] = None
        for problem in _problems(record):
            raise ValueError(problem)
        tokenizer = Tokenizer.from_str(json.dumps(record))
        ids = tokenizer.encode(TRIAL).ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # noqa: BLE001 - Rust's panics are no Exception
        raise error(f"{where} cannot be read: {_reason(problem)}") from None
    if len(ids) > MAX_SPECIAL + 4 * len(TRIAL.encode()):
        raise error(
            f"{where} converts {len(TRIAL)} characters to {len(ids)} tokens, which is too many; use the model's"
            " original file"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of ``text``.

    Raises:
        ValueError: The tokenizer failed, for example with a panic.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except (KeyboardInterrupt, SystemExit, UnicodeEncodeError, TypeError):
        raise
    except BaseException as problem:  # noqa: BLE001 - Rust's panics are no Exception
        raise ValueError(_reason(problem)) from None


def decode(tokenizer: Tokenizer, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Return the text of tokens. Ids after the last id of the tokenizer are ignored.

    Raises:
        ValueError: The tokenizer failed, for example with a panic.
    """
    try:
        return tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # noqa: BLE001 - Rust's panics are no Exception
        raise ValueError(_reason(problem)) from None


def _reason(problem: BaseException) -> str:
    text = str(problem).strip()
    return text.splitlines()[0][:200] if text else type(problem).__name__


def _problems(record: dict[str, Any]) -> Iterator[str]:
    model = record.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        yield f"model.dropout: expected none, got {model['dropout']!r}; with dropout the tokens are random"
    growth = 1.0
    for step in _flat(record.get("normalizer"), "normalizers"):
        growth *= _growth(step)
    if growth > MAX_GROWTH:
        yield f"normalizer: expected at most {MAX_GROWTH} characters from one character, got {growth:.3g}"
    special, sequences = 0, 1
    for step in _flat(record.get("post_processor"), "processors"):
        if step.get("type") != "TemplateProcessing":
            special += 4
            continue
        single = [piece for piece in step.get("single", ()) if isinstance(piece, dict)]
        copies = sum("Sequence" in piece for piece in single)
        tokens = step.get("special_tokens")
        longest = max(map(_id_count, tokens.values()), default=0) if isinstance(tokens, dict) else 0
        special = special * max(copies, 1) + (len(single) - copies) * longest
        sequences *= copies
    if sequences > 1 or special > MAX_SPECIAL:
        yield (
            f"post_processor: expected one text and at most {MAX_SPECIAL} special tokens, got {sequences} and"
            f" {special}"
        )


def _id_count(token: Any) -> int:
    ids = token.get("ids") if isinstance(token, dict) else None
    return len(ids) if isinstance(ids, list) else 1


def _flat(step: Any, members: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    if depth > MAX_DEPTH:
        raise ValueError(f"expected {members} with at most {MAX_DEPTH} levels, got more levels")
    if not isinstance(step, dict):
        return
    if isinstance(step.get(members), list):
        for member in step[members]:
            yield from _flat(member, members, depth + 1)
    else:
        yield step


def _growth(step: dict[str, Any]) -> float:
    """Return the largest number of characters that one normalisation step can make of one character."""
    if step.get("type") != "Replace":
        return 1.0
    content, pattern = str(step.get("content", "")), step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    return 1.0 + len(content)  # a regular expression may match between any two characters

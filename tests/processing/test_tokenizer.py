"""A stranger's tokenizer is opened within bounds, each tried on both sides; what its library panics at is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sinew.core import BundleError, SinewError
from sinew.steps.tokenizer import TRIAL, decode, encode, open_tokenizer

WORDS = {"[UNK]": 0, "[CLS]": 1, "pick": 2, "up": 3}
EACH = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}


def written(**changes: Any) -> str:
    """Return a tokenizer of words."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    record = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "[CLS]", **special}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
    }
    return json.dumps(record | changes)


def replaced(pattern: dict[str, str], count: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "b" * count}


def nested(depth: int) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def template(pieces: int, ids: int = 1) -> dict[str, Any]:
    """Return what adds ``pieces`` times ``ids`` tokens to a text."""
    token = {"id": "[CLS]", "ids": [1] * ids, "tokens": ["[CLS]"] * ids}
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * pieces
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*single, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[CLS]": token},
    }


def several(*steps: dict[str, Any], members: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", members: list(steps)}


BERT = {"type": "BertProcessing", "sep": ["[CLS]", 1], "cls": ["[CLS]", 1]}


@pytest.mark.parametrize(
    ("part", "taken", "refused", "why"),
    [
        (
            "normalizer",
            replaced({"String": "a"}, 64),
            replaced({"String": "a"}, 65),
            "64 characters .* got 65",
        ),
        ("normalizer", replaced({"String": "ab"}, 128), replaced({"String": "ab"}, 130), "got 65"),
        ("normalizer", replaced({"Regex": "q"}, 63), replaced({"Regex": "q"}, 64), "got 65"),
        (
            "normalizer",
            several(
                replaced({"String": "q"}, 8), replaced({"String": "z"}, 8), replaced({"String": "aa"}, 1)
            ),
            several(replaced({"String": "q"}, 8), replaced({"String": "z"}, 9)),
            "got 72",
        ),
        (
            "normalizer",
            several(*[{"type": "Lowercase"}] * 7),  # which makes one of one
            several({"type": "Lowercase"}, replaced({"String": "aaaa"}, 1), replaced({"String": "q"}, 65)),
            "got 65",
        ),
        ("normalizer", nested(32), nested(33), "expected normalizers with at most 32 levels"),
        (
            "post_processor",
            template(256),
            template(257),
            "one text and at most 256 special tokens, got 1 and 257",
        ),
        ("post_processor", template(2, 128), template(2, 129), "got 1 and 258"),
        (
            "post_processor",
            several(*[BERT] * 64, members="processors"),
            several(*[BERT] * 65, members="processors"),
            "got 1 and 260",
        ),
        (
            "post_processor",
            several(BERT, template(252), members="processors"),
            several(BERT, template(253), members="processors"),
            "got 1 and 257",
        ),
    ],
)
def test_bounds(part: str, taken: dict[str, Any], refused: dict[str, Any], why: str) -> None:
    assert open_tokenizer(written(**{part: taken})).encode("pick").ids
    with pytest.raises(BundleError, match=f"^the tokenizer cannot be read: .*{why}"):
        open_tokenizer(written(**{part: refused}))


@pytest.mark.parametrize(
    ("part", "refused", "why"),
    [
        ("normalizer", replaced({"String": ""}, 99), "got 100"),
        (
            "post_processor",
            template(2) | {"special_tokens": {"a": {"ids": []}, "b": {"ids": [1] * 200}}},
            "400",
        ),
        ("post_processor", template(257) | {"special_tokens": {"[CLS]": {}}}, "got 1 and 257"),
        (
            "post_processor",
            several(*[BERT] * 64, template(1) | {"single": template(1)["single"][:1]}, members="processors"),
            "got 0 and 257",
        ),
    ],
)
def test_bounds_of_what_its_library_would_refuse_too(part: str, refused: dict[str, Any], why: str) -> None:
    """They are looked at first: the library may take long, or all memory, to come to that."""
    with pytest.raises(BundleError, match=why):
        open_tokenizer(written(**{part: refused}))


class Failing:
    """A tokenizer that raises what it is given."""

    def __init__(self, error: BaseException):
        self.error = error

    def encode(self, *_: Any, **__: Any) -> None:
        raise self.error

    decode = encode


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("x" * 300 + "\nsecond line"), "x" * 200),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_reason_is_one_line(error: Exception, why: str) -> None:
    failing: Any = Failing(error)
    for ask in (lambda: encode(failing, "pick", False), lambda: decode(failing, [1])):
        with pytest.raises(ValueError, match="^") as caught:
            ask()
        assert str(caught.value) == why


def test_who_interrupts_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: Any = Failing(KeyboardInterrupt())
    for ask in (lambda: encode(failing, "pick", False), lambda: decode(failing, [1])):
        with pytest.raises(KeyboardInterrupt):
            ask()
    monkeypatch.setattr("sinew.steps.tokenizer.tokenizer_record", failing.encode)
    with pytest.raises(KeyboardInterrupt):
        open_tokenizer("{}")


def test_the_text_may_stand_once() -> None:
    twice = template(1)
    twice["single"] = twice["single"] + [twice["single"][-1]]
    with pytest.raises(BundleError, match="expected one text and at most 256 special tokens, got 2 and 1"):
        open_tokenizer(written(post_processor=twice))


def test_a_trial_counts_tokens() -> None:
    """Each character is a token, of which four and more are made: up to four for each byte, and a template's."""
    for count in (1, 4):
        grown = written(pre_tokenizer=EACH, normalizer=replaced({"Regex": "."}, count))
        assert open_tokenizer(grown).encode("ab").ids == [0] * (2 * count)
    with pytest.raises(
        BundleError,
        match=rf"^it converts {len(TRIAL)} characters to 4\d\d\d tokens, which is too many; "
        "use the model's original file$",
    ):
        open_tokenizer(written(pre_tokenizer=EACH, normalizer=replaced({"Regex": "."}, 5)), where="it")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "expected a JSON object, got list"),
        ("{", "Expecting property name"),
        (
            written(model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}),
            "expected none, got 0.1",
        ),
        (written(model=[]), "."),
    ],
)
def test_what_is_none_is_said_in_one_line(text: str, why: str) -> None:
    class OwnError(SinewError):
        pass

    with pytest.raises(OwnError, match=f"^here cannot be read: .*{why}") as caught:
        open_tokenizer(text, OwnError, "here")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= len("here cannot be read: ") + 200


def test_what_a_training_run_left_is_taken_out() -> None:
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padded = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[UNK]",
    }  # fmt: skip
    assert open_tokenizer(written(truncation=cut, padding=padded)).encode("pick up").ids == [2, 3]


def test_encoding_and_decoding() -> None:
    tokenizer = open_tokenizer(written(post_processor=template(1)))
    assert encode(tokenizer, "pick up", True) == [1, 2, 3]
    assert encode(tokenizer, "pick up", False) == [2, 3]
    assert decode(tokenizer, [1, 2, 3, 99]) == "pick up"
    assert decode(tokenizer, (1, 2), skip_special_tokens=False) == "[CLS] pick"
    with pytest.raises(TypeError):  # a caller's own mistake
        encode(tokenizer, 3, False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="."):
        decode(tokenizer, [-1])
    slow = {"type": "Split", "pattern": {"Regex": "(z+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = open_tokenizer(written(pre_tokenizer=slow))
    with pytest.raises(ValueError, match="retry-limit") as caught:  # a panic of Rust's
        encode(tokenizer, "z" * 60 + "!", False)
    assert len(str(caught.value).splitlines()) == 1

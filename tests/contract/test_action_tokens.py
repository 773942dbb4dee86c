"""What tokens mean that a head says: one class in one file for each kind, with rules, words and a chunk; a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from sinew.core import BundleError, SinewError
from sinew.core.fields import from_json, problems, to_json
from sinew.steps import registry
from sinew.steps.action_tokens.base import ActionTokens
from sinew.steps.action_tokens.bins import BinTokens, bin_centres
from sinew.steps.action_tokens.fast import LONGEST, FastTokens, inverse_dct, without


@dataclass(frozen=True)
class Row:
    """said: a sentence, and the chunk that it means. refused: changes that the rules refuse, and how."""

    words: ActionTokens
    said: tuple[int, ...]
    chunk: tuple[tuple[float, ...], ...]
    text: str
    refused: Mapping[str, tuple[dict[str, Any], str]] = field(default_factory=dict)


# Bytes as GPT-2 spells them: the first two are letters, then the two bytes of U+00E9, then a letter that is no byte's.
BYTES = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {"A": 0, "B": 1, "\u00c3": 2, "\u00a9": 3, "\u4e2d": 4, "AB": 5},
            "merges": [],
        },
    }
)
FAST = FastTokens(6, 90, 2, 2, 80, BYTES, -65, 2.0, (), (70, 71))


def fast(*coefficients: float) -> tuple[tuple[float, ...], ...]:
    """The chunk of 2 x 2 of so many coefficients over the scale, by the transform written out for two steps."""
    low, high = (
        np.zeros((2, 2)) if not coefficients else np.array([*coefficients, 0, 0, 0][:4]).reshape(2, 2) / 2
    )
    rows = (low + high) / np.sqrt(2), (low - high) / np.sqrt(2)
    return tuple(map(tuple, np.array(rows).tolist()))


ROWS = {
    "fast": Row(
        FAST,
        (79, 80, 75, 79),  # B, A, AB, B: too many
        fast(1, 0, 0, 1),
        "FAST below token 80, at most 6",
        {
            "no scale": ({"scale": 0.0}, "scale: expected a finite number above 0, got 0"),
            "rows": ({"rows": 0}, "rows: expected 1 to 8192, got 0"),
            "least": ({"least": float("-inf")}, "least: expected a finite number, got -inf"),
            "scale": ({"scale": float("inf")}, "scale: expected a finite number above 0, got inf"),
            "long": (
                {"tokenizer": " " * (LONGEST + 1)},
                "tokenizer: expected at most 8388608 characters, got 8388609",
            ),
            "no tokenizer": (
                {"tokenizer": "[]"},
                "tokenizer: FAST's tokenizer cannot be read: expected a JSON object, got list",
            ),
        },
    ),
    "fast that begins": Row(
        replace(FAST, begins=(70, 71)),
        (70, 71, 79, 70, 71, 79),  # what a sentence begins with says nothing, wherever it stands
        fast(1, 1),
        "FAST below token 80, at most 6",
        {},
    ),
    "bins": Row(
        BinTokens(2, 2, 5, 100),
        (99, 98, 96, 7),
        ((-0.75, -0.25), (0.75, 0.75)),
        "4 bins below token 100",
        {
            "no rows": ({"rows": 0}, "rows: expected 1 to 8192, got 0"),
            "long": ({"rows": 8192}, "most: expected 1 to 8192, got 16384"),
            "points": ({"points": 101}, "points: expected 2 to 100, got 101"),
            "no bin": ({"points": 1}, "points: expected 2 to 100, got 1"),
        },
    ),
}


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def test_a_sentence_means_a_chunk(row: Row) -> None:
    found = row.words.chunk(np.array(row.said))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array(row.chunk, np.float32), rtol=0, atol=1e-6)
    both = row.words.chunks(
        np.array([[*row.said, row.words.end]] * 2 if row.words.end >= 0 else [row.said] * 2)
    )
    np.testing.assert_array_equal(both, [found, found])


def test_it_says_what_it_is(row: Row) -> None:
    assert str(row.words) == row.text


def test_rules_refuse_by_name(row: Row) -> None:
    assert not list(problems(row.words))
    for changes, said in row.refused.values():
        assert said in list(problems(replace(row.words, **changes)))


def test_it_travels(row: Row) -> None:
    text = to_json((row.words,))
    assert from_json(text, tuple[ActionTokens, ...], "speaks") == (row.words,)
    record = from_json(to_json(row.words), dict, "speaks")
    for name in (each.name for each in fields(row.words) if each.name != "kind"):  # type: ignore[arg-type]
        with pytest.raises(BundleError, match=f"speaks: .*{name}"):
            from_json(to_json([record | {name: {}}]), tuple[ActionTokens, ...], "speaks")


def test_every_registered_kind_has_a_row_and_a_file_of_its_own() -> None:
    places = {
        k: p for k, p in registry.ACTION_TOKENS.items() if p.startswith("sinew.")
    }  # others are of tests
    assert {row.words.kind for row in ROWS.values()} == set(places)
    assert len({place.split(":")[0] for place in places.values()}) == len(places)
    for kind in places:
        found: Any = ActionTokens.registered(kind)
        assert is_dataclass(found)
        assert found.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert found.kind == kind
        (tag,) = (
            each for each in fields(found) if each.name == "kind"
        )  # which nobody gives, nor reads twice
        assert tag.kw_only
        assert not tag.repr


# ----------------------------------------------------------------------------- FAST, where it is none


@pytest.mark.parametrize(
    ("said", "chunk"),
    [
        ([], fast()),
        ([79], fast(1)),  # too few: zeros follow
        ([81], fast()),  # below FAST's first: the whole chunk is zeros
        ([79, 81], fast()),
        ([79, 60, 79], fast(1, 1)),  # behind its last: nothing
        ([78, 77], fast(0xE9 - 65)),  # two bytes of one character
        ([78, 79], fast(0xFFFD - 65, 1)),  # half of a character: the mark of what is no text
        ([76], fast(0x4E2D - 65)),  # no byte's letter: its own text
    ],
)
def test_sentences_that_are_no_chunk(said: list[int], chunk: Any) -> None:
    """As LeRobot decodes them."""
    found = FAST.chunk(np.array(said, np.int64))
    np.testing.assert_allclose(found, np.array(chunk), rtol=1e-6, atol=1e-6)


def test_a_sentence_that_begins_otherwise_is_refused() -> None:
    with pytest.raises(
        SinewError, match=r"begins with the tokens \[70, 71\], as in training, got \[79, 70\]"
    ):
        replace(FAST, begins=(70, 71)).chunk(np.array([79, 70, 71]))


def test_bins_are_as_many_ids_as_there_are_points() -> None:
    """The last of them counts as the highest bin, as OpenVLA has it; two points are one bin."""
    words = BinTokens(2, 3, 5, 100)
    assert (words.ids, words.most) == ((96, 99), 6)
    assert words.end < 0  # a sentence has its length
    assert bin_centres(np.array([100, 99, 97, 96, 95, 0]), 5, 100).tolist() == [
        -0.75,
        -0.75,
        0.25,
        *[0.75] * 3,
    ]
    one = BinTokens(1, 1, 2, 2)
    assert not list(one.problems())
    assert one.chunk(np.array([1])).tolist() == [[0.0]]


def test_the_transform_is_the_one_of_its_definition() -> None:
    """x[t] = sqrt(2/n) sum_k c[k] X[k] cos(pi/n (t + 1/2) k), with c[0] = sqrt(1/2)."""
    x = np.random.default_rng(0).standard_normal((7, 3))
    wanted = np.zeros_like(x)
    for t in range(7):
        for k in range(7):
            weight = np.sqrt((1 if k == 0 else 2) / 7)
            wanted[t] += weight * x[k] * np.cos(np.pi / 7 * (t + 0.5) * k)
    found = inverse_dct(x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(found, axis=0), np.linalg.norm(x, axis=0), rtol=1e-14)


def test_a_run_is_left_out_wherever_it_stands() -> None:
    assert without([1, 2, 3, 1, 2], (1, 2)) == [3]
    assert without([1, 1, 2, 2], (1, 2)) == [1, 2]  # from the first on, as LeRobot goes
    assert without([1, 2], ()) == [1, 2]
    assert without([1], (1, 2)) == [1]

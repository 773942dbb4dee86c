"""What tokens mean that a head says: one class in one file for each kind, with rules, words and a chunk; a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from sinew.bundle.schema import from_json, to_json
from sinew.core import BundleError
from sinew.steps import registry
from sinew.steps.action_tokens.base import ActionTokens
from sinew.steps.action_tokens.bins import BinTokens


@dataclass(frozen=True)
class Row:
    """said: a sentence, and the chunk that it means. refused: changes that the rules refuse, and how."""

    words: ActionTokens
    said: tuple[int, ...]
    chunk: tuple[tuple[float, ...], ...]
    text: str
    refused: Mapping[str, tuple[dict[str, Any], str]] = field(default_factory=dict)


ROWS = {
    "bins": Row(
        BinTokens(2, 2, 5, 100),
        (99, 98, 96, 7),
        ((-0.75, -0.25), (0.75, 0.75)),
        "4 bins below token 100",
        {
            "no rows": ({"rows": 0}, "rows: expected 1 to 8192, got 0"),
            "long": ({"rows": 8192}, "most: expected 1 to 8192, got 16384"),
            "points": ({"points": 101}, "points: expected 2 to 100, got 101"),
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
    assert not list(row.words.problems())
    for changes, said in row.refused.values():
        assert said in list(replace(row.words, **changes).problems())


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

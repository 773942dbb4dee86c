"""docs/families.md is what the marks and the recorded runs say."""

from __future__ import annotations

import json

from tests.cases import FIXTURES, cases
from tests.proofs import COLUMNS, FAMILIES, NAMES, PAGE, PRODUCT, RECORD, by_test, marked, product, render


def test_the_page_is_rendered_from_the_record():
    assert PAGE.read_text(encoding="utf-8") == render(json.loads(RECORD.read_text())), (
        "python -m tests.proofs renders docs/families.md"
    )


def test_the_products_file_is_written_from_the_record():
    assert PRODUCT.read_text(encoding="utf-8") == product(json.loads(RECORD.read_text())), (
        "python -m tests.proofs writes sinew/engine/proofs.json"
    )


def test_the_record_is_of_the_marks():
    """Each marked test was run, and no row is of a test or a column that lost its mark."""
    rows, marks = json.loads(RECORD.read_text()), marked()
    assert len(marks) > 10
    recorded: dict[str, set[str]] = {}
    for family, column, _precision, test, _speed in rows:
        assert family in NAMES
        assert column in COLUMNS
        recorded.setdefault(test, set()).add(column)
    assert recorded.keys() == marks.keys(), "python -m pytest tests -m proves --proofs tests/proofs.json"
    for test, columns in marks.items():
        assert recorded[test] == columns or "*" in columns, test
    said = by_test(rows)
    assert said.keys() == marks.keys()
    assert (
        said["tests/models/test_openvla_parity.py::test_actions_of_ternary_weights"] == "eager fp32: BitVLA"
    )


def test_every_case_says_whose_it_is():
    assert {path.name for path in FIXTURES.iterdir() if path.is_dir()} == {
        case.home for case in cases().values()
    }
    assert FAMILIES.keys() == cases().keys()
    assert set(FAMILIES.values()) == set(NAMES)


def test_every_family_matches_its_reference_in_eager():
    proved = {family for family, column, *_ in json.loads(RECORD.read_text()) if column == "eager"}
    assert proved == set(NAMES)

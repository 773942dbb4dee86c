"""The table of `make mutate`: modules that are there, by tests that are."""

from __future__ import annotations

import tomllib

from tests.mutants import ROOT, TABLE


def test_the_table_names_what_is_there() -> None:
    table = tomllib.loads(TABLE.read_text())
    assert len(table) > 50
    named = [*table, *(test for entry in table.values() for test in entry["tests"])]
    assert not [path for path in named if not (ROOT / path).is_file()]
    for module, entry in table.items():
        assert entry.keys() <= {"tests", "equivalent"}, module
        assert all(entry.get("equivalent", {}).values()), f"{module}: a mutant without a reason"

"""The table of `make mutate`: modules that are there, by tests that are."""

from __future__ import annotations

import ast
import tomllib
from types import ModuleType
from typing import Any

from tools.mutants import ROOT, TABLE, equivalents, mutants, noting, patches, values


def test_the_table_names_what_is_there() -> None:
    table = tomllib.loads(TABLE.read_text())
    assert len(table) > 50
    named = [*table, *(test for entry in table.values() for test in entry["tests"])]
    assert not [path for path in named if not (ROOT / path).is_file()]
    for module, entry in table.items():
        assert entry.keys() <= {"tests", "equivalent"}, module
        lines = equivalents(entry)
        assert all(lines.values()), f"{module}: a mutant without a reason"
        there = (
            {mutant.name for mutant in mutants((ROOT / module).read_text(), whole=False)} if lines else set()
        )
        assert not lines.keys() - there, f"{module}: lines of no mutant"


SOURCE = """
LIMIT = 3

class Box:
    size = 2

    def fits(self, count, most=LIMIT):
        \"\"\"Says whether.\"\"\"
        if count > 0:
            return count <= most
        return [x for x in range(self.size)]
"""


def test_a_mutant_changes_one_thing_and_knows_its_statement() -> None:
    found = {each.name: each for each in mutants(SOURCE)}
    plain = compile(ast.unparse(ast.parse(SOURCE)), "box", "exec")
    for name, statement, change in (
        ("module: 3 -> 4", 2, {("LIMIT",): 4, ("Box", "fits", "__defaults__"): (4,)}),
        ("Box: 2 -> 1", 5, {("Box", "size"): 1}),
        ("Box.fits: count > 0 -> count >= 0", 9, None),
        ("Box.fits: count <= most -> count > most", 10, None),
        ("Box.fits: return [x for x in range(self.size)] -> return None", 11, None),  # with the loop in it
    ):
        mutant = found[name]
        assert mutant.statement == statement
        patched = patches(plain, compile(mutant.source, "box", "exec"))
        assert (patched and [*patched]) == (None if change else [("Box.fits", 0)])
        if change:
            before, after = ModuleType("box"), ModuleType("box")
            exec(SOURCE, vars(before))
            exec(mutant.source, vars(after))
            assert dict(values(before, after, "box")) == change


def test_tests_are_known_by_the_statements_that_they_begin() -> None:
    met: list[str] = []
    space: dict[str, Any] = {"entered_": met.append}
    exec(noting("box", SOURCE), space)
    assert met == []
    assert space["Box"]().fits(0) == [0, 1]
    assert met == ["box:Box.fits", "box:9", "box:11"]
    assert space["Box"].fits.__doc__ == "Says whether."

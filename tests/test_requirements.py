"""requirements.md, what the project started from: what it names is there, and what it says is so."""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from research.vla_perf.__main__ import main as vla_perf
from sinew.cli import build_app, main
from tests.covering import some

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "requirements.md"
OPEN = ("partial", "absent")
WHY_OPEN = (
    "missing: ",
    "needs a GPU: ",
    "needs a board: ",
    "needs published weights: ",
    "needs a faster core: ",
    "research: ",
)
STATES = ("works", *OPEN, "needs a GPU", "needs a board", "not to build")
KINDS = (
    "sinew ",
    "python -m benchmarks.",
    "python -m research.",
    "tests/",
    "eval/tests/",
    "perf/tests/",
    "research/tests/",
)
OUTSIDE = r"pytest\.mark\.(slow|kernels|gpu)\b"  # marks of tests that `make test` leaves out
DOCUMENTS = (36, 23, 52, 74, 44)  # rows of each, in the page's order
# Commands of the table that cost little, and what they exit with: each is run.
CHEAP = {
    "python -m research.vla_perf": 0,
    "python -m research.vla_perf realtime-vla": 0,
    "sinew perf machines": 0,
    "sinew perf run pi0 --hardware rtx5070 --cameras 2": 0,
    "sinew perf run pi0-xl --hardware b100": 0,
    "sinew perf sync": 0,
    "sinew perf fit pi0 --hardware orin-nano --alone": 0,
    "sinew doctor": 0,
}


@dataclass(frozen=True)
class Requirement:
    number: int
    what: str
    state: str
    proofs: tuple[str, ...]
    figure: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        return [tuple(proof.split("::")) for proof in self.proofs if "::" in proof]

    @property
    def commands(self) -> list[str]:
        return [proof for proof in self.proofs if proof.startswith("sinew ")]

    @property
    def programs(self) -> list[str]:
        return [proof for proof in self.proofs if proof.startswith("python ")]


@cache
def rows() -> list[Requirement]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d+ \|", line):
            number, what, state, proofs, figure = (cell.strip() for cell in line.strip("|").split("|"))
            named = tuple(re.findall(r"`([^`]+)`", proofs))
            assert re.sub(r"`[^`]+`|[, ]", "", proofs) == "", f"{number}: {proofs}"
            found.append(Requirement(int(number), what, state, named, figure))
    return found


@cache
def functions(path: str) -> set[str]:
    return set(re.findall(r"^(?:async )?def (\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


@cache
def outside(path: str) -> set[str]:
    """Return the tests of a file that `make test` does not run, by the marks of the file and of each."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found, whole = set[str](), False
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = bool(re.search(OUTSIDE, ast.unparse(node.value)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = [ast.unparse(each) for each in node.decorator_list]
            if whole or any(re.match(OUTSIDE, mark) for mark in marks):
                found.add(node.name)
    return found


def test_rows_whose_tests_run_elsewhere_are_listed() -> None:
    """A contributor sees on the page which proofs `make test` does not run."""
    text = PAGE.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("Rows with a test that"))
    printed = [int(number) for number in re.findall(r"\d+", line.partition(":")[2])]
    assert printed == [row.number for row in rows() if any(name in outside(path) for path, name in row.tests)]


def test_every_row_is_there_once() -> None:
    assert [row.number for row in rows()] == list(range(1, sum(DOCUMENTS) + 1))
    assert {row.state for row in rows()} == set(STATES)
    assert len({row.what for row in rows()}) == len(rows())


def test_the_sums_are_those_of_the_rows() -> None:
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith(" |")]
    header = next(line for line in table if line.startswith("| document"))
    assert [cell.strip() for cell in header.strip("|").split("|")[1:-1]] == list(STATES)
    sums = table[table.index(header) + 1 :][: len(DOCUMENTS) + 1]
    printed = [[int(cell) for cell in line.strip("|").split("|")[1:]] for line in sums]
    first, counted = 0, []
    for count in DOCUMENTS:
        own = Counter(row.state for row in rows()[first : first + count])
        counted.append([*(own[state] for state in STATES), count])
        first += count
    assert printed == [*counted, [sum(column) for column in zip(*counted, strict=True)]]


def test_every_row_is_proved() -> None:
    """What works names a test or a command; what does not names what is missing, or nothing is claimed for it."""
    for row in rows():
        is_proved(row)


def is_proved(row: Requirement) -> None:
    if row.state == "works" or row.state.startswith("needs"):
        assert row.proofs, row
    elif row.state in OPEN:
        assert row.figure.startswith(WHY_OPEN), row
    elif row.state == "not to build":
        assert not row.proofs, row
    assert all(proof.startswith(KINDS) for proof in row.proofs), row
    for path, name in row.tests:
        assert name in functions(path), f"{path} has no {name}"
    for program in row.programs:
        module = program.split()[2].replace(".", "/")
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), program


SOURCE = re.compile(r"`[\w.-]+(/[\w.-]+)*(/|/Dockerfile|\.\w+)(:\d+)?`")  # a file or folder, and maybe a line


def test_every_capability_has_a_proof_or_a_source() -> None:
    """tests/capabilities.md: a test or command of ours in each row; a file of theirs, or that nothing was found. The
    stacks are those whose revision the page states, with one of each class of vla.cpp's page."""
    page = PAGE.parent / "capabilities.md"
    text = page.read_text(encoding="utf-8")
    stacks = [
        line.split(" | ") for line in re.findall(r"^\| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
    ]
    read = {
        name.partition(" 0")[0]: kind
        for kind, name, revision in stacks[1:]
        if re.match(r"[0-9a-f]{7,} ", revision)
    }
    assert {"Python reference server", "quantisation only", "compiler of one vendor"} <= {*read.values()}
    header = text.partition("\n## The capabilities\n")[2].strip().splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["capability", "Sinew", *read]
    table = section(page, "The capabilities")
    assert len(table) > 15
    assert {len(cells) for cells in table} == {2 + len(read)}
    for what, ours, *theirs in table:
        named = re.findall(r"`([^`]+)`", ours)
        assert named, what
        for proof in named:
            path, _, name = proof.partition("::")
            assert name in functions(path) if name else proof.startswith(("sinew ", "python -m ")), proof
        assert all(cell.startswith("not found") or SOURCE.search(cell) for cell in theirs), what


def section(path: Path, title: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its header."""
    _, _, text = path.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    lines = re.findall(r"^\|.*\|$", text.partition("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def assert_shown(text: str) -> None:
    """Assert that each test, command or program that a text names is there."""
    for proof in re.findall(r"`([^`]+)`", text):
        path, _, name = proof.partition("::")
        if name:
            assert name in functions(path), proof
        elif proof.startswith("python -m "):
            module = proof.split()[2].replace(".", "/")
            assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), proof
        else:
            assert proof.startswith("sinew "), proof


def test_what_the_rows_missed_is_closed_or_states_why() -> None:
    gaps = section(PAGE, "What the rows missed")
    assert len(gaps) == 32
    for _, what, state, shown, figure in gaps:
        assert_shown(shown)
        assert (state == "closed" and shown) or (state == "open" and figure.startswith(WHY_OPEN)), what


def test_states_before_and_after_are_those_of_the_rows() -> None:
    """The sums of the review's day follow from today's states and the changes."""
    counted = Counter(row.state for row in rows())
    for name, what, before, now, _ in section(PAGE, "Before and after the second review"):
        row = rows()[int(name.removeprefix("row ")) - 1]
        assert (row.what, row.state) == (what, now)
        counted[before] += 1
        counted[now] -= 1
    text = PAGE.read_text(encoding="utf-8")
    printed = re.search(r"The states on 2026-11-28 \((.*?)\)", text)
    assert printed
    assert dict(counted) == {name: int(n) for n, name in re.findall(r"(\d+) ([^,]+)", printed[1])}


def test_every_anti_pattern_has_a_check() -> None:
    """tests/printed.md: the survey's ten mistakes, each with what meets it, and its seven areas."""
    patterns = section(PAGE.parent / "printed.md", "Survey: ten anti-patterns")
    assert len(patterns) == 10
    for _, what, shown in patterns:
        assert what
        assert shown
        assert_shown(shown)
    areas = Counter(
        cells[-1] for cells in section(PAGE.parent / "printed.md", "Survey: seven areas of a strong outcome")
    )
    assert areas == {"strong": 4, "weak": 2, "other": 1}


@pytest.fixture(scope="module")
def app() -> App:
    return build_app()


def commands() -> list[str]:
    missed = " ".join(cells[3] for cells in section(PAGE, "What the rows missed"))
    return sorted(
        {each for row in rows() for each in row.commands} | set(re.findall(r"`(sinew [^`]+)`", missed))
    )


@pytest.mark.parametrize("command", commands())
def test_every_command_is_understood(command: str, app: App) -> None:
    words = shlex.split(command)[1:]
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except Exception as error:  # noqa: BLE001 - whatever it is, the line is wrong
        pytest.fail(f"{command}\n{error}")


@pytest.fixture(scope="module")
def ran() -> dict[str, dict[str, Any]]:
    return {}


@pytest.mark.parametrize(
    "command",
    some(
        CHEAP, "python -m research.vla_perf", "sinew perf machines", "sinew perf sync", "sinew doctor"
    ),  # others: perf/tests
)
def test_what_costs_little_runs(command: str, ran: dict[str, dict[str, Any]], capsys: Any) -> None:
    assert any(command in row.proofs for row in rows()), "the page does not name it any more"
    program, words = (vla_perf, 3) if command.startswith("python") else (main, 1)
    assert program([*shlex.split(command)[words:], "--json"]) == CHEAP[command]
    ran[command] = json.loads(capsys.readouterr().out)


def test_verdicts_are_those_that_are_printed(ran: dict[str, dict[str, Any]], capsys: Any) -> None:
    """Rows of VLA-Perf's takeaways say what the verb says: as published, then where a correction changes it."""
    if "python -m research.vla_perf" not in ran:
        test_what_costs_little_runs("python -m research.vla_perf", ran, capsys)
    judged = {each["number"]: each["verdicts"] for each in ran["python -m research.vla_perf"]["takeaways"]}
    told = {row.what: row.figure for row in rows() if row.what.startswith("takeaway ")}
    assert len(told) == len(judged) == 15
    for number, verdicts in judged.items():
        figure = told[f"takeaway {number}"]
        published, corrected, raw = (each["holds"] for each in verdicts.values())
        assert figure.startswith("holds" if published else "does not"), (number, figure)
        assert ("corrected holds" in figure) == (corrected and raw), (number, figure)
        assert ("corrected does not" in figure) == (published and not corrected), (number, figure)
        assert ("not with raw pictures" in figure) == (corrected and not raw), (number, figure)


def test_shares_and_intensities_are_those_that_are_printed(capsys: Any) -> None:
    row = rows()[47 - 1]
    assert main([*shlex.split(row.commands[0])[1:], "--json"]) == 0
    parts = {
        each["component"]: each for each in json.loads(capsys.readouterr().out)["machines"][0]["components"]
    }
    shares = "{:.1f}/{:.1f}".format(100 - 100 * parts["head"]["share"], 100 * parts["head"]["share"])
    intensities = ", ".join(f"{parts[name]['intensity']:.1f}" for name in ("vision", "prefix", "head"))
    assert shares in row.figure
    assert intensities in row.figure


@pytest.mark.parametrize(
    ("number", "command"),
    [(64, "vla-perf"), (65, "vla-perf"), (83, "vla-perf"), (204, "realtime-vla"), (207, "realtime-vla")],
)
def test_figures_of_the_papers_are_those_that_are_printed(number: int, command: str, tmp_path: Path) -> None:
    """Each number of such a row is one of the verb's, rounded as the row rounds it."""
    path = tmp_path / "rows.csv"
    assert vla_perf([command, "--table", str(path)]) == 0
    with path.open(newline="", encoding="utf-8") as file:
        ours = [float(row["ours"]) for row in csv.DictReader(file) if re.fullmatch(r"\d+\.\d+", row["ours"])]
    figures = re.findall(r"\d+\.\d+", rows()[number - 1].figure)
    assert len(figures) >= 3
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert any(f"{value:.{digits}f}" == figure for value in ours), (number, figure)

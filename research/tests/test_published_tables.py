"""Every cell of the papers' tables, read from their text, is in what a verb prints: nothing is left out."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from research.vla_perf.__main__ import main

HERE = Path(__file__).parent
Table = list[list[str]]

MACHINES = {"Jetson Thor": "Thor", "RTX 4090": "RTX4090", "A100": "A100", "H100": "H100", "B100": "B100"}
PARTS = {"Vision Encoder": "vision", "VLM Backbone": "VLM", "VLM": "VLM", "Action Expert": "action"}
PLACES = {"On-Device": "on device", "Edge Server": "edge server", "Cloud Server": "cloud server"}


def tables(name: str) -> dict[str, Table]:
    """Return a text's tables by their headings, row by row."""
    found: dict[str, Table] = {}
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.startswith(("# table", "# section")):
            rows = found.setdefault(line.removeprefix("# "), [])
        elif not line.startswith("#"):
            rows.append(line.split("\t"))
    return found


def numbers(cell: str) -> list[str]:
    return re.findall(r"N/A|\d[\d,]*(?:\.\d+)?", cell)


# ----------------------------------------------------------------------------- VLA-Perf
# table -> (row's name, column's name) -> the quantities that the verb prints for it, one per number of the cell.


def _words(names: dict[str, str], text: str) -> str:
    """The verb's word for the first of ``names`` that a heading contains."""
    return next(word for name, word in names.items() if name in text)


def table1(row: str, column: str) -> list[str]:
    what = {"Roofline": "ms", "Real": "real ms", "Accuracy": "accuracy %"}
    return [f"4090 {column[0]} cam {_words(what, row)}"]


def table5(row: str, column: str) -> list[str]:
    family = re.fullmatch(r"π_0(?: -(\w+))? \(.*", row)
    assert family
    name = family[1] or "pi0"
    return [f"{name} {MACHINES[column]} Hz" if column in MACHINES else f"{name} {PARTS[column]} params B"]


def table6(row: str, column: str) -> list[str]:
    if column in MACHINES:
        return [f"n={row} {MACHINES[column]} ms", f"n={row} {MACHINES[column]} Hz"]
    return [f"n={row} {_words({'Total': 'total GiB', 'KV': 'KV GiB'}, column)}"]


def table7(row: str, column: str) -> list[str]:
    what = {"Upload": "up", "Download": "down", "Base": "base"}
    return [f"{column.replace('Cloud', 'cloud')} {_words(what, row)}"]


def table8(row: str, column: str) -> list[str]:
    what = {"Latency": "latency ms", "Sync": "sync Hz", "Async": "async Hz", "Speedup": "speedup x"}
    return [f"{row.replace(' + ', '+').replace('Cloud', 'cloud')} {_words(what, column)}"]


def table10(row: str, column: str) -> list[str]:
    what = {
        "FP32": "FP32 TFLOP/s",
        "BF16": "BF16 TFLOP/s",
        "INT8": "INT8 TOP/s",
        "Memory BW": "bandwidth GB/s",
        "Memory": "memory GB",
    }
    return [f"{MACHINES[row]} {_words(what, column)}"]


def table11(row: str, column: str) -> list[str]:
    what = {
        "Layers": "layers",
        "Hidden": "hidden",
        "Interm": "intermediate",
        "Q Heads": "query heads",
        "KV Heads": "key heads",
        "Params": "params",
    }
    return [f"{PARTS[row]} {_words(what, column)}"]


CELLS: dict[str, Callable[[str, str], list[str]]] = {
    "table 1": table1,
    "table 2": lambda row, column: [
        f"{_words({k.split()[-1]: v for k, v in MACHINES.items()}, row)} {PLACES[column]}"
    ],
    "table 3": lambda row, column: [
        f"{MACHINES[row]} {_words({'Freq': 'E2E Hz', 'E2E': 'E2E ms', 'Vision': 'vision ms', 'VLM': 'VLM ms', 'Action': 'action ms'}, column)}"  # noqa: E501 - a table in a table
    ],
    "table 4": lambda row, column: [
        f"{MACHINES[row]} {_words({'Balance': 'balance OI', 'Vision': 'vision bound', 'VLM': 'VLM bound', 'Action': 'action bound'}, column)}"  # noqa: E501 - the same
    ],
    "table 5": table5,
    "table 6": table6,
    "table 7": table7,
    "table 8": table8,
    "table 10": table10,
    "table 11": table11,
}


def cells() -> list[tuple[str, str, list[str], str]]:
    """(table, where the verb has it, quantities, the cell's text) of every cell that has content."""
    found = []
    for name, (header, *rows) in tables("vla_perf_tables.tsv").items():
        where = name.replace("table ", "T")
        first = 2 if name in ("table 8", "table 9") else 1
        if name == "table 9":  # two lines of headings: a pair of columns for each rate of System 2
            quantities = ("S1 ms", "S2 ms", "sync Hz", "cap5 Hz", "cap5 x", "cap10 Hz", "cap10 x")
            for row in rows[1:]:
                called = "Thor" if row[0] == "Jetson Thor" else row[1]
                found += [
                    (name, where, [f"{called} {quantity}"], cell)
                    for quantity, cell in zip(quantities, row[first:], strict=True)
                ]
            continue
        for row in rows:
            called = row[1] if name == "table 8" else row[0]
            for column, cell in zip(header[first:], row[first:], strict=True):
                if cell.strip():
                    found.append((name, where, CELLS[name](called, column), cell))
    return found


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[tuple[str, str], dict[str, str]]]:
    """What ``python -m research.vla_perf`` writes of both papers, by where and quantity."""
    found = {}
    for which in ("vla-perf", "realtime-vla"):
        path = tmp_path_factory.mktemp("paper") / "paper.csv"
        assert main([which, "--table", str(path)]) == 0
        with path.open(newline="", encoding="utf-8") as file:
            found[which] = {(row["where"], row["quantity"]): row for row in csv.DictReader(file)}
    return found


def test_all_cells_of_vla_perf_are_printed(printed) -> None:
    """243 numbers, words and ticks of eleven tables."""
    rows, missing, count = printed["vla-perf"], [], Counter()
    for _, where, quantities, cell in cells():
        wanted = numbers(cell) if re.search(r"\d|N/A", cell) else [cell.strip()]
        if where == "T5" and "(" in cell:
            wanted = numbers(cell)[-1:]  # "Llama2-7B (6.5B)": the name's number is none
        count[where] += len(wanted)
        wanted = wanted * len(quantities) if wanted == ["N/A"] else wanted
        for quantity, number in zip(quantities, wanted, strict=True):
            keys = [
                key
                for key in rows
                if key[0] == where and re.fullmatch(rf"{re.escape(quantity)}( \w+)?", key[1])
            ]
            if not keys or rows[keys[0]]["printed"] != number or not rows[keys[0]]["ours"]:
                missing.append(f"{where} {quantity}: {number}")
    assert not missing, missing
    by_table = zip(range(1, 12), (9, 4, 25, 20, 24, 38, 24, 28, 28, 25, 18), strict=True)
    assert count == {f"T{table}": expected for table, expected in by_table}
    assert count.total() == 243


def test_a_cell_that_nobody_prints_would_be_found(printed) -> None:
    rows = dict(printed["vla-perf"])
    del rows["T4", "H100 VLM bound"]
    with pytest.raises(AssertionError, match="H100 VLM bound"):
        test_all_cells_of_vla_perf_are_printed({"vla-perf": rows})


def test_headings_hold_numbers_too(printed) -> None:
    """Three intensities stand in table 4's heading, four sums of parameters in table 5's first column."""
    text, rows = tables("vla_perf_tables.tsv"), printed["vla-perf"]
    for heading, part in zip(text["table 4"][0][2:], ("vision", "VLM", "action"), strict=True):
        assert rows["T4", f"{part} OI"]["printed"] == numbers(heading)[0]
    for row, family in zip(text["table 5"][1:], ("pi0", "L", "XL", "XXL"), strict=True):
        assert rows["T5", f"{family} total params B"]["printed"] == numbers(row[0])[-1]


# ----------------------------------------------------------------------------- Running VLAs at Real-time Speed


def realtime_cells() -> list[tuple[str, str, str]]:
    text, found = tables("realtime_vla_tables.tsv"), []
    for name, *cells_ in text["table 1"]:
        found += [("T1", f"{name} {views} view ms", cell) for views, cell in enumerate(cells_, start=1)]
    parts, sums = iter(("vision", "language", "head")), {"In total": "all"}
    part = next(parts)
    for times, shape, *cells_ in text["table 2"]:
        label = f"{part} {times} x {shape}"
        if not shape:
            label = f"sum {sums.get(times, part)}"
        columns = ("roofline", "cuBLAS", "Triton", "actual")
        found += [
            ("T2", f"{label} {column} ms", cell)
            for column, cell in zip(columns, cells_, strict=True)
            if cell != "/"
        ]
        if not shape:
            part = next(parts, part)
    settings = ("Pytorch", "CUDA graph", "software barrier", "fused, no sync")
    for setting, (_, time, overhead) in zip(settings, text["table 3"], strict=True):
        found += [("T3", f"{setting} ms", time), ("T3", f"{setting} overhead ms", overhead)]
    (count,), roofline, waiting = text["section 5"]
    found.append(("5.2", "matrix products", count))
    for views in (1, 2, 3):
        found.append(("5.1", f"bound {views} view ms", roofline[views - 1]))
        found.append(("5.2", f"bound with synchronisation {views} view ms", waiting[views - 1]))
    *times_, (frames,), (experts,) = text["section 6.1"]
    found += [("6.1", f"{name[0].lower()}{name[1:]} ms", cell) for name, cell in times_]
    return [*found, ("6.1", "VLM runs Hz", frames), ("6.1", "AE runs Hz", experts)]


def test_all_cells_of_the_lower_bound_are_printed(printed) -> None:
    rows = printed["realtime-vla"]
    for where, quantity, cell in realtime_cells():
        assert rows[where, quantity]["printed"] == numbers(cell)[0], quantity
    assert len(realtime_cells()) == 9 + 22 * 4 - 4 + 4 * 4 + 8 + 1 + 6 + 5
    left = set(rows) - {(where, quantity) for where, quantity, _ in realtime_cells()}
    assert left == {("5.2", "room that is left 2 view %")}  # of the sentence after table 3


def test_what_the_lower_bound_gets_wrong_is_said(printed) -> None:
    """Its sums of measured columns are not those of their rows; its first bound is cut off; nothing else differs."""
    rows = printed["realtime-vla"].values()
    assert Counter(row["status"] for row in rows) == {
        "measured": 78,
        "exact": 41,
        "not added up": 8,
        "added up": 1,
        "truncated": 1,
        "at most": 1,
    }


# ----------------------------------------------------------------------------- documents whose numbers a page has

PAGES = {
    "vla_cpp_tables.tsv": HERE.parent / "log" / "measurements-vla-cpp.md",
    "printed_tables.tsv": HERE.parents[1] / "tests" / "printed.md",
}


def listed(text: str) -> list[str]:
    """Return the numbers of a text. A comma after a number separates it from the next one."""
    return [each.rstrip(",") for each in numbers(text)]


@pytest.mark.parametrize(("file", "table"), [(file, table) for file in PAGES for table in tables(file)])
def test_each_number_of_a_document_is_on_its_page(file: str, table: str) -> None:
    """A row of the text is one line of the page: the one that begins alike, and has all its numbers in order."""
    lines = [
        line.strip("|").split("|") for line in PAGES[file].read_text().splitlines() if line.startswith("|")
    ]
    for name, *cells in tables(file)[table][1:]:
        wanted = [each for cell in cells for each in listed(cell)]
        found = [listed(" ".join(line[1:])) for line in lines if line[0].strip().startswith(name)]
        assert any(shown[: len(wanted)] == wanted for shown in found), (name, wanted, found)

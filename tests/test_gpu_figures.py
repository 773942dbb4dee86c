"""Each GPU figure on a page is in a file of a run in benchmarks/results.

A *GPU figure* is a number in a sentence or a table row about a GPU that has such a file (H100, H200). The number has a
unit (``UNITS``) or a decimal point. A list such as "16.1, 13.2 and 7 ms" is one run of figures. A sentence that names
no machine is about the machine that its paragraph or table row named last, or about the machine in its heading.

These numbers are not GPU figures:

* numbers in code, in versions and in names (``NAMES``). Tests of the journeys compare the output of commands.
* numbers in a sentence, or in a column, with a word that says that they are no measurement of ours (``LABELS``).
* numbers in a table whose first column is headed "project". Other projects published these numbers.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (":(glob)docs/*.md", "README.md", ":(glob)tests/*.md", ":(glob)*/README.md", ":(glob)packages/*/*.md")
# Unit on a page -> the quantity, and the factor that converts a number to the base unit of this quantity.
UNITS = {
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "s": ("time", 1.0),
    "GiB": ("memory", 2.0**30),
    "TFLOP/s": ("arithmetic", 1e12),
    "TB/s": ("bandwidth", 1e12),
    "chunks a second": ("rate", 1.0),
    "checks": ("count", 1.0),
    "episodes": ("count", 1.0),
}
# Part of a field's name in a result file -> the same.
FIELDS = {
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "seconds": ("time", 1.0),
    "bytes": ("memory", 1.0),
    "gib": ("memory", 2.0**30),
    "flops": ("arithmetic", 1.0),
    "bandwidth": ("bandwidth", 1.0),
    "count": ("count", 1.0),
}
LABELS = re.compile(
    r"\b(predict\w*|targets?|goals?|roofline|expected|limit|requires|published|paper|share|would)\b",
    re.IGNORECASE,
)
OTHERS = re.compile(r"\b(CPUs?|Orin|Thor|Jetson|RTX \d+|A10G|A100|B100)\b")
NAMES = re.compile(
    r"`[^`\n]*`|\]\([^)\n]*\)|arXiv [\d.]+|\d{4}-\d\d-\d\d|\d+\.\d+\.\d+\S*|\bpi0\.5\b|\bN1\.\d\b|Status: \d\.\d"
    r"|\bcapabilit(y|ies) \d[\d., and]*|\b(torch|PyTorch|triton|Python|CUDA|LeRobot|vla\.cpp|FlashRT) \d[\d.]*"
)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?"
RUN = re.compile(
    rf"(?<![\w.,^-]){NUMBER}(?:(?:, | and | to | or | from | of | instead of ){NUMBER})*(?![\w.]*\d)"
    rf"(?:\s(?P<unit>{'|'.join(map(re.escape, UNITS))})(?![\w/]))?"
)
MODELS = re.compile(r"\b(?:pi0\.5|pi0|SmolVLA|GR00T|groot)\b", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.;])\**\s+")


class Figure(NamedTuple):
    """A figure on a page.

    Attributes:
        gpus: The GPUs that it may be from.
        number: The number as it is written.
        unit: The unit, or "".
        sentence: The sentence, or the table row if the sentence names no model.
    """

    gpus: frozenset[str]
    number: str
    unit: str
    sentence: str


# ----------------------------------------------------------------------------- figures on pages


def figures(page: str) -> Iterator[Figure]:
    """Yield the GPU figures of a page."""
    heading: frozenset[str] = frozenset()
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=#)|\n(?=\* |\d+\. )", text):
        if block.startswith("## "):
            heading = named(block)
        elif block.startswith("|"):
            yield from of_table(block.splitlines(), heading)
        elif not block.startswith("# "):
            yield from of_sentences(SENTENCE.split(block), heading)


def of_table(lines: list[str], heading: frozenset[str]) -> Iterator[Figure]:
    heads = cells_of(lines[0])
    if heads[0] == "project":
        return
    (unit,) = [*re.findall(r", (ms|us)\b", " ".join(heads)), ""][:1]
    for line in lines[2:]:
        machines = heading
        for head, cell in zip(heads, cells_of(line), strict=True):
            machines = found if (found := machine_of(cell)) is not None else machines
            if LABELS.search(head):
                continue
            whole = unit and re.fullmatch(rf"\**({NUMBER})\**", cell)
            if whole and machines:
                yield Figure(machines, whole[1], unit, f"{line} ({head})")
            elif not whole:
                yield from of_sentences(SENTENCE.split(cell), machines, line)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def of_sentences(sentences: list[str], machines: frozenset[str], row: str = "") -> Iterator[Figure]:
    for sentence in sentences:
        machines = found if (found := machine_of(sentence)) is not None else machines
        if not machines or LABELS.search(sentence):
            continue
        for run in RUN.finditer(NAMES.sub("·", sentence)):
            numbers = re.findall(NUMBER, run[0])
            if run["unit"] or any(re.search(r"[.e]", number) for number in numbers):
                for number in numbers:
                    about = sentence if models_of(sentence) else row or sentence
                    yield Figure(machines, number, run["unit"] or "", " ".join(about.split()))


def machine_of(text: str) -> frozenset[str] | None:
    """Return the measured GPUs that a text names, an empty set if it names other machines only, or None."""
    return named(text) or (frozenset() if OTHERS.search(text) else None)


def models_of(text: str) -> set[str]:
    return {name.lower().replace("gr00t", "groot") for name in MODELS.findall(text)}


def named(text: str) -> frozenset[str]:
    return frozenset(name for name in recorded() if re.search(rf"\b{name}\b", text))


# ----------------------------------------------------------------------------- figures in files


class Quantity(NamedTuple):
    """A number of a result file: its kind, its value in the base unit, and the models that its row names."""

    kind: str
    value: float
    models: frozenset[str]


@cache
def recorded() -> dict[str, set[Quantity]]:
    """Return for each GPU the quantities in its result files."""
    found: dict[str, set[Quantity]] = {}
    for path in RESULTS.glob("nvidia-*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        name = re.sub(r"^NVIDIA (GeForce )?| \d+GB.*", "", document["gpu"])
        found.setdefault(name, set()).update(quantities(document["sections"]))
    return found


def quantities(tree: Any, field: str = "", models: frozenset[str] = frozenset()) -> Iterator[Quantity]:
    if isinstance(tree, dict):
        models = frozenset(models_of(f"{tree.get('case', '')} {tree.get('what', '')}")) or models
        for name, value in tree.items():
            yield from quantities(value, name, models)
    elif isinstance(tree, list):
        for value in tree:
            yield from quantities(value, field, models)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        kind, factor = next((FIELDS[part] for part in field.split("_") if part in FIELDS), ("", 1.0))
        yield Quantity(kind, tree * factor, models)
        if field == "p50_ms":
            yield Quantity("rate", 1e3 / tree, models)


def is_recorded(figure: Figure) -> bool:
    """Return True if a file has the number. A page may round it, but to two digits at least."""
    written = Decimal(figure.number.replace(",", ""))
    _, digits, exponent = written.as_tuple()
    tolerance = 0.500001 * 10.0 ** int(exponent) if len(digits) > 1 else 1e-9
    units = [UNITS[figure.unit]] if figure.unit else [*UNITS.values(), ("", 1.0)]
    about = models_of(figure.sentence)
    return any(
        each.kind == kind and abs(each.value / factor - float(written)) <= tolerance
        for gpu in figure.gpus
        for each in recorded()[gpu]
        if not about or not each.models or about & each.models
        for kind, factor in units
    )


def missing(page: str) -> list[str]:
    """Return one line for each GPU figure of a page that is in no file."""
    return [f"{each.number} {each.unit}: {each.sentence}" for each in figures(page) if not is_recorded(each)]


# ----------------------------------------------------------------------------- tests


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *PAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


@pytest.mark.parametrize("page", pages())
def test_each_gpu_figure_of_a_page_is_in_a_result_file(page: str) -> None:
    absent = missing((ROOT / page).read_text(encoding="utf-8"))
    assert not absent, f"{page}: in no file of benchmarks/results/nvidia-*:\n" + "\n".join(absent)


def test_gpu_measurements_of_the_performance_model_are_in_a_result_file() -> None:
    rows = tomllib.loads((ROOT / "perf/sinew_perf/data/shares.toml").read_text(encoding="utf-8"))["measured"]
    ours = [
        Figure(frozenset([row["machine"].partition("-")[0].upper()]), str(row["ms"]), "ms", row["model"])
        for row in rows
        if row["engine"] == "cuda"
    ]
    assert len(ours) > 10
    assert [each for each in ours if not is_recorded(each)] == []


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("README.md", "in 16.1 ms. Eager", "in 15.1 ms. Eager"),
        ("README.md", "PyTorch needs 201 ms", "PyTorch needs 301 ms"),
        ("docs/gpu.md", "| 51.8 |", "| 41.8 |"),
        ("docs/gpu.md", "| **7.2** |", "| **6.2** |"),
        ("docs/gpu.md", "all 152 checks", "all 153 checks"),
        ("docs/gpu.md", "answered in 2.9 ms", "answered in 1.9 ms"),
        ("docs/perf.md", "| 13.19 |", "| 13.91 |"),
        ("docs/peers.md", "| 201 ms | 16.1 ms |", "| 201 ms | 16.2 ms |"),
        ("docs/decisions.md", "7.95 to 8.83 and 9.02 ms", "7.95 to 8.38 and 9.02 ms"),
        ("tests/requirements.md", "pi0.5 202, 53.8, 18.6", "pi0.5 204, 53.8, 18.6"),
        ("tests/requirements.md", "62, 76 and 138 chunks a second", "62, 77 and 138 chunks a second"),
    ],
)
def test_an_edited_figure_is_found(page: str, right: str, wrong: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert right in text
    assert len(missing(text.replace(right, wrong))) == text.count(right)


def test_most_edits_of_one_digit_are_found() -> None:
    """Another measurement of the same GPU may have the edited number, so a few edits pass."""
    every = {each for page in pages() for each in figures((ROOT / page).read_text(encoding="utf-8"))}
    edits = [
        each._replace(number=each.number[:at] + str((int(digit) + 3) % 10) + each.number[at + 1 :])
        for each in every
        for at, digit in enumerate(each.number.partition("e")[0])
        if digit.isdigit()
    ]
    assert len(edits) > 100
    assert sum(map(is_recorded, edits)) < 0.1 * len(edits)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("An H200 needs 16.1 ms, and 13 or 7.2 ms without a prompt.", ["16.1", "13", "7.2"]),
        ("An H200 runs it. It takes 9 ms. A CPU needs 3.4 s. That is 5 s less.", ["9"]),
        ("An H200 with torch 2.11, capability 9.0 and pi0.5 runs `sleep 5 s` with 3 views.", []),
        ("An H200 would need 5.9 ms: the roofline. The target is 10 ms.", []),
        (
            "No machine: 16.1 ms.\n\n## On an H200\n\nThe median is 8.3 us.\n\n## Later\n\nIt takes 7 ms.",
            ["8.3"],
        ),
        ("| H200, ms | target | p50 |\n|---|---|---|\n| pi0 on an H200 | 7.5 | **13** |\n", ["13"]),
        ("| project | on an H200 |\n|---|---|\n| other | 43.07 ms |\n", []),
        ("```\nH200 16.1 ms\n```\n", []),
    ],
)
def test_the_rule_of_gpu_figures(text: str, found: list[str]) -> None:
    assert [each.number for each in figures(text)] == found


def test_a_rounded_figure_is_that_of_the_file_and_of_its_gpu() -> None:
    def known(number: str, unit: str = "ms", gpu: str = "H200") -> bool:
        return is_recorded(Figure(frozenset([gpu]), number, unit, ""))

    assert known("16.08")
    assert known("16.1")
    assert known("16080", "us")
    assert not known("16.0")
    assert not known("16.1", "us")
    assert not known("16.1", gpu="H100")
    assert not known("2", "s")


def test_transcribed_files_have_the_numbers_of_their_log() -> None:
    """The files of the first runs were not kept. Their numbers are those that the log has."""
    checked = 0
    for path in RESULTS.glob("nvidia-*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not (told := document.get("transcribed")):
            continue
        log = (ROOT / told["log"]).read_text(encoding="utf-8")
        written = {float(number.replace(",", "")) for number in re.findall(NUMBER, NAMES.sub("·", log))}
        values = [value for _, value in plain(document["sections"])]
        assert [value for value in values if value not in written] == []
        assert "not kept" in told["why"]
        checked += len(values)
    assert checked > 60


def plain(tree: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a document without a conversion of units."""
    for item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(item[1], (dict, list)):
            yield from plain(item[1])
        elif isinstance(item[1], (int, float)):
            yield item[0], item[1]

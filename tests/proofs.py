"""Record which families the tests verify on which engines, precisions and protocols, and write the table of the
results.

A test states what it verifies with ``@pytest.mark.proves(engine=..., precision=..., wire=..., family=...)``, with
literals. engine "*" means the parameter of the test with this name. The family is that of the golden case in the id
of the test, unless ``family`` is given. ``but`` names ids that verify something else, such as an error.

    python -m pytest tests -m proves --proofs tests/proofs.json    # records the outcomes of the tests that ran
    python -m tests.proofs    # writes docs/families.md and sinew/engine/proofs.json, prints what each test verifies

tests/proofs.json contains the names of the tests. The file in the product contains only families, engines and
precisions, so that a test can be renamed without a change of the product.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from sinew.core.registry import families
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "tests" / "proofs.json", ROOT / "docs" / "families.md"
PRODUCT = ROOT / "sinew" / "engine" / "proofs.json"
FAMILIES = {  # golden case -> family; if several names match, the longest counts
    name: cases()[name].architecture for name in sorted(cases(), key=len, reverse=True)
}
NAMES = {  # architectures in the order of the table
    record["architecture"]: record["title"] for family in families() for record in family.published().values()
}
COLUMNS = (
    "eager",
    "plan",
    "onnx",
    "cuda references",
    "cpu",
    "native",
    "openpi",
    "http",
    "groot",
    "lerobot",
    "act",
)
ENGINES = COLUMNS[:5]
HEAD = """# Supported policies

On this page you find out whether Sinew runs your policy, and which engines were tested with it.

To use a policy, pass its checkpoint to any command: `sinew serve CHECKPOINT`. [Checkpoints](sources.md) lists the
files that each family needs. If your policy is not in the table, you can [add it](adding-a-model.md).

* **The columns** from `eager` to `cpu` are [engines](engines.md). Their cells contain the precisions for which a test
  passed. A star marks a slow test, which `make test` does not run.
* **The column protocols** contains the protocols that were tested with this family. Every protocol can serve every
  family.
* **An empty cell** means that there is no test. The engine may still work. If it does not support your policy, it
  prints the reason.
* **cuda references** are the PyTorch references of the engine `cuda`, which run on a CPU. [On a GPU](gpu.md) lists the
  policies that we ran on NVIDIA GPUs.

If an engine has no entry here, `--engine auto` takes it only after you verified it on your machine (`sinew validate`,
`sinew prepare`).

"""
FOOT = """
If you develop Sinew: `python -m tests.proofs` writes this page from the recorded test results (`tests/proofs.json`),
and prints what each test covers. `--engine auto` reads the same results from `sinew/engine/proofs.json`.
"""


Claim = tuple[str, str, str, str, str]


def claims(item: Any) -> list[Claim]:
    """Return (family, column, precision, test, "slow" or "") for each mark of a collected test."""
    found = []
    for mark in item.iter_markers("proves"):
        case = item.name.partition("[")[2].rstrip("]")
        if case in mark.kwargs.get("but", ()):
            continue
        family = mark.kwargs.get("family") or next((f for c, f in FAMILIES.items() if c in case), None)
        if family is None:
            raise ValueError(f"{item.nodeid}: the id contains no golden case; pass family= to the mark")
        engine, wires = mark.kwargs.get("engine"), mark.kwargs.get("wire", ())
        engine = item.callspec.params["engine"] if engine == "*" else engine
        # on a machine without a GPU, the test runs the references of the kernels
        engine = "cuda references" if engine == "cuda" else engine
        columns = (engine,) if engine else (wires,) if isinstance(wires, str) else wires
        precision = mark.kwargs.get("precision", "fp32") if engine else ""
        test, speed = item.nodeid.partition("[")[0], "slow" if item.get_closest_marker("slow") else ""
        found += [(family, column, precision, test, speed) for column in columns]
    return found


class Recorder:
    """A pytest plugin that adds the outcomes of the marked tests of a run to the file ``path``."""

    def __init__(self, path: Path):
        self.path, self.claims, self.passed = path, {}, {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.claims = {item.nodeid: claims(item) for item in items}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped or (report.passed and report.when != "call"):
            return
        for claim in self.claims.get(report.nodeid, ()):
            self.passed[claim] = self.passed.get(claim, True) and report.passed

    def pytest_sessionfinish(self) -> None:
        known = {tuple(row) for row in json.loads(self.path.read_text())} if self.path.exists() else set()
        made = {claim for claims_ in self.claims.values() for claim in claims_}
        tests = {claim[:4] for claim in made}
        # remove older claims of these tests, for example of a test that has become slow
        known = {claim for claim in known if claim in made or claim[:4] not in tests}
        known -= {claim for claim, passed in self.passed.items() if not passed}
        known |= {claim for claim, passed in self.passed.items() if passed}
        self.path.write_text(json.dumps(sorted(known), indent=0) + "\n")


def marked() -> dict[str, set[str]]:
    """Return the marked tests and the columns that they name, from their source. "*" stands for a parameter."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.proves(" in text else ():
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.proves":
                    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                    wires = given.get("wire", ())
                    wires = (wires,) if isinstance(wires, str) else wires
                    columns = {given["engine"]} if "engine" in given else set(wires)
                    test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"  # type: ignore[attr-defined]
                    found.setdefault(test, set()).update(columns)
    return found  # fmt: skip


def listed(who: list[str]) -> str:
    """Return a list of families as text. A long list is written as all families except a few."""
    missing = [name for name in NAMES.values() if name not in who]
    if len(missing) <= len(NAMES) // 4:
        return "all" + (f" but {', '.join(missing)}" if missing else "")
    return ", ".join(dict.fromkeys(who))


def render(rows: list[list[str]]) -> str:
    """Return the page with the recorded results."""
    lines = [
        HEAD.rstrip("\n") + "\n",
        "| family | " + " | ".join((*ENGINES, "protocols")) + " |",
        "|---" * (len(ENGINES) + 2) + "|",
    ]
    for family, shown in NAMES.items():
        cells = []
        for column in ENGINES:
            here = [(precision, speed) for f, c, precision, _, speed in rows if (f, c) == (family, column)]
            fast = {precision for precision, speed in here if not speed}
            named = {precision + ("" if precision in fast else "*") for precision, _ in here}
            cells.append(", ".join(sorted(named)))
        cells.append(", ".join(c for c in COLUMNS[5:] if any(row[:2] == [family, c] for row in rows)))
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + FOOT


def product(rows: list[list[str]]) -> str:
    """Return the text of the product's file: [family, engine, precision] of each result about an engine, sorted."""
    claims_ = sorted({tuple(row[:3]) for row in rows if row[1] in ENGINES})
    return "[\n" + ",\n".join(json.dumps(claim) for claim in claims_) + "\n]\n"


def by_test(rows: list[list[str]]) -> dict[str, str]:
    """Return a line for each test, with the families that it verifies."""
    found = {}
    for test in sorted({row[3] for row in rows}):
        parts: dict[str, list[str]] = {}
        for family, column, precision, name, _ in rows:
            if name == test:
                parts.setdefault(f"{column} {precision}".strip(), []).append(NAMES[family])
        whose: dict[str, list[str]] = {}
        for what, who in sorted(parts.items()):
            whose.setdefault(listed(who), []).append(what)
        found[test] = "; ".join(f"{', '.join(what)}: {who}" for who, what in whose.items())
    return found


if __name__ == "__main__":
    RECORDED = json.loads(RECORD.read_text())
    PAGE.write_text(render(RECORDED), encoding="utf-8")
    PRODUCT.write_text(product(RECORDED), encoding="utf-8")
    for name, proved in by_test(RECORDED).items():
        print(f"{name}: {proved}")

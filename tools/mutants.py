"""Mutation testing: make small faults, one at a time, in modules that are critical for a robot. Do the tests fail?

``make mutate`` or ``python -m tools.mutants [MODULE ...] [--sample N] [--seed S] [--list]``. A mutant is a change of
one expression or statement. It is written into a copy of the checkout. Then the test files that tools/mutants.toml
lists for the module run. A mutant is killed if a test fails or takes too long. tools/mutants.toml also lists
equivalent mutants, whose change has no observable effect, with the reason. The run fails if fewer than 95 % of all
other mutants are killed.

For each mutant, the program forks a process that has imported torch and pytest, so most mutants take a second or two.
Two other tools were tried in November 2026 and are not used. mutmut 3 skips every decorated function, and so every
property, and it found no test of a package below packages/*/src. cosmic-ray supports no samples. Its changes are only
those of operators, numbers and conditions. Two thirds of its operator changes do not apply (>> of floats), and it
starts a new interpreter for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import dataclasses
import gc
import importlib
import inspect
import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import hypothesis
import pytest

OURS = (
    "sinew",
    "sinew_client",
    "tests",
    "eval",
    "perf",
)  # first names of the modules that this repository imports by path
ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
GOAL = 0.95
PATIENCE = 4.0  # a test, or a set of tests, may take this multiple of its time without a mutant
PATIENCE_S = 2.0  # additional seconds: of sleep for a set of tests, and of CPU time for one test
QUICK_S = 10.0  # default CPU seconds of the tests for --quick, measured without a mutant
FEW = 3  # this many tests of a module may fail without a mutant; the program names them and leaves them out
UNKNOWN = 77  # exit status if a mutant cannot be run in a fork
ELSEWHERE = "a process"  # name of a test's entry if the test starts a process, whose functions are unknown
PRELOAD = (
    "torch",
    "numpy",
    "PIL.Image",
    "pytest",
    "hypothesis.stateful",
    "zmq",
    "aiohttp",
    "gguf",
    "tokenizers",
)

COMPARED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil"}
NAMES |= {there: here for here, there in NAMES.items()}
SILENT = ("debug", "info", "warning", "error", "critical", "exception")  # methods of a logger


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        name: Description of the change without line numbers, so that tools/mutants.toml stays valid.
        line: Line of the change.
        statement: First line of the statement with the change.
        source: The changed module.
    """

    name: str
    line: int
    statement: int
    source: str


def mutants(source: str, whole: bool = True) -> list[Mutant]:
    """Return all mutants of a module in the order of its text. Annotations, messages, logs and asserts are not
    changed.

    Args:
        source: The module.
        whole: Also write the source of each mutant, which takes most of the time.
    """
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: dict[str, int] = {}

    def note(where: str, node: ast.AST, statement: int, old: str, new: str) -> None:
        name = f"{where}: {old} -> {new}"
        seen[name] = seen.get(name, 0) + 1
        name += f" #{seen[name]}" if seen[name] > 1 else ""
        found.append(Mutant(name, getattr(node, "lineno", 0), statement, ast.unparse(tree) if whole else ""))

    def change(
        where: str, statement: int, parent: ast.AST, field: str, index: int | None, new: ast.AST
    ) -> None:
        """Replace a child of ``parent`` by ``new``, write the module, and restore the child."""
        held = getattr(parent, field)
        node = held if index is None else held[index]
        tests = isinstance(node, (ast.If, ast.While, ast.IfExp))
        before = ast.unparse(node.test if tests else node)
        if index is None:
            setattr(parent, field, new)
        else:
            held[index] = new
        ast.fix_missing_locations(new)
        note(where, node, statement, before, ast.unparse(new.test if tests else new))
        if index is None:
            setattr(parent, field, node)
        else:
            held[index] = node

    def visit(parent: ast.AST, where: str, outer: int) -> None:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "bases", "format_spec", "keywords_only"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.AST) or skipped(node):
                    continue
                inner = where
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    inner = f"{where}.{node.name}" if where else node.name
                statement = node.lineno if isinstance(node, ast.stmt) else outer
                for new in changes(node):
                    change(inner or "module", statement, parent, field, index, new)
                visit(node, inner, statement)

    visit(tree, "", 0)
    return found


def equivalents(entry: Mapping[str, dict]) -> dict[str, str]:
    """Return the equivalent mutants with the reasons. One line may name two changes of a number: "64 -> 65, 63"."""
    found = {}
    for name, why in entry.get("equivalent", {}).items():
        both = re.fullmatch(r"(.* -> )(-?[\d.e+-]+), (-?[\d.e+-]+)( #\d+)?", name)
        for new in both.group(2, 3) if both else ():
            found[both[1] + new + (both[4] or "")] = why
        if not both:
            found[name] = why
    return found


def skipped(node: ast.AST) -> bool:
    """Return True if this part of a module has no effect on its results."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.AnnAssign)) and not getattr(
        node, "value", None
    ):
        return True
    if isinstance(node, (ast.Assert, ast.JoinedStr)):
        return True
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return True
    if isinstance(node, ast.Assign) and any(
        isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets
    ):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _logs(node.value))


def _logs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SILENT
        and ast.unparse(node.func.value) in ("log", "logger")
    )


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the replacements of a node."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            for other in COMPARED.get(type(operator), ()):
                made = copy.deepcopy(node)
                made.ops[at] = other()
                yield made
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        made = copy.copy(node)
        made.test = ast.UnaryOp(ast.Not(), node.test)
        yield made
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) not in ("None", "False"):
        yield ast.Return(ast.Constant(None))
    elif (
        isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))
        or (isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)))
        or (
            isinstance(node, ast.Assign)
            and all(not isinstance(to, (ast.Name, ast.Tuple)) for to in node.targets)
        )
    ):
        yield ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


# ----------------------------------------------------------------------------- run the mutants


def copied(folder: Path) -> Path:
    """Copy the present checkout into another folder, without the files that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def named(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the functions in a code object, also nested ones, by their name and their number among functions of this
    name.

    A property, for example, has two functions of one name.
    """
    found: dict[tuple[str, int], CodeType] = {}

    def visit(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                if (
                    inner.co_flags & inspect.CO_OPTIMIZED
                ):  # a function has this flag, and the body of a class does not
                    name = inner.co_qualname
                    found[name, sum(other == name for other, _ in found)] = inner
                visit(inner)

    visit(code)
    return found


def patches(before: CodeType, after: CodeType) -> dict[tuple[str, int], CodeType] | None:
    """Return the functions that a mutant changes. None if the mutant changes the import of the module."""

    def imported(code: CodeType) -> Iterator[object]:
        yield code.co_code, code.co_names
        for each in code.co_consts:
            if not isinstance(each, CodeType):
                yield repr(each)
            elif not each.co_flags & inspect.CO_OPTIMIZED:
                yield from imported(each)

    here, there = named(before), named(after)
    if list(imported(before)) != list(imported(after)) or {
        name for name, _ in here.keys() ^ there.keys() if ".<locals>." not in name
    }:
        return None  # a nested function changes together with its outer function
    return {name: code for name, code in there.items() if code != here.get(name)}


def noting(module: str, source: str) -> str:
    """Return a module whose functions and statements record their execution, as "module:function" and "module:line"."""
    tree = ast.parse(source)

    def noted(*where: object) -> list[ast.stmt]:
        return [ast.parse(f"entered_({f'{module}:{each}'!r})").body[0] for each in where]

    def visit(node: ast.AST, where: str, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{where}.{child.name}" if where else child.name
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            visit(child, inner, function or (inside and not isinstance(child, ast.ClassDef)))
            if function:
                at = 1 if ast.get_docstring(child) is not None else 0
                child.body[at:at] = noted(inner)
        for field, body in ast.iter_fields(node):
            if inside and isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                lines: list[ast.stmt] = []
                for each in body:
                    if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                        lines += noted(each.lineno)
                    lines.append(each)
                setattr(node, field, lines)

    visit(tree, "", False)
    return ast.unparse(tree)


SIMPLE = (int, float, complex, str, bytes, type(None))


def values(plain: object, changed: object, module: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the names in a module or its classes whose value a mutant changes, with the new value.

    Such values are constants, attributes of classes, and defaults of functions and fields.
    """
    for name, old in vars(plain).items():
        if name == "__firstlineno__":  # Python 3.13 stores the line of a class in this attribute
            continue
        new = vars(changed).get(name)
        if type(old) is type(new) and isinstance(old, (*SIMPLE, tuple, frozenset)) and repr(old) != repr(new):
            yield (name,), new
        elif isinstance(old, FunctionType) and isinstance(new, FunctionType):
            for what in ("__defaults__", "__kwdefaults__"):
                if repr(getattr(old, what)) != repr(getattr(new, what)):
                    yield (name, what), getattr(new, what)
        elif isinstance(old, dataclasses.Field) and isinstance(new, dataclasses.Field):
            if isinstance(old.default, SIMPLE) and repr(old.default) != repr(new.default):
                yield (name, "default"), new.default
        elif name == "__dataclass_fields__" and isinstance(old, dict):
            for field in old.keys() & new.keys():
                for place, value in values(
                    SimpleNamespace(**{field: old[field]}), SimpleNamespace(**{field: new[field]}), module
                ):
                    yield (name, *place), value
        elif isinstance(old, type) and isinstance(new, type) and old.__module__ == module:
            for place, value in values(old, new, module):
                yield (name, *place), value


def revalued(module: ModuleType, plain: str, source: str) -> bool:
    """Give an imported module the constants and defaults of a mutant, also in other modules that imported them.

    Returns False if the mutant changes no such value. If the module cannot be imported, the process exits like a
    failed test.
    """
    made = []
    for text in (plain, source):
        made.append(each := ModuleType(module.__name__))
        vars(each).update(__file__=module.__file__, __package__=module.__package__)
        done = False
        with contextlib.suppress(BaseException):
            exec(compile(text, str(module.__file__), "exec"), vars(each))
            done = True
        if not done and text is source:
            os._exit(1)
        if not done:
            return False
    found = [(place, new) for place, new in values(*made, module.__name__) if place[0] != "__builtins__"]
    for (*path, last), new in found:
        at: Any = module
        for name in path:
            at = at[name] if isinstance(at, dict) else getattr(at, name)
            at = getattr(at, "__func__", at)  # a class method has its function in this attribute
        if path:
            setattr(at, last, new)
            continue
        old = vars(module)[last]
        for other in [*sys.modules.values()]:
            ours = getattr(other, "__name__", "").split(".")[0] in OURS
            if ours and vars(other).get(last) is old:
                setattr(other, last, new)
    return bool(found)


class Notes:
    """A pytest plugin that records which tests enter which functions, which tests start processes, and the times of
    tests.

    A function that a shared fixture enters counts for each test of the fixture.
    """

    def __init__(self, out: Path):
        self._out, self._at = out, [""]
        self._entered: dict[str, set[str]] = {}  # function or statement -> tests and fixtures that enter it
        self._took: dict[str, float] = {}  # CPU seconds
        self._slept: dict[str, float] = {}  # seconds of sleep
        self._fixtures: dict[str, Sequence[str]] = {}
        self._failed: dict[str, None] = {}
        builtins.entered_ = self._note  # type: ignore[attr-defined]
        sys.addaudithook(self._started)

    def _note(self, where: str) -> None:
        self._entered.setdefault(where, set()).update(self._at)

    def _started(self, event: str, _given: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
            self._note(ELSEWHERE)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._at, self._began = [nodeid], (time.process_time(), slept())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._took[nodeid] = time.process_time() - self._began[0]
        self._slept[nodeid] = slept() - self._began[1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._fixtures[item.nodeid] = getattr(item, "fixturenames", ())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        self._at.append(fixturedef.argname)
        yield
        self._at.remove(fixturedef.argname)

    def pytest_sessionfinish(self) -> None:
        found = {}
        for where in [*self._entered]:  # the entries of a module or class include those of its functions
            module, both, name = where.partition(":")
            if both and not name.isdigit():
                for outer in (module, f"{module}:{name.rpartition('.')[0]}"):
                    self._entered.setdefault(outer, set()).update(self._entered[where])
        for where, marks in self._entered.items():
            tests = [
                test
                for test, fixtures in self._fixtures.items()
                if test not in self._failed and (test in marks or any(name in marks for name in fixtures))
            ]
            found[where] = sorted(tests, key=lambda test: self._took.get(test, 0.0))
        self._out.write_text(json.dumps([found, self._took, self._slept, list(self._failed)]))


class Fast:
    """A pytest plugin that collects the tests once and forks a process for each mutant of a function.

    The fork replaces the code of the function in the imported modules, and runs the tests that enter the function.

    Args:
        plain: Source of each module.
        chosen: Mutants of each module.
        verdicts: The results, by module and name. A mutant that is missing must be run with its own import.
    """

    def __init__(
        self,
        plain: Mapping[str, str],
        chosen: Mapping[str, Sequence[Mutant]],
        folder: Path,
        quick: float | None,
    ):
        self._plain, self._chosen, self._folder, self._quick = plain, chosen, folder, quick
        self._notes, self.out = folder / ".entries.json", folder / ".verdicts.json"
        builtins.entered_ = lambda _: None  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None
        paths = {module: self._folder / module for module in self._plain}
        imported = {}
        for module, path in paths.items():
            imported[module] = importlib.import_module(
                module.removeprefix("packages/sinew-client/src/").removesuffix(".py").replace("/", ".")
            )
            path.write_text(self._plain[module])  # processes that the tests start import this file
        session.config.pluginmanager.register(notes := Notes(self._notes))
        live: dict[str, dict[str, dict[int, list[FunctionType]]]] = {str(path): {} for path in paths.values()}
        gc.unfreeze()  # conftest.py has frozen the imported objects, and gc does not list frozen objects
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename in live:
                of = live[each.__code__.co_filename].setdefault(each.__code__.co_qualname, {})
                of.setdefault(each.__code__.co_firstlineno, []).append(each)
        gc.freeze()
        if not self._notes.is_file():
            if (child := os.fork()) == 0:
                os.setpgrp()
                session.config.option.maxfail = 0
                return None
            awaited(child, 1e6)
        if not self._notes.is_file():
            os._exit(1)
        session.config.pluginmanager.unregister(notes)
        builtins.entered_ = lambda _: None  # type: ignore[attr-defined]
        entered, took, quiet, _ = json.loads(self._notes.read_text())
        verdicts: dict[str, dict[str, str]] = {module: {} for module in paths}
        record = Record(took)
        killer = self._folder / ".killer"
        session.config.pluginmanager.register(Patience(took, killer, entered.get(ELSEWHERE, ())))
        before = {module: compile(self._plain[module], str(path), "exec") for module, path in paths.items()}
        for module, path in paths.items():  # restore the modules without the recording
            exchanged(live[str(path)], named(before[module]))
        for module, mutant in [(name, each) for name, some in self._chosen.items() for each in some]:
            path = paths[module]
            changed = patches(before[module], compile(mutant.source, str(path), "exec"))
            where = place(module, mutant, entered)
            tests = asked(entered, where, took, self._quick, partial(record.price, module, where))
            if not tests or self._quick is None:
                tests = [*tests, *(test for test in entered.get(ELSEWHERE, ()) if test not in tests)]
            if not tests:
                continue
            path.write_text(mutant.source)
            killer.unlink(missing_ok=True)
            if (child := os.fork()) == 0:
                os.setpgrp()
                if not (
                    exchanged(live[str(path)], changed)
                    if changed
                    else revalued(imported[module], self._plain[module], mutant.source)
                ):
                    os._exit(UNKNOWN)
                Ahead(tests, alone=True).pytest_collection_modifyitems(session.items)
                return None
            verdict = awaited(child, quietly(quiet, tests))
            record.note(module, where, tests, killer.read_text() if killer.is_file() else None)
            if verdict != "unknown" and (changed or verdict != "passed"):
                verdicts[module][mutant.name] = verdict
            path.write_text(self._plain[module])
            self.out.write_text(json.dumps(verdicts))
        self.out.write_text(json.dumps(verdicts))
        os._exit(0)


class Record:
    """Counts for each test of a module how often it ran, and how often it killed a mutant."""

    def __init__(self, took: Mapping[str, float]):
        self._took = took
        self._asked: Counter[tuple[str, str]] = Counter()
        self._noticed: Counter[tuple[str, str]] = Counter()

    def price(self, module: str, where: str, test: str) -> float:
        """Return the expected CPU seconds until this test kills a mutant."""
        noticed, asked = self._noticed[module, test] + 0.1, self._asked[module, test] + 1.0
        here = self._noticed[where, test] / max(1, self._asked[where, test])
        return (self._took[test] + 0.01) / max(noticed / asked, here)

    def note(self, module: str, where: str, tests: Sequence[str], killer: str | None) -> None:
        for test in tests[: tests.index(killer) + 1] if killer in tests else tests:
            self._asked.update([(module, test), (where, test)])
        if killer is not None:
            self._noticed.update([(module, killer), (where, killer)])


def place(module: str, mutant: Mutant, entered: Mapping[str, Sequence[str]]) -> str:
    """Return the place that a test must enter to meet a mutant: its statement, its function or class, or the module."""
    where = f"{module}:{mutant.name.partition(':')[0]}"
    if f"{module}:{mutant.statement}" in entered:
        return f"{module}:{mutant.statement}"
    return where if where in entered else module


def asked(
    entered: Mapping[str, Sequence[str]],
    where: str,
    took: Mapping[str, float],
    quick: float | None,
    price: Callable[[str], float] | None = None,
) -> Sequence[str]:
    """Return the tests that enter a place, the cheapest first.

    Args:
        entered: Place -> tests.
        where: The place.
        took: CPU seconds of each test.
        quick: Select only tests until they take this many seconds together. None selects all.
        price: Order of the tests, such as :meth:`Record.price`. None orders them by their time.
    """
    tests = sorted(entered.get(where, ()), key=price or took.__getitem__)
    left = math.inf if quick is None else quick
    for count, test in enumerate(tests):
        if left <= 0:
            return tests[:count]
        left -= took[test]
    return tests


def slept(process: int | str = "self") -> float:
    """Return how many seconds the first thread of a process has slept, up to a constant.

    Waiting for a processor is not sleep, so the value does not depend on the load of the machine. The result is 0 if
    the system does not provide these times.
    """
    with contextlib.suppress(OSError):
        ran, turn, _ = Path(f"/proc/{process}/schedstat").read_text().split()
        return time.monotonic() - (int(ran) + int(turn)) / 1e9
    return 0.0


def quietly(quiet: Mapping[str, float], tests: Iterable[str]) -> float:
    """Return how many seconds a process may sleep in these tests."""
    return PATIENCE * sum(quiet.get(test, 0.0) for test in tests) + PATIENCE_S


class Patience:
    """A pytest plugin that ends this process at the first failed test, and if a test takes too much CPU time
    (SIGPROF).

    It writes the name of the failed test to a file. CPU time is used, so that an endless loop is found on a busy
    machine, and a test that waits for a processor does not fail. Tests that start processes end normally, because
    these processes must end with them.
    """

    def __init__(self, took: Mapping[str, float], killer: Path, elsewhere: Sequence[str]):
        self._took, self._killer, self._elsewhere = took, killer, frozenset(elsewhere)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo and not isinstance(
            call.excinfo.value, (pytest.skip.Exception, pytest.xfail.Exception)
        ):
            self._killer.write_text(item.nodeid)
            if item.nodeid not in self._elsewhere:
                os._exit(1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, PATIENCE * self._took.get(nodeid, 0.0) + PATIENCE_S)

    def pytest_runtest_logfinish(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def exchanged(
    live: Mapping[str, Mapping[int, Sequence[FunctionType]]], changed: Mapping[tuple[str, int], CodeType]
) -> bool:
    """Replace the code of functions. Returns False if a changed function, and all functions around it, are not
    found."""
    done: set[str] = set()
    for (name, number), code in changed.items():
        places = live.get(name, {})
        if number >= len(places):
            continue
        for function in places[sorted(places)[number]]:
            if function.__code__.co_freevars != code.co_freevars:
                return False
            function.__code__ = code
        done.add(name)
    return all(
        name in done or any(name.startswith(f"{outer}.<locals>.") for outer in done) for name, _ in changed
    )


class Ahead:
    """A pytest plugin that runs some tests first, or only these tests. The tests of one file stay together."""

    def __init__(self, tests: Sequence[str], alone: bool = False):
        self._place, self._alone = {nodeid: place for place, nodeid in enumerate(tests)}, alone

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        last = len(self._place)
        if self._alone and self._place:
            items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place.get(item.nodeid, last))
        files: dict[str, int] = {
            item.nodeid.partition("::")[0]: at for at, item in reversed([*enumerate(items)])
        }
        items.sort(key=lambda item: (item.nodeid not in self._place, files[item.nodeid.partition("::")[0]]))


def awaited(child: int, limit: float) -> str:
    """Wait for a process that leads a process group.

    Returns:
        "passed", "failed", "unknown", or "time" if the process has slept for longer than ``limit`` seconds. At the
        end, the whole group is killed.
    """
    began, verdict, done, ends = slept(child), "time", 0, os.pidfd_open(child)
    while slept(child) - began < limit:
        select.select([ends], [], [], 1.0)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            verdict = {0: "passed", UNKNOWN: "unknown", -signal.SIGPROF: "time"}.get(code, "failed")
            break
    os.close(ends)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if verdict == "time" and not done:
        os.waitpid(child, 0)
    return verdict


def run(
    home: Path, files: Sequence[str], options: Sequence[str], limit: float, *plugins: object
) -> tuple[str, float, str]:
    """Run test files in a fork of this process. Returns "passed", "failed" or "time", the seconds, and the output."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.setpgrp()
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.chdir(home)
            paths = [str(home), str(home / "packages" / "sinew-client" / "src")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            sys.path[:0] = paths
            for name in [each for each in sys.modules if each.split(".")[0] in OURS]:
                del sys.modules[name]
            code = 3
            with contextlib.suppress(BaseException):
                code = int(pytest.main([*OPTIONS, *options, *files], [*plugins]))
            sys.stdout.flush()
            os._exit(code)
        verdict = awaited(child, limit)
        said.seek(0)
        return verdict, time.monotonic() - began, said.read()


MARKS = "not slow and not gpu and not kernels"  # as `make test`; all other tests would take too long
OPTIONS = ("-xqm", MARKS, "-p", "no:cacheprovider", "--hypothesis-seed", "0", "--no-header")


@dataclass
class Tally:
    module: str
    of: int  # number of all mutants
    run: int
    killed: int
    late: int  # killed mutants whose tests took too long, which a busy machine can also cause
    equivalent: int
    survivors: list[str]

    @property
    def share(self) -> float:
        return self.killed / max(1, self.run - self.equivalent)


def examine(
    home: Path,
    table: Mapping[str, dict],
    sample: int,
    seed: int,
    options: Sequence[str],
    again: Mapping[str, set[str]],
    quick: float | None,
    entries: Path | None,
) -> Iterator[Tally]:
    """Run a sample of the mutants of some modules with all their tests.

    Args:
        home: Copy of the checkout.
        table: Modules with their entries in tools/mutants.toml.
        sample: Mutants for each module. 0: all.
        seed: Seed of the sample.
        options: Options of pytest.
        again: Mutants to run instead of a sample, by module.
        quick: Run only the tests that enter the changed code, up to this many CPU seconds.
        entries: File that stores which tests enter which functions.

    Raises:
        SystemExit: Tests fail without a mutant.
    """
    files = list(dict.fromkeys(test for entry in table.values() for test in entry["tests"]))
    originals = {module: (home / module).read_text() for module in table}
    found = {module: mutants(original) for module, original in originals.items()}
    plain, chosen = {}, {}
    for module, entry in table.items():
        known = equivalents(entry)
        if unknown := known.keys() - {mutant.name for mutant in found[module]}:
            raise SystemExit(
                f"{TABLE.name}, {module}: unknown mutants {sorted(unknown)}; correct their names"
            )
        wanted = [mutant for mutant in found[module] if not again or mutant.name in again[module]]
        if 0 < sample < len(wanted):
            wanted = sorted(
                random.Random(f"{seed} {module}").sample(wanted, sample), key=lambda each: each.line
            )
        chosen[module] = wanted
        # compare with the parsed and written module, because writing also changes its form
        plain[module] = ast.unparse(ast.parse(originals[module]))
        (home / module).write_text(noting(module, originals[module]))
    tried = {
        module: [each for each in some if each.name not in equivalents(table[module])]
        for module, some in chosen.items()
    }
    fast = Fast(plain, tried, home, quick)
    for left in (home / ".entries.json", fast.out):
        left.unlink(missing_ok=True)
    if entries and entries.is_file():
        shutil.copy(entries, home / ".entries.json")
    verdict, _, said = run(home, files, options, 1e6, fast)
    if verdict != "passed":
        raise SystemExit(
            f"{', '.join(table)}: tests fail without a mutant; repair them first\n{said[-3000:]}"
        )
    entered, took, quiet, failed = json.loads((home / ".entries.json").read_text())
    if entries and not failed:
        shutil.copy(home / ".entries.json", entries)
    if len(failed) > FEW:
        raise SystemExit(
            f"{', '.join(table)}: tests fail without a mutant; repair them first\n{said[-3000:]}"
        )
    for test in failed:  # for example tests that wait for clocks, on a busy machine
        print(f"  left out, because it fails without a mutant: {test}", flush=True)
        options = [*options, "--deselect", test]
    verdicts = json.loads(fast.out.read_text())
    for module, wanted in tried.items():
        path, equivalent = home / module, len(chosen[module]) - len(wanted)
        tally = Tally(module, len(found[module]), len(chosen[module]), 0, 0, equivalent, [])
        for mutant in wanted:
            verdict = verdicts[module].get(mutant.name, "unknown")
            if verdict == "unknown" or (verdict == "passed" and quick is None):
                path.write_text(mutant.source)
                first = asked(entered, place(module, mutant, entered), took, quick)
                limit = quietly(quiet, quiet)
                where = files if quick is not None else table[module]["tests"]
                patience = Patience(took, home / ".killer", entered.get(ELSEWHERE, ()))
                verdict, _, _ = run(
                    home, where, options, limit, Ahead(first, alone=quick is not None), patience
                )
                path.write_text(plain[module])
            if verdict == "passed":
                tally.survivors.append(mutant.name)
                print(f"  survived {module}:{mutant.line} {mutant.name}", flush=True)
            else:
                tally.killed += 1
                tally.late += verdict == "time"
        path.write_text(originals[module])
        yield tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "modules", nargs="*", help="parts of the modules' paths (default: all modules in the table)"
    )
    parser.add_argument("--sample", type=int, default=20, help="number of mutants for each module (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick",
        type=float,
        nargs="?",
        const=QUICK_S,
        help="run only tests that enter the changed code, up to this many CPU seconds",
    )
    parser.add_argument(
        "--together", action="store_true", help="collect and try the tests of all modules only once"
    )
    parser.add_argument(
        "--again", type=Path, help="a file of --json; run only the mutants that survived there"
    )
    parser.add_argument(
        "--entries",
        type=Path,
        help="a file that stores which tests enter which functions, for further runs",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and exit")
    parser.add_argument(
        "--deselect",
        action="append",
        default=[],
        help="a test to leave out, because it fails on this machine without mutants",
    )
    parser.add_argument("--json", type=Path, help="append one JSON line for each module to this file")
    given = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    names = [name for name in table if not given.modules or any(part in name for part in given.modules)]
    again: dict[str, set[str]] = {}
    if given.again:
        lines = map(json.loads, given.again.read_text().splitlines())
        again = {line["module"]: set(line["survivors"]) for line in lines if line["survivors"]}
        names = [name for name in names if name in again]
    if not names:
        parser.error(f"no path of a module in {TABLE.name} contains {given.modules}")
    if given.list:
        for name in names:
            print(
                name,
                *(f"  {each.line}: {each.name}" for each in mutants((ROOT / name).read_text(), whole=False)),
                sep="\n",
            )
        return 0
    sys.dont_write_bytecode = (
        True  # otherwise Python could use the bytecode of an earlier file with the same size and second
    )
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # One failure is enough, so no time is spent on a smaller example or on an example of the last mutant.
    hypothesis.settings.register_profile(
        "mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
    )
    hypothesis.settings.load_profile("mutants")
    options = [word for each in given.deselect for word in ("--deselect", each)]
    tallies = []
    with tempfile.TemporaryDirectory(prefix="sinew-mutants-") as folder:
        home = copied(Path(folder))
        groups = [names] if given.together else [[name] for name in names]
        more = given.sample, given.seed, options, again, given.quick, given.entries
        for tally in (
            each for group in groups for each in examine(home, {n: table[n] for n in group}, *more)
        ):
            tallies.append(tally)
            print(
                f"{tally.module}: {tally.run} of {tally.of} mutants, {tally.killed} killed ({tally.late} by time),"
                f" {len(tally.survivors)} survived, "
                f"{tally.equivalent} equivalent: {tally.share:.0%}",
                flush=True,
            )
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(vars(tally)) + "\n")
    return int(any(tally.share < GOAL for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())

"""Measure the structure of a checkout: the files that a reader must open, the imports, and the amount of code.

    python -m tools.structure [--against CHECKOUT]

No measure has a list of exemptions. Sizes are reported and never limited. `tests/test_structure.py` checks the
directions of imports.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Key: import name of a Python distribution, lowest first. Value: the folders that may contain it. A distribution
# imports only those in `MAY_IMPORT`. The LeRobot plugin works with the client alone and can also use `sinew`.
DISTRIBUTIONS = {
    "sinew_client": "packages/sinew-client/src/sinew_client",
    "sinew_ros": "packages/sinew_ros/sinew_ros",
    "lerobot_policy_sinew": "packages/lerobot_policy_sinew/src/lerobot_policy_sinew",
    "sinew": "sinew",
    "sinew_perf": "perf/sinew_perf",
    "sinew_eval": "eval/sinew_eval",
    "research": "research",
}
MAY_IMPORT = {
    "sinew_client": set[str](),
    "sinew_ros": {"sinew_client"},
    "lerobot_policy_sinew": {"sinew", "sinew_client", "sinew_eval"},
    "sinew": {"sinew_client"},
    "sinew_perf": {"sinew", "sinew_client"},
    "sinew_eval": {"sinew", "sinew_client"},
    "research": {"sinew_eval", "sinew_perf", "sinew", "sinew_client", "lerobot_policy_sinew"},
}
# The folders of `sinew`, highest first. A file imports from its own line and from the lines below.
ROOMS = [
    {"cli"},
    {"driving", "lowbit"},
    {"targets"},
    {"bench", "checks", "serve"},
    {"memory"},
    {"stream"},
    {"policy"},
    {"describe"},
    {"assemble"},
    {"capabilities", "warm_up"},
    {"vlacpp"},
    {"families"},
    {"engine", "convert"},
    {"models"},
    {"layers", "processing", "records"},
    {"bundle"},
    {"steps"},
    {"core"},
]
# The modules from which a reader starts who wants to convert SmolVLA, serve it over the native protocol and drive a
# robot.
JOURNEY = (
    "sinew.convert",
    "sinew.convert.conversion",
    "sinew.families.smolvla.convert",
    "sinew.policy",
    "sinew.engine.eager.engine",
    "sinew.engine.loading",
    "sinew.engine.adapters",
    "sinew.families.smolvla.model",
    "sinew.serve.launch",
    "sinew.serve.deploy",
    "sinew.serve.service",
    "sinew.serve.wires",
    "sinew.serve.wires.native",
    "sinew.serve.transport.zeromq",
    "sinew_client.client",
    "sinew_client.control.loop",
    "sinew_client.control.requester",
    "sinew_client.control.servers",
)
# Bare participles as names of variables do not tell the reader what the variables contain.
PARTICIPLES = re.compile(r"\b(?:found|known|given|said|wanted|asked|held|kept|told) (?::[^=]*)?= ")
# Names of engines that are not also names of devices, as "cpu" and "cuda" are.
ENGINES = {"eager", "plan", "onnx"}
PROBES_AN_ENGINE = re.compile(r"(?:get|has)attr\([^,]*engine")
# The flag `--engine NAME` in the example of a command is not a statement about an engine.
NAMES_AN_ENGINE = re.compile(r"(?<!--)\bengines? (?:eager|plan|cpu|onnx|cuda)\b")
# On a variable for one of Sinew's robots. Modules call the robots of other projects devices.
PROBES_A_ROBOT = re.compile(r"(?:get|has)attr\((?:self\._?)?(?:robot|machine)\b")
# The one file that reads the attributes of a robot, and the one file that takes addresses apart.
ROBOT_FACTS = "packages/sinew-client/src/sinew_client/control/facts.py"
ADDRESSES = "packages/sinew-client/src/sinew_client/addresses.py"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST, *, on_import: bool = False) -> Iterator[ast.AST]:
    """Yield the statements inside a node, at any depth.

    Args:
        on_import: Only the statements that run when the module is imported: no function bodies, and nothing under
            `if TYPE_CHECKING`.
    """
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            if on_import and isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if on_import and isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test):
                continue
            yield each
            yield from statements(each, on_import=on_import)


@cache
def imported_names(path: Path, on_import: bool = False) -> frozenset[str]:
    """Return the modules that a file imports, and each imported name as if it were a module."""
    names: set[str] = set()
    for node in statements(tree(path), on_import=on_import):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


def code_lines(path: Path) -> int:
    """Return the number of lines that are not blank, not a comment and not part of a docstring."""
    text, module = path.read_text(), tree(path)
    without: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                without |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and line.strip()[0] != "#" for number, line in lines if number not in without
    )


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes of a graph that reach each other (Tarjan's algorithm), sorted."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    for start, nexts in graph.items():
        if start in index:
            continue
        work = [(start, iter(sorted(nexts)))]
        index[start] = lowest[start] = len(index)
        stack.append(start)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in index:
                    index[other] = lowest[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(sorted(graph.get(other, ())))))
                    break
                if other in stack:
                    lowest[node] = min(lowest[node], index[other])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == index[node]:
                    group = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(group) > 1:
                        groups.append(sorted(group))
    return sorted(groups)


@dataclass(frozen=True)
class Structure:
    """The Python distributions of a checkout.

    Attributes:
        root: Root folder of the checkout.
    """

    root: Path = ROOT

    @cached_property
    def homes(self) -> dict[str, Path]:
        """Module name -> file, of all distributions."""
        homes = {}
        for name, folder in DISTRIBUTIONS.items():
            for path in sorted((self.root / folder).rglob("*.py")):
                parts = (name, *path.relative_to(self.root / folder).with_suffix("").parts)
                homes[".".join(parts).removesuffix(".__init__")] = path
        return homes

    @property
    def package(self) -> Path:
        """The folder of the distribution `sinew`."""
        return self.root / "sinew"

    @cached_property
    def files(self) -> list[Path]:
        """The files of `sinew`, without the package's own `__init__` and `__main__`."""
        paths = (path for name, path in self.homes.items() if name.partition(".")[0] == "sinew")
        return [path for path in paths if path.parent != self.package or path.stem[0] != "_"]

    def files_of(self, distribution: str) -> list[Path]:
        return [path for name, path in self.homes.items() if name.partition(".")[0] == distribution]

    def room_of(self, path: Path) -> str:
        return path.relative_to(self.package).parts[0].removesuffix(".py")

    def imported_rooms(self, path: Path) -> set[str]:
        """Return the folders of `sinew` that a file imports from, also inside functions and for types."""
        rooms = {name.split(".")[1] for name in imported_names(path) if name.startswith("sinew.")}
        return rooms & set().union(*ROOMS)

    def imports(self, name: str, *, on_import: bool = False) -> set[str]:
        """Return the modules of the checkout that a module imports. A name from a package stands for its module if
        there is one."""
        names = imported_names(self.homes[name], on_import)
        modules = {each for each in names if each in self.homes}
        # `from a.b import c` also names a.b. It counts as an import of a.b only if c is not a module.
        for node in statements(tree(self.homes[name]), on_import=on_import):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                modules_alone = all(f"{node.module}.{alias.name}" in self.homes for alias in node.names)
                modules -= {node.module} if modules_alone else set()
        return modules - {name}

    def closure(self, modules: Iterable[str] = JOURNEY) -> set[str]:
        """Return the modules that are imported together with ``modules``, including the packages around them."""
        seen: set[str] = set()
        left = list(modules)
        while left:
            name = left.pop()
            if name in seen or name not in self.homes:
                continue
            seen.add(name)
            left += [each for each in imported_names(self.homes[name], True) if each in self.homes]
            parts = name.split(".")
            left += [".".join(parts[:count]) for count in range(1, len(parts))]
        return seen

    def lines(self, modules: Iterable[str]) -> int:
        """Return the number of lines in modules that are not blank."""
        texts = (self.homes[name].read_text() for name in modules)
        return sum(bool(line.strip()) for text in texts for line in text.splitlines())

    def circles(self) -> list[list[str]]:
        """Return the groups of files that import each other, also in a chain. Imports in functions and for types
        count.

        The packages `sinew` and `sinew_client` provide names lazily, so an import of the package itself does not
        count.
        """
        graph = {name: self.imports(name) - set(DISTRIBUTIONS) for name in self.homes}
        return strongly_connected(graph)

    def upwards(self) -> list[str]:
        """Return "module -> distribution" for each import that a distribution may not make."""
        return sorted(
            f"{name} -> {other}"
            for name, path in self.homes.items()
            for other in {each.partition(".")[0] for each in imported_names(path)} & set(DISTRIBUTIONS)
            if other != name.partition(".")[0] and other not in MAY_IMPORT[name.partition(".")[0]]
        )

    def arrows(self) -> set[tuple[str, str]]:
        """Return the pairs of folders in `sinew` in which one folder imports the other."""
        arrows = {(self.room_of(path), other) for path in self.files for other in self.imported_rooms(path)}
        return {(room, other) for room, other in arrows if room != other}

    def upward_rooms(self) -> set[str]:
        """Return "file: folder" for each import from a lower folder of `sinew` to a higher one."""
        storey = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
        return {
            f"{path.relative_to(self.package).as_posix()}: {room}"
            for path in self.files
            for room in self.imported_rooms(path)
            if storey[room] < storey[self.room_of(path)]
        }

    def importers(self, place: str) -> set[str]:
        """Return the files of `sinew` that import a file or folder ("engine/onnx"), without this file or folder
        itself."""
        name, home = f"sinew.{place.replace('/', '.')}", self.package / place
        return {
            path.relative_to(self.package).as_posix()
            for path in self.files
            if any(f"{each}.".startswith(f"{name}.") for each in imported_names(path))
            if not path.is_relative_to(home) and path != home.with_suffix(".py")
        }

    def shared_names(self) -> set[str]:
        """Return the names that several classes of `sinew` and the client have."""
        counted = Counter(
            node.name
            for path in (*self.files, *self.files_of("sinew_client"))
            for node in tree(path).body
            if isinstance(node, ast.ClassDef)
        )
        return {name for name, count in counted.items() if count > 1}

    def places(self, pattern: re.Pattern[str], *, without: tuple[str, ...] = ()) -> list[str]:
        """Return "file: match" for each match of a pattern in product code, except in files below `without`."""
        return [
            f"{place}: {match[0]}"
            for path in self.homes.values()
            for place in [path.relative_to(self.root).as_posix()]
            if not place.startswith(without or ("\0",))
            for match in pattern.finditer(path.read_text())
        ]

    def texts(self, pattern: re.Pattern[str], *, without: tuple[str, ...] = ()) -> list[str]:
        """Return "file: text" for each string in product code that has a match, except docstrings and files below
        `without`."""
        found_in = []
        for path in self.homes.values():
            place = path.relative_to(self.root).as_posix()
            if place.startswith(without or ("\0",)):
                continue
            docstrings = {
                id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)
            }  # docstrings of modules, classes, functions and attributes
            found_in += [
                f"{place}: {node.value}"
                for node in ast.walk(tree(path))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
                if pattern.search(node.value)
            ]
        return found_in

    def splits_addresses(self) -> list[str]:
        """Return the files that take an address apart: those with a string that ends in "://", outside of f-strings.

        A program needs such a string to search an address for its scheme. An f-string only writes an address.
        """
        return [
            path.relative_to(self.root).as_posix()
            for path in self.homes.values()
            for written in [
                {
                    id(part)
                    for node in ast.walk(tree(path))
                    if isinstance(node, ast.JoinedStr)
                    for part in node.values
                }
            ]
            if any(
                isinstance(node, ast.Constant) and str(node.value).endswith("://") and id(node) not in written
                for node in ast.walk(tree(path))
            )
        ]

    def compares_engines(self) -> list[str]:
        """Return "file: expression" for each comparison with the name of an engine, or with names of engines alone,
        outside the engines and the performance model."""
        comparisons = []
        for path in self.homes.values():
            place = path.relative_to(self.root).as_posix()
            if place.startswith(("sinew/engine/", "perf/sinew_perf/")):
                continue
            for node in [each for each in ast.walk(tree(path)) if isinstance(each, ast.Compare)]:
                for operator, side in zip(node.ops, node.comparators, strict=True):
                    members = (
                        getattr(side, "elts", [side]) if isinstance(operator, (ast.In, ast.NotIn)) else [side]
                    )
                    values = {each.value for each in members if isinstance(each, ast.Constant)}
                    if values & ENGINES and values <= ENGINES | {"cpu", "cuda"}:
                        comparisons.append(f"{place}: {ast.unparse(node)}")
        return comparisons

    def largest(self, module: str, name: str) -> str:
        """Return the size of a class as "N methods, M lines", or "absent"."""
        path = self.homes.get(module)
        for node in tree(path).body if path else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
                fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                return f"{methods} methods, {fields} fields, {lines} lines"
        return "absent"

    def table(self) -> dict[str, str]:
        """Return measure -> value, as text."""
        closure, circles = self.closure(), self.circles()
        code = {
            name: (len(files), sum(map(code_lines, files)))
            for name in DISTRIBUTIONS
            if (files := self.files_of(name))
        }
        return {
            "import closure of convert, load, serve, drive": f"{len(closure)} files, {self.lines(closure)} lines",
            "code lines": ", ".join(
                f"{name} {lines} in {count} files" for name, (count, lines) in code.items()
            ),
            "code lines of all distributions": str(sum(lines for _, lines in code.values())),
            "circles of files": f"{len(circles)}, of {', '.join(str(len(each)) for each in circles) or 'none'} files",
            "imports upwards between distributions": str(len(self.upwards())),
            "imports upwards between folders of sinew": str(len(self.upward_rooms())),
            "arrows between folders of sinew": str(len(self.arrows())),
            "class names used twice": ", ".join(sorted(self.shared_names())) or "none",
            "Policy": self.largest("sinew.policy", "Policy"),
            "Loop": self.largest("sinew_client.control.loop", "Loop"),
            "Backend": self.largest("sinew.engine.backend", "Backend"),
            "Request": self.largest("sinew.serve.request", "Request"),
            "places that assemble a Loop": str(
                len(self.places(re.compile(r"^(?! *>>>).*\bLoop\(", re.MULTILINE)))
            ),
            "files that take addresses apart": str(len(self.splits_addresses())),
            "probes of robots, but facts.py": str(len(self.places(PROBES_A_ROBOT, without=(ROBOT_FACTS,)))),
            "engine names in messages outside engine/": str(
                len(self.texts(NAMES_AN_ENGINE, without=("sinew/engine/",)))
            ),
            "participles as names": str(len(self.places(PARTICIPLES))),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="root folder of another checkout to measure as well")
    against = parser.parse_args().against
    for name, root in {"this": ROOT, **({"against": against.resolve()} if against else {})}.items():
        for what, count in Structure(root).table().items():
            print(f"{name}: {what}: {count}")


if __name__ == "__main__":
    main()

"""The structure of a checkout in numbers: the table of docs/structure.md.

    python -m tests.structure [--against CHECKOUT]

Counts what stands in files: imports anywhere in them, lines that are not blank, names of classes. What a request and a
load go through is counted by ``benchmarks/request_cost.py`` as they run. --against: the root of another checkout.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a reader of the core need not meet, and the only files outside that name it: all else finds it by its name
# alone (an engine, a suite, a layout, a wire). One distribution has them all, so these walls are what a package would
# be: a folder, or a file without its suffix.
WALLS = {
    "bundle/upgrade": {"bundle/schema.py", "convert/older.py"},
    "checks/wiring": {"cli/doctor_observe.py", "serve/dashboard"},
    "convert/lowbit": {"eval/quantize"},
    "convert/sources/hub": {"cli/hub.py", "convert/sources/__init__.py"},
    "core/figures": {"eval/demo", "eval/evidence", "perf"},
    "engine/onnx/whole": {"cli/export.py", "eval/quantize"},
    "engine/cuda": {"eval/quantize", "checks/__init__.py"},
    "perf": {"cli"},
    "cli/perf": set(),
    "vlacpp": {"cli/export.py"},
    "sim": {"serve/opening.py", "eval"},
    "eval/dataset": {"cli/dataset.py"},
    "eval/demo": {"cli/demo.py"},
    "eval/evidence": {"cli/eval.py", "cli/hub.py", "cli/leaderboard.py", "eval/demo", "eval/trials"},
    "eval/farm": {"cli/eval.py", "eval/foreign"},
    "eval/preparing": {"cli/prepare.py"},
    "eval/quantize": {"cli/export.py", "cli/quantize.py"},
    "families/pi/openpi": set(),
    "presets": {"families/smolvla/random_checkpoint"},
    "families/smolvla/random_checkpoint": set(),
    # Families of blocks that no other one has. OmniVLA's robots drive.
    "families/cogact": set(),
    "families/diffusion": set(),
    "families/omnivla": set(),
    "families/xvla": set(),
    "eval/server": {"eval/demo", "eval/foreign"},
    "eval/suites": {"cli/eval.py", "eval"},
    "eval/foreign": {"cli/eval.py"},
    "eval/learning": set(),
    "eval/model_server": {"eval/policies.py"},
    "eval/rerun": {"cli/eval.py"},
    "eval/trials": {"cli/run_trials.py"},
    "records/parts": {"checks/wiring", "eval/dataset", "eval/trials", "records/viewers"},
    "records/viewers": {"cli/eval.py", "cli/mcap.py", "cli/serve.py", "eval/rerun.py", "serve/launch.py"},
    "serve/dashboard": {"serve/wires/__init__.py", "cli/top.py", "cli/top_view.py"},
    "serve/fleet": {"cli/fleet.py"},
    "serve/wires/evo1": set(),
    "serve/wires/groot": set(),
    "serve/wires/lerobot": set(),
    "serve/wires/openpi": set(),
    "serve/wires/vla_eval": set(),
    # Verbs of the above, which `cli/verbs.py` names, and a beginner's package.
    **{
        f"cli/{verb}": set()
        for verb in (
            "bench",
            "dataset",
            "demo",
            "export",
            "fleet",
            "hub",
            "hub_cache",
            "leaderboard",
            "mcap",
            "new",
            "prepare",
            "quantize",
        )
    },
    "cli/bench_server": {"cli/bench.py"},
    "cli/doctor_observe": {"cli/doctor.py"},
    # What flags of `sinew run` make of it.
    "cli/run_stream": {"cli/run.py"},
    "cli/run_stream_view": {"cli/run_stream.py"},
    "cli/run_trials": {"cli/run.py"},
    "cli/top": set(),
    "cli/top_view": {"cli/top.py"},
}
# Folders that import each other, and why that stays.
MUTUAL = {
    (
        "convert",
        "convert/lerobot",
    ): "convert() reads LeRobot's data sets for every family; its readers use what all do",
}
# `cli` has the engines' names as choices of flags, `perf` a model of its own for some of them.
ASKS_AN_ENGINE = re.compile(r'[!=]= "(?:eager|plan|onnx)"|(?:get|has)attr\([^,]*engine')
LISTS_ENGINES = ("engine", "perf")
# Where steps are used by their names: what reads and writes other projects' forms of them.
SPEAKS_OF_STEPS = ("families", "vlacpp", "convert", "steps")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside one, at any depth: no expression holds any."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements(each)


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return what a file imports, anywhere in it: modules, and their names as if those were modules."""
    found = set()
    for node in statements(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


@cache
def imported_places(path: Path) -> frozenset[str]:
    """Return the same with all folders that they lie in, as names of modules."""
    split = [name.split(".") for name in imported_modules(path)]
    return frozenset(".".join(words[:count]) for words in split for count in range(1, len(words) + 1))


@cache
def imported_rooms(path: Path) -> set[str]:
    found = {name.split(".")[1] for name in imported_modules(path) if name.startswith("sinew.")}
    return found - {"WAITING", "__version__", "load", "Policy"}


@dataclass(frozen=True)
class Structure:
    """The package below a checkout's root. Rooms are its folders and files; the package's own files may be rooms."""

    root: Path = ROOT

    @cached_property
    def package(self) -> Path:
        return self.root / "sinew"

    @cached_property
    def files(self) -> list[Path]:
        package = self.package
        return sorted(path for path in package.rglob("*.py") if path.parent != package or path.stem[0] != "_")

    @cached_property
    def core(self) -> list[Path]:
        """Return the files that are behind no wall."""
        walls = {self.package / wall for wall in WALLS}
        return [path for path in self.files if not walls & {path.with_suffix(""), *path.parents}]

    def room_of(self, path: Path) -> str:
        return path.relative_to(self.package).parts[0].removesuffix(".py")

    def folder_of(self, path: Path) -> str:
        return path.parent.relative_to(self.package).as_posix()

    def arrows(self, files: list[Path]) -> set[tuple[str, str]]:
        """Return which room imports which, of the rooms of ``files``."""
        rooms = {self.room_of(path) for path in files}
        found = {(self.room_of(path), other) for path in files for other in imported_rooms(path) & rooms}
        return {(room, other) for room, other in found if room != other}

    def folders(self) -> dict[str, set[str]]:
        """Return folder -> folders of which any of its files imports something, anywhere in it; the package's own files
        are rooms of their own."""
        homes = {}
        for path in self.package.rglob("*.py"):
            name = ".".join(path.relative_to(self.root).with_suffix("").parts)
            homes[name.removesuffix(".__init__")] = self.folder_of(path)
        found: dict[str, set[str]] = {}
        for path in self.package.rglob("*.py"):
            known = {homes[name] for name in imported_modules(path) if name in homes}
            found.setdefault(self.folder_of(path), set()).update(known - {self.folder_of(path), "."})
        found.pop(".")
        return found

    def mutual(self) -> set[tuple[str, str]]:
        """Return the pairs of folders that import each other."""
        known = self.folders()
        return {(a, b) for a in known for b in known[a] if a < b and a in known.get(b, ())}

    def circles(self) -> dict[str, set[str]]:
        """Return the folders that stand in a circle, by way of others too, :data:`MUTUAL` aside, with what they
        import of it: what is left when those that import nothing of the rest are taken away, again and again."""
        known = {
            folder: {other for other in others if tuple(sorted((folder, other))) not in MUTUAL}
            for folder, others in self.folders().items()
        }
        while free := {folder for folder, others in known.items() if not others & known.keys()}:
            for folder in free:
                del known[folder]
        return {folder: others & known.keys() for folder, others in known.items()}

    def shared_names(self) -> set[str]:
        """Return the names that more than one class has, of the package and of the robot's."""
        client = self.root / "packages" / "sinew-client" / "src"
        counted = Counter(
            node.name
            for path in (*self.files, *client.rglob("*.py"))
            for node in tree(path).body
            if isinstance(node, ast.ClassDef)
        )
        return {name for name, count in counted.items() if count > 1}

    def asked_engines(self) -> list[str]:
        """Return the places outside :data:`LISTS_ENGINES` where an engine is asked which one it is."""
        return [
            f"{path.relative_to(self.package)}: {match[0]}"
            for path in self.files
            if self.room_of(path) not in LISTS_ENGINES
            for match in ASKS_AN_ENGINE.finditer(path.read_text())
        ]

    def exchanged_classes(self) -> set[str]:
        """Return the files that give an object another class."""
        return {
            path.relative_to(self.package).as_posix()
            for path in self.files
            if "__class__" in path.read_text()
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "__class__"
            and isinstance(node.ctx, ast.Store)
        }

    def importers(self, place: str, *, beside: tuple[str, ...] = ()) -> set[str]:
        """Return the files that import a file or folder of the package ("engine/onnx"), but for its own and those of
        the rooms ``beside``."""
        name, home = f"sinew.{place.replace('/', '.')}", self.package / place
        return {
            path.relative_to(self.package).as_posix()
            for path in self.files
            if name in imported_places(path) and self.room_of(path) not in beside
            if not path.is_relative_to(home) and path != home.with_suffix(".py")
        }

    def engines(self) -> dict[str, set[str]]:
        """Return engine -> the files outside its folder that import it."""
        homes = sorted(path.parent.name for path in (self.package / "engine").glob("*/backend.py"))
        return {name: self.importers(f"engine/{name}") for name in homes}

    def steps(self) -> dict[str, set[str]]:
        """Return step -> the files that name it beside those of :data:`SPEAKS_OF_STEPS`."""
        kinds = sorted((self.package / "steps").glob("*/*.py"))
        names = [
            path.relative_to(self.package).with_suffix("").as_posix() for path in kinds if path.stem != "base"
        ]
        found = {name: self.importers(name, beside=SPEAKS_OF_STEPS) for name in names}
        return {name: files for name, files in found.items() if files}

    def lines(self, files: list[Path]) -> int:
        """Return how many lines are not blank."""
        return sum(bool(line.strip()) for path in files for line in path.read_text().splitlines())

    def rooms(self) -> dict[str, int]:
        """Return the core's folders and their lines, and all single files of the package together as "."."""
        counted: Counter[str] = Counter()
        for path in self.core:
            counted["." if path.parent == self.package else self.room_of(path)] += self.lines([path])
        return dict(sorted(counted.items()))

    def table(self) -> dict[str, str]:
        """Return what is counted -> how much, for people."""
        engines, steps = self.engines(), self.steps()
        core = self.arrows(self.core)
        folders = {path.name for path in self.package.iterdir() if path.is_dir()}
        between = sum(folders.issuperset(arrow) for arrow in core)
        arrows = f"{len(self.arrows(self.files))}, of the core {len(core)}, {between} of them between folders"
        return {
            "arrows between rooms": arrows,
            "folders that import each other": str(len(self.mutual())),
            "folders in circles": str(len(self.circles())),
            "class names used twice": ", ".join(sorted(self.shared_names())) or "none",
            "places that ask an engine its name": str(len(self.asked_engines())),
            "files that exchange a class": ", ".join(sorted(self.exchanged_classes())) or "none",
            "files outside that import an engine": ", ".join(f"{k} {len(v)}" for k, v in engines.items()),
            "steps that others name": ", ".join(f"{k} {len(v)}" for k, v in steps.items()) or "none",
            "lines of the core": f"{self.lines(self.core)} of {self.lines(self.files)}",
            "lines of its rooms": ", ".join(f"{room} {count}" for room, count in self.rooms().items()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path)
    against = parser.parse_args().against
    for name, root in {"this": ROOT, **({"against": against.resolve()} if against else {})}.items():
        for what, count in Structure(root).table().items():
            print(f"{name}: {what}: {count}")


if __name__ == "__main__":
    main()

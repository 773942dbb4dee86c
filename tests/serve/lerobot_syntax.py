"""Change LeRobot 0.6 for Python 3.11: ``python -m tests.serve.lerobot_syntax FOLDER``, after an installation into
FOLDER.

The releases since 0.5 require Python 3.12 because of three kinds of statements: ``type NAME = ...``, and type
parameters of classes and of functions, nine lines in total. This program rewrites these lines for Python 3.11,
without a change of the behaviour. A newer Python needs no changes. A changed file that does not compile is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ALIAS = re.compile(r"^type (?=\w+ = )", re.MULTILINE)
_CLASS = re.compile(r"^((?:@.*\n)*class \w+)\[([^\]]+)\](?:\((.*)\))?:$", re.MULTILINE)
_FUNCTION = re.compile(r"^((?:@.*\n)*def \w+)\[([^\]]+)\](?=\()", re.MULTILINE)


def lowered(source: str) -> str:
    """Return the text of a module with these statements in the syntax of Python 3.11."""

    def a_class(found: re.Match[str]) -> str:
        head, parameters, bases = found.groups()
        names, lines = _variables(parameters)
        generic = f"typing.Generic[{', '.join(names)}]"
        return f"{lines}{head}({bases + ', ' if bases else ''}{generic}):"

    def a_function(found: re.Match[str]) -> str:
        head, parameters = found.groups()
        return _variables(parameters)[1] + head

    return _FUNCTION.sub(a_function, _CLASS.sub(a_class, _ALIAS.sub("", source)))


def _variables(parameters: str) -> tuple[list[str], str]:
    """Return the names in ``T, U: bound``, and the lines that define them as type variables."""
    names, lines = [], "import typing\n"
    for parameter in parameters.split(","):
        name, _, bound = (part.strip() for part in parameter.partition(":"))
        names.append(name)
        lines += f"{name} = typing.TypeVar({name!r}" + (f", bound={bound})\n" if bound else ")\n")
    return names, lines


def main(folder: Path) -> None:
    for path in sorted((folder / "lerobot").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        try:
            compile(source, path, "exec")
        except SyntaxError:
            source = lowered(source)
            compile(source, path, "exec")
            path.write_text(source, encoding="utf-8")
            print(
                f"{path.relative_to(folder)}: written as Python {sys.version_info[0]}.{sys.version_info[1]} has it"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

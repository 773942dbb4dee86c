"""Pages of the site that are made from the program when it is built: each verb, all settings, the Python API."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sinew.cli.settings import option_name

FOLDER = "reference"
# Module -> what is said of it, and its names; those of its ``__all__`` where none are given.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sinew": ("A policy in this process, and what is done with one.", ()),
    "sinew.convert": ("A checkpoint becomes a bundle.", ("convert",)),
    "sinew_client": ("The robot's side: Python 3.8 or newer, no torch.", ()),
    "sinew_client.aio": ("The same for asyncio.", ("AsyncClient",)),
    "sinew_client.control": (
        "The robot's loop: chunks become one command per control step.",
        ("Loop", "Settings", "Robot", "Source", "Controller", "Limits", "Stream", "Adapter"),
    ),
}
# What a package of somebody else implements or is asked for, and where it is defined.
EXTENSIONS = {
    "sinew.engine.backend.Backend": "An engine's record: entry point `sinew.engines`.",
    "sinew.engine.engine.Engine": "What an engine does.",
    "sinew.models.base.Model": "What a model of a family does: [adding a model](../adding-a-model.md).",
    "sinew.serve.wire.Wire": "A wire's record.",
    "sinew.layers.stores.store.Store": "A way to store weights.",
}
VARIABLES = {
    "SINEW_API_KEY": "the key that a server wants, where `--api-key-file` is not given",
    "SINEW_CONFIG": "a TOML file of flags, as `--config FILE.toml`",
    "SINEW_DEBUG": "`1`: show the traceback of an error, as `--debug`",
    "SINEW_CPU_KERNELS": "kernels of engine `cpu`: the name of those to use, or `off`",
    "SINEW_SIMS": "the folder of simulators' own interpreters (`make sim-aloha`)",
    "XDG_CACHE_HOME": "where converted checkpoints and proofs are kept (default: `~/.cache`)",
}


def pages() -> dict[str, str]:
    """Return the name of each page below the folder -> its Markdown."""
    from sinew.cli import build_app
    from sinew.cli.verbs import commands

    app, found, rows = build_app(), {}, []
    for words, verb in commands():
        command = app
        for word in words:
            command = command[word]
        arguments = list(_arguments(command))
        found[f"verbs/{'-'.join(words)}.md"] = _verb(words, verb, command, arguments)
        rows += [(words, each) for each in arguments if each.name.startswith("--")]
    return found | {"settings.md": _settings(rows), "python.md": _python()}


def menu() -> dict[str, Any]:
    """Return what the site's menu has of these pages, in the order of the help."""
    from sinew.cli.verbs import SECTIONS, commands

    verbs = []
    for title, section in SECTIONS.items():
        inner = []
        for words, _ in commands(section):
            inner.append({" ".join(words): f"{FOLDER}/verbs/{'-'.join(words)}.md"})
        verbs.append({f"Commands: {title}": inner})  # the menu has another part with the name Start
    return {
        "API and settings": [
            {"Python": f"{FOLDER}/python.md"},
            {"All settings": f"{FOLDER}/settings.md"},
            {"Commands": verbs},
        ]
    }


def _arguments(command: Any) -> Iterator[Any]:
    """Yield what a command takes, without the records that only group it."""
    for each in command.assemble_argument_collection(parse_docstring=True):
        if each.name != "*" and not each.children:
            yield each


def _verb(words: tuple[str, ...], verb: Any, command: Any, arguments: list[Any]) -> str:
    text = inspect.cleandoc(command.default_command.__doc__ or "").partition("\nArgs:")[0].strip()
    lines = [f"# sinew {' '.join(words)}", "", _plain(text), "", "```", f"sinew {verb.example}", "```"]
    groups: dict[str, list[Any]] = defaultdict(list)
    for each in arguments:
        groups[each.parameter.group[0].name if each.parameter.group else "Options"].append(each)
    for title, members in groups.items():
        lines += ["", f"## {title}", "", "| | default | |", "|---|---|---|"]
        for each in members:
            names = ", ".join(f"`{name}`" for name in each.names) if each.show else f"`{option_name(each)}`"
            lines.append(f"| {names} {_kind(each)} | {_default(each)} | {_cell(each.parameter.help)} |")
    if not all(each.show for each in arguments):
        lines += ["", "A name without dashes is a setting: pass `--set NAME=VALUE`."]
    lines += ["", "Each flag may also come from the environment or a file: [all settings](../settings.md)."]
    lines += ["Exit status: [every verb](../../commands.md#exit-status)."]
    return "\n".join(lines) + "\n"


def _settings(rows: list[tuple[tuple[str, ...], Any]]) -> str:
    lines = [
        "# All settings",
        "",
        "Every option of every verb. A name without dashes has no flag: pass it with `--set NAME=VALUE`.",
        "The command line wins over the environment, and that over the file of `--config`.",
        "`--host` of `sinew serve` is `SINEW_SERVE_HOST`, or `host` under `[serve]` in the file; of `sinew hub pull`,",
        "`--out` is `SINEW_HUB_PULL_OUT`, or `out` under `[hub.pull]`.",
        "",
        "| flag | of | environment | default | |",
        "|---|---|---|---|---|",
    ]
    same: dict[tuple[str, str, str], list[tuple[str, ...]]] = defaultdict(list)
    for words, each in rows:
        same[option_name(each), _default(each), f"{_cell(each.parameter.help)}"].append(words)
    for (name, default, text), verbs in sorted(same.items()):
        flag = name.removeprefix("--").upper().replace("-", "_")
        links = ", ".join(f"[{' '.join(each)}](verbs/{'-'.join(each)}.md)" for each in verbs)
        first = "_".join(verbs[0]).upper()
        more = ", ..." * (len(verbs) > 1)
        lines.append(f"| `{name}` | {links} | `SINEW_{first}_{flag}`{more} | {default} | {text} |")
    lines += ["", "## Variables of the environment", "", "| variable | |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    return "\n".join(lines) + "\n"


def _python() -> str:
    lines = ["# Python", ""]
    for module, (text, chosen) in MODULES.items():
        lines += [f"## {module}", "", text, ""]
        found = import_module(module)
        names = chosen or [
            each
            for each in found.__all__
            if not (each.startswith("__") or inspect.ismodule(getattr(found, each)))
        ]
        # The table of contents shows the module, because two modules can have a class of the same name.
        for name in names:
            lines += [f"::: {module}.{name}", "    options:", f"      toc_label: {module}.{name}", ""]
    lines += ["## To add to Sinew", ""]
    for name, text in EXTENSIONS.items():
        lines += [text, "", f"::: {name}", ""]
    return "\n".join(lines)


def _kind(argument: Any) -> str:
    choices = argument.get_choices()
    if choices:
        return "(" + ", ".join(f"`{each}`" for each in choices) + ")"
    if argument.hint is bool:
        return ""
    kind = getattr(argument.hint, "__name__", str(argument.hint))
    return f"({_cell(kind.removeprefix('pathlib.').removesuffix(' | None'))})"


def _default(argument: Any) -> str:
    if argument.required:
        return "required"
    value = argument.field_info.default
    return "" if value in ((), [], "", None, inspect.Parameter.empty) or value is False else f"`{value}`"


def _cell(text: str | None) -> str:
    return _plain(" ".join((text or "").split()).replace("|", "\\|"))


def _plain(text: str) -> str:
    """Return what a docstring says with its brackets as characters: ``[@REVISION][/FILE]`` is no link."""
    return text.replace("[", "\\[").replace("<", "&lt;")

"""Make the pages of the site that come from the code: one page for each verb, one for all settings, one for the
Python API.

mkdocs calls this module through site.py when it builds the site.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sinew.cli.settings import option_name

FOLDER = "reference"
# Key: module. Value: introduction on its page, and the names to document. Without names: all names in ``__all__`` of
# the module.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sinew": ("Load a policy in this process and compute actions with it.", ()),
    "sinew.convert": ("Convert a checkpoint into a bundle.", ("convert",)),
    "sinew_client": ("The client for the robot's computer. It needs Python 3.8 or newer, and no torch.", ()),
    "sinew_client.aio": ("The same client for asyncio.", ("AsyncClient",)),
    "sinew_client.control": (
        "The control loop of a robot, which sends one command from the chunks of a policy in each control step.",
        ("Loop", "Settings", "Robot", "Source", "Controller", "Limits", "Stream", "Adapter"),
    ),
}
# Interfaces that a plugin implements or uses. Key: the name of the class. Value: introduction on the page.
EXTENSIONS = {
    "sinew.engine.backend.Backend": "The description of an engine. Entry point: `sinew.engines`.",
    "sinew.engine.engine.Engine": "The interface of an engine.",
    "sinew.models.base.Model": "The interface of the model of a family. See [adding a model](../adding-a-model.md).",
    "sinew.serve.wire.Wire": "A wire's record.",
    "sinew.layers.stores.store.Store": "The interface of a storage format for weights.",
}
VARIABLES = {
    "SINEW_API_KEY": "the API key of the server, if `--api-key-file` is not given",
    "SINEW_CONFIG": "a TOML file with flags, same as `--config FILE.toml`",
    "SINEW_DEBUG": "`1`: show the traceback of an error, same as `--debug`",
    "SINEW_CPU_KERNELS": "name of the kernels that the engine `cpu` uses, or `off`",
    "SINEW_SIMS": "the folder with the Python environments of the simulators (`make sim-aloha`)",
    "XDG_CACHE_HOME": "the folder for converted checkpoints and proofs (default: `~/.cache`)",
}


def pages() -> dict[str, str]:
    """Return the pages. Key: file name below the folder ``reference``. Value: the page as Markdown."""
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
    """Return the entries of the site's menu for these pages, in the order of `sinew --help`."""
    from sinew.cli.verbs import SECTIONS, commands

    verbs = []
    for title, section in SECTIONS.items():
        inner = []
        for words, _ in commands(section):
            inner.append({" ".join(words): f"{FOLDER}/verbs/{'-'.join(words)}.md"})
        # "Commands: ", because another part of the menu has the name Start too
        verbs.append({f"Commands: {title}": inner})
    return {
        "API and settings": [
            {"Python": f"{FOLDER}/python.md"},
            {"All settings": f"{FOLDER}/settings.md"},
            {"Commands": verbs},
        ]
    }


def _arguments(command: Any) -> Iterator[Any]:
    """Yield the arguments of a command, without the dataclasses that only group arguments."""
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
    lines += [
        "",
        "You can also set each flag with an environment variable or in a file: [all settings](../settings.md).",
    ]
    lines += ["For the exit status, see [the list for all verbs](../../commands.md#exit-status)."]
    return "\n".join(lines) + "\n"


def _settings(rows: list[tuple[tuple[str, ...], Any]]) -> str:
    lines = [
        "# All settings",
        "",
        "All options of all verbs. An option whose name has no dashes is not a flag. Pass it with `--set NAME=VALUE`.",
        "A value on the command line overrides the environment variable.",
        "The environment variable overrides the file of `--config`.",
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
    lines += ["", "## Environment variables", "", "| variable | |", "|---|---|"]
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
    lines += ["## Interfaces for plugins", ""]
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
    """Escape the brackets of a docstring, so that Markdown does not read ``[@REVISION][/FILE]`` as a link."""
    return text.replace("[", "\\[").replace("<", "&lt;")

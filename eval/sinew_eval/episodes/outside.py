"""Decide which names in a record from another machine may be used here.

A record is a page, a gate, or the plan of a distributed run. :func:`sinew_client.typed_names.require_typed`
implements the rule. This module lists the names in a task and its variants, and states which names are built in: this
package's tasks and policies, suites, and installed entry points.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sinew.convert.sources import ASSETS, embedded
from sinew.core import progress
from sinew.core.registry import place_of
from sinew_client.target import EXPERT, LOCAL, Target
from sinew_client.typed_names import (
    OutsideName,
    comparable,
    file_name,
    has_text,
    require_typed,
    typed_values,
)
from sinew_client.untrusted import parse_json

from sinew_eval import suites
from sinew_eval.episodes.policies import file_hash
from sinew_eval.episodes.settings import ADAPTERS, TASKS_GROUP, Task, Variant

_OWN = re.compile(r"sinew/[A-Za-z]+-v\d+")  # matches the ids of the built-in tasks in sinew_eval.sim
# These options of suites only contain names of observation fields, and never code or files.
_OF_MAPPING = {
    "prompt",
    "cameras",
    "action",
    "max_steps",
}
# The option on the command line that gives each kind of name. A policy is the positional argument, so its option is
# empty.
POLICY, EDGE = "", "--edge-adapter"


@dataclass(frozen=True)
class TypedNames:
    """Names that the person at this machine typed.

    Attributes:
        env: Environment, as in :class:`sinew_eval.episodes.settings.Task`.
        adapter: Adapter of the environment.
        env_options: Arguments of the environment's constructor.
        reset_options: Options of the environment's reset.
        edge_adapters: Files of edge adapters.
        policies: Bundles on this machine, and addresses of servers.
    """

    env: str = ""
    adapter: str = ""
    env_options: dict[str, Any] | None = None
    reset_options: dict[str, Any] | None = None
    edge_adapters: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task, variants: Sequence[Variant]) -> TypedNames:
        """Collect the names in a task and its variants, for a run that was started from this machine's command line.
        All of them count as typed.
        """
        edges = tuple(dict.fromkeys(each.edge_adapter for each in variants if each.edge_adapter))
        policies = tuple(dict.fromkeys(each.target for each in variants))
        return cls(task.env, task.adapter, task.env_options, task.reset_options, edges, policies)

    def to_json(self) -> str:
        """Convert the names to text for a child process, which reads it with :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TypedNames:
        """Read the names that the parent process passed on."""
        values = parse_json(text)
        lists = {name: tuple(values[name]) for name in ("edge_adapters", "policies")}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class PolicyFacts:
    """Facts about the policy and the edge adapter of a variant in a record.

    Attributes:
        kind: "bundle", "server" or "expert".
        sha256: SHA-256 of the bundle. "" for a server or an expert.
        edge_sha256: SHA-256 of the edge adapter. "" if the record does not contain one.
    """

    kind: str
    sha256: str = ""
    edge_sha256: str = ""


def allowed_task(source: object, task: Task, typed: TypedNames) -> Task:
    """Return the task of a record with the names that were typed on this machine.

    Args:
        source: File or address of the record, for messages.
        task: The task in the record.
        typed: The typed names.

    Returns:
        The task to play.

    Raises:
        UntypedNameError: The record uses a name that is neither built in nor typed.
    """
    return allowed(source, task, [], [], typed)[0]


def allowed(
    source: object,
    task: Task,
    variants: Sequence[Variant],
    facts: Sequence[PolicyFacts],
    typed: TypedNames,
    bundles: bool = True,
) -> tuple[Task, list[Variant]]:
    """Return the task and the variants of a record with the names and bundles of this machine.

    This function imports, opens, hashes or contacts nothing that only the record names.

    Args:
        source: File or address of the record, for messages.
        task: The task in the record.
        variants: The variants in the record.
        facts: Facts about the policy of each variant.
        typed: The typed names.
        bundles: False to keep the recorded bundles, for a caller that downloads them afterwards.

    Returns:
        The task and the variants to play.

    Raises:
        UntypedNameError: The record uses a name that is neither built in nor typed.
    """
    names = [*task_names(task)]
    changes: list[tuple[int | None, str]] = [(None, name.field.removeprefix("task.")) for name in names]
    addresses = [each for each in typed.policies if Target.parse(each).remote]
    for index, (variant, about) in enumerate(zip(variants, facts, strict=True)):
        for field, name in _policy_names(index, variant, about, addresses, bundles):
            names.append(name)
            changes.append((index, field))
    values = require_typed(source, names, _table(typed, variants, facts))
    own_task, own = (
        task,
        [
            replace(each, target=EXPERT) if about.kind == "expert" else each
            for each, about in zip(variants, facts, strict=True)
        ],
    )
    for (at, field), value in zip(changes, values, strict=True):
        if at is None:
            own_task = replace(own_task, **{field: value})
        else:
            own[at] = replace(own[at], **{field: value})
    return own_task, own


def task_names(task: Task) -> Iterator[OutsideName]:
    """Yield the names in a task that are not built into Sinew, such as a user's environment or adapter."""
    own = is_built_in(task.env)
    if not own:
        yield OutsideName("task.env", task.env, "--env")
    if task.adapter and task.adapter not in ADAPTERS:
        yield OutsideName("task.adapter", task.adapter, "--adapter", _adapter_key(task.adapter))
    for field in ("env_options", "reset_options"):
        options = getattr(task, field)
        if options and not (own and _only_data(task.env, options)):
            yield OutsideName(f"task.{field}", options, f"--{field.replace('_', '-')}")


def is_built_in(env: str) -> bool:
    """Return True for a task of this package, of its suites, or of an installed package's entry points."""
    if _OWN.fullmatch(env):
        return True
    if suites.find(env) is not None:
        # In vla-eval/module:Class, the class is the user's own.
        return ":" not in env
    return place_of(TASKS_GROUP, env) != env


def _only_data(env: str, options: Mapping[str, Any]) -> bool:
    """Return True if options of a built-in task contain only data: options of this package's own tasks, the mapping
    of a suite, and numbers. Such options can name neither code nor a file.
    """
    if _OWN.fullmatch(env):
        return True
    return not has_text({name: value for name, value in options.items() if name not in _OF_MAPPING})


def _policy_names(
    index: int, variant: Variant, about: PolicyFacts, addresses: Sequence[str], bundles: bool
) -> Iterator[tuple[str, OutsideName]]:
    place = f"variants[{index}]"
    if about.kind == "bundle" and bundles:
        name = file_name(variant.target)
        field = f"{place}.target (SHA-256 {about.sha256[:16]})"
        yield "target", OutsideName(field, name, POLICY, f"sha256:{about.sha256}")
    elif about.kind == "server":
        # Another laboratory runs the server at its own address. If the person typed exactly one address, use
        # that address instead of the recorded one.
        key = comparable(addresses[0] if len(addresses) == 1 else variant.target)
        yield "target", OutsideName(f"{place}.target", variant.target, POLICY, key)
    if variant.edge_adapter:
        name = file_name(variant.edge_adapter)
        key = f"sha256:{about.edge_sha256}" if about.edge_sha256 else comparable(name)
        yield "edge_adapter", OutsideName(f"{place}.edge_adapter", name, EDGE, key)


def _adapter_key(adapter: str) -> str:
    return comparable(file_name(adapter) if adapter.endswith(".json") else adapter)


def _table(
    typed: TypedNames, variants: Sequence[Variant], facts: Sequence[PolicyFacts]
) -> dict[str, Mapping[str, Any]]:
    """Build the table of the values that were typed on this machine. The keys are the option, and then the text that is
    compared with a record.

    A file is hashed only if the record contains a hash. A bundle whose full path equals the recorded path is not
    hashed, because that run was typed on this machine.
    """
    policies: dict[str, Any] = dict(
        typed_values(each for each in typed.policies if Target.parse(each).remote)
    )
    files = [each for each in typed.policies if Target.parse(each).kind == LOCAL]
    pending = set[str]()
    for variant, about in zip(variants, facts, strict=True):
        if about.kind == "bundle":
            if variant.target in files:
                policies[f"sha256:{about.sha256}"] = variant.target
            else:
                pending.add(about.sha256)
    policies |= _hashed([*map(str, embedded().values()), *files], pending)
    edges: dict[str, Any] = {comparable(file_name(each)): each for each in typed.edge_adapters}
    hashes = {about.edge_sha256 for about in facts if about.edge_sha256}
    own = [str(path) for path in sorted(ASSETS.glob("*-edge.safetensors"))]
    edges |= _hashed([*own, *typed.edge_adapters], hashes)
    return {
        "--env": typed_values([typed.env]),
        "--adapter": {_adapter_key(typed.adapter): typed.adapter} if typed.adapter else {},
        "--env-options": typed_values([typed.env_options]),
        "--reset-options": typed_values([typed.reset_options]),
        EDGE: edges,
        POLICY: policies,
    }


def own_hashes(typed: TypedNames) -> set[str]:
    """Return the SHA-256 of all policies on this machine: those of this package, and the typed bundles."""
    typed_files = [each for each in typed.policies if Target.parse(each).kind == LOCAL]
    return {file_hash(each) for each in (*map(str, embedded().values()), *typed_files)}


def _hashed(files: Sequence[str], pending: set[str]) -> dict[str, str]:
    """Find a file for each SHA-256 in ``pending``. Return a dict with the hash as key and the file as value. If several
    files have the hash, the last one counts.
    """
    return {f"sha256:{hash_}": file for file in files if pending and (hash_ := file_hash(file)) in pending}


def say_names(source: object, task: Task, variants: Sequence[Variant], episodes: int) -> None:
    """Print the names of a record before it is played.

    Args:
        source: File or address of the record.
        task: The task to play.
        variants: The variants to play.
        episodes: Number of episodes.
    """
    adapter = f" with adapter {task.adapter}" if task.adapter else ""
    targets = ", ".join(dict.fromkeys(each.show("target") for each in variants))
    policy = f"; policy {targets}" if targets else ""
    name = Path(str(source)).name
    progress.say(f"{name}: plays {episodes} episodes of {task.env}{adapter}{policy}")

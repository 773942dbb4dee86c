"""Records from elsewhere (pages, gates, plans of farms) and what a person typed: which names a record may use here.

The rule itself is :func:`sinew_client.typed_names.require_typed`. This module lists the names in a task and its
variants, and says which are built in: this package's tasks and trained policies, suites, installed entry points.
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
# Options of suites whose texts name fields of an observation, and never code or files.
_OF_MAPPING = {
    "prompt",
    "cameras",
    "action",
    "max_steps",
}
# The option with which a person types each kind of name. A policy is the positional argument, so its option is empty.
POLICY, EDGE = "", "--edge-adapter"


@dataclass(frozen=True)
class TypedNames:
    """What the person at this machine typed.

    Attributes:
        env, adapter, env_options, reset_options: as of :class:`sinew_eval.episodes.settings.Task`.
        edge_adapters: files of edge adapters.
        policies: bundles (files that are here) and addresses.
    """

    env: str = ""
    adapter: str = ""
    env_options: dict[str, Any] | None = None
    reset_options: dict[str, Any] | None = None
    edge_adapters: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task, variants: Sequence[Variant]) -> TypedNames:
        """Return the names of a run that this machine's command line asked for."""
        edges = tuple(dict.fromkeys(each.edge_adapter for each in variants if each.edge_adapter))
        policies = tuple(dict.fromkeys(each.target for each in variants))
        return cls(task.env, task.adapter, task.env_options, task.reset_options, edges, policies)

    def to_json(self) -> str:
        """Return a text that :meth:`from_json` reads, for a process that this one starts."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TypedNames:
        """Return the names that the process which started this one was given."""
        values = parse_json(text)
        lists = {name: tuple(values[name]) for name in ("edge_adapters", "policies")}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class PolicyFacts:
    """What a record says of a variant's policy and edge adapter.

    Attributes:
        kind: bundle, server or expert.
        sha256: of the bundle; "" of others.
        edge_sha256: of the edge adapter; "" where the record does not have it.
    """

    kind: str
    sha256: str = ""
    edge_sha256: str = ""


def allowed_task(source: object, task: Task, typed: TypedNames) -> Task:
    """Return the task of a record as it may be played here: with the names that were typed.

    Raises:
        UntypedNameError: the record uses a name that is not built in and was not typed.
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
    """Return the task and the variants of a record as they may be played here: with the names that were typed, and the
    bundles of this machine that have the recorded bytes.

    Nothing that the record names is imported, opened, hashed or contacted.

    Args:
        source: the record's file or address, for messages.
        task, variants: as recorded.
        facts: of each variant's policy.
        typed: what the person typed.
        bundles: False leaves the bundles as recorded, for a reader that fetches them afterwards.

    Raises:
        UntypedNameError: the record uses a name that is not built in and was not typed.
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
    """Yield the names in a task that are not built in."""
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
    """Return True if options of a built-in task can name neither code nor a file: those of this package's own tasks,
    the mapping of a suite, and numbers."""
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
    """Return the typed values, by option and by the text that is compared.

    Files are hashed if a record has a hash to compare. A file whose whole path equals the recorded one is not hashed,
    because that run was typed on this machine.
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
    """Return the SHA-256 of the policies that are here: those of this package, and the typed bundles."""
    typed_files = [each for each in typed.policies if Target.parse(each).kind == LOCAL]
    return {file_hash(each) for each in (*map(str, embedded().values()), *typed_files)}


def _hashed(files: Sequence[str], pending: set[str]) -> dict[str, str]:
    """Return the files whose bytes have one of the hashes; of several the last."""
    return {f"sha256:{hash_}": file for file in files if pending and (hash_ := file_hash(file)) in pending}


def say_names(source: object, task: Task, variants: Sequence[Variant], episodes: int) -> None:
    """Print what a record is about to play."""
    adapter = f" with adapter {task.adapter}" if task.adapter else ""
    targets = ", ".join(dict.fromkeys(each.show("target") for each in variants))
    policy = f"; policy {targets}" if targets else ""
    name = Path(str(source)).name
    progress.say(f"{name}: plays {episodes} episodes of {task.env}{adapter}{policy}")

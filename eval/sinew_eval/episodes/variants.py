"""Build the variants of an evaluation from --sweep and --compare, and choose the engine of each variant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from sinew.convert.sources import resolve
from sinew.core import SinewError, machine, progress
from sinew.core.extras import MissingPackageError
from sinew.processing import Allowed
from sinew_client import ClientError
from sinew_client.control import Adapter, choose
from sinew_client.control.defaults import AUTO
from sinew_client.target import LOCAL, Target

from sinew_eval.episodes.policies import InProcess, ServerPolicy, chosen, open_policy, stated_facts
from sinew_eval.episodes.settings import Task, Variant, parse_replan
from sinew_eval.episodes.settings import sweep as parse_sweep

if TYPE_CHECKING:
    from sinew.policy import Policy

# The task if neither the user nor the policy determines one.
ENV = "sinew/Blocks-v0"


def default_env(target: str, rename: Sequence[str] = (), **allowed: Unpack[Allowed]) -> str:
    """Choose the task if the user named none: the built-in task whose observations the policy accepts.

    Args:
        target: The policy.
        rename: Renamed cameras, as ``NEW=OLD``.
        **allowed: Options of :class:`sinew.processing.Processor`.

    Returns:
        The gymnasium id of the task.
    """
    if Target.parse(target).kind != LOCAL:
        return ENV
    try:
        from sinew_eval.episodes.fitting import task_of
    # The error for the missing package is raised later, when the environment is made.
    except ModuleNotFoundError:
        return ENV
    task = task_of(target, rename, **allowed)
    progress.say(f"env {task}: chosen because --env is missing" + " and the policy fits it" * (task != ENV))
    return task


def control_hz(task: Task, variants: Sequence[Variant]) -> float:
    """Check that the policies accept the observations of the environment, before any policy is loaded.

    Args:
        task: The task.
        variants: The variants.

    Returns:
        The control rate of the environment, in Hz.

    Raises:
        SinewError: A policy does not fit, or a package is missing.
    """
    try:
        from sinew_eval.episodes.fitting import check_variants
    except ModuleNotFoundError as error:
        raise MissingPackageError("evaluation", error.name or "mujoco") from None
    return check_variants(task, variants)


def usual_workers(alone: bool = False) -> int:
    """Return the default number of worker processes: one per core.

    Args:
        alone: True if exactly one process may play, because other processes would disturb it, for example in real time.
    """
    return 1 if alone else machine.cores().physical


def variants(base: Variant, sweeps: Sequence[str] = (), compares: Sequence[str] = ()) -> list[Variant]:
    """Build the variants to play.

    Args:
        base: The first variant.
        sweeps: Texts of ``--sweep``.
        compares: Texts of ``--compare``.

    Returns:
        The variants.

    Raises:
        SinewError: A variant is repeated, or an edge adapter is invalid.
    """
    result = parse_sweep(base, sweeps)
    for text in compares:
        if "=" in text and not Path(text).exists():
            other = result[0]
            for part in re.split(r",(?=[a-z_-]+=)", text):
                key, _, value = part.partition("=")
                other = other.with_text(key.replace("-", "_"), value)
        else:
            other = replaced(result[0], target=text)
        if other in result:
            raise SinewError(f"--compare {text}: this variant is already in the list; change or omit it")
        result.append(other)
    for path in dict.fromkeys(each.edge_adapter for each in result if each.edge_adapter):
        with SinewError.at("edge_adapter", ClientError):
            Adapter.read(path)
    return [
        variant
        if Target.parse(variant.target).kind != LOCAL
        else replaced(variant, target=str(resolve(variant.target)))
        for variant in result
    ]


def settled(variant: Variant, task: Task | None = None, printed: set[str] | None = None) -> Variant:
    """Return a variant with the chunk merging, engine and device that will be used, so that logs and reports name
    them.

    Args:
        variant: The variant.
        task: The task. None if it does not matter.
        printed: Reasons that were printed before. New reasons are added.

    Returns:
        The variant.

    Raises:
        SinewError: The variant has options that only the server can set.
    """
    kind = Target.parse(variant.target)
    if kind.remote:
        device = None if variant.device == "auto" else variant.device
        flags = (variant.dtype, variant.engine, device, variant.ignore_recipe, variant.rename)
        if any(flags) or variant.allow_missing_cameras or variant.allow_empty_prompt:
            raise SinewError(
                "engine, dtype, device, cameras and empty prompts are settings of the server; pass them to `sinew"
                " serve`"
            )
    variant = _handed_over(variant, task, set() if printed is None else printed)
    if kind.kind != LOCAL:
        return replaced(variant, device="cpu")
    choice = chosen(variant)
    return replaced(variant, engine=choice.engine, device=choice.options.device)


def _handed_over(variant: Variant, task: Task | None, printed: set[str]) -> Variant:
    """If the variant's chunk merging is ``auto``, replace it by the method that fits the policy, and print the reason
    unless it is in ``printed``.
    """
    if variant.handover != AUTO:
        return variant
    policy = stated_facts(variant.target, "" if task is None else task.env)
    replan = str(variant.replan or "full")
    choice = choose(
        AUTO, None if task is None else task.motion, policy, refined=bool(variant.edge_adapter), replan=replan
    )
    text = f"{variant.show('target')}: {choice}"
    if not variant.stream and text not in printed:
        progress.say(text)
        if choice.replan_reason:
            progress.say(f"{variant.show('target')}: requests {choice.replan}: {choice.replan_reason}")
        printed.add(text)
    rule = variant.replan if choice.replan == replan else parse_replan(choice.replan)
    return replaced(variant, handover=choice.handover, replan=rule)


def in_lockstep(
    variant: Variant, task: Task, out: Path | None, fastest: Callable[[Policy], tuple[int, str]]
) -> Variant:
    """Return a variant with the fastest batch size on this machine, and print the reason.

    A continued run keeps the batch size of its log, because its episodes were played with that size.

    Args:
        variant: The variant.
        task: The task.
        out: Folder of the run. None for no log.
        fastest: Measures an open policy. Returns the batch size and the reason.

    Returns:
        The variant.
    """
    from sinew_eval.episodes.campaign import batch_played

    if out is not None and (before := batch_played(task, variant, out)) is not None:
        progress.say(f"{variant.show('target')}: batches of {before}, as in {out}")
        return replaced(variant, batch=before)
    # This call raises SinewError for a variant that cannot be batched.
    replaced(variant, batch=2)
    policy = open_policy(variant, task.env)
    try:
        if isinstance(policy, ServerPolicy):
            batch, why = policy.max_batch, policy.one_by_one or "the largest batch of this server"
        else:
            assert isinstance(policy, InProcess)
            batch, why = fastest(policy.policy)
    finally:
        policy.close()
    progress.say(f"{variant.show('target')}: batches of {batch}: {why}")
    return replaced(variant, batch=batch)

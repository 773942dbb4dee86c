"""The checks of `sinew doctor BUNDLE`: load the bundle with the engine that would serve it, and run it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sinew
from sinew.bundle import statistics
from sinew.checks.check import Check, gib
from sinew.core import BundleError, SinewError, machine
from sinew.engine.backend import BACKENDS, installed

if TYPE_CHECKING:
    from sinew.core import PolicySpec
    from sinew.policy import Policy


Needs = Callable[["Policy"], tuple[int, str]]


def bundle(path: Path, options: Mapping[str, Any], needs: Needs | None = None) -> list[Check]:
    """Load a bundle and run it once on grey frames.

    Args:
        path: The bundle.
        options: Options of ``sinew.load``.
        needs: Returns the bytes that a loaded policy needs, and a description of these bytes.

    Returns:
        One line of the report for each check.
    """
    try:
        started, available = time.perf_counter(), machine.memory()[1]
        policy = sinew.load(path, **options)
        load_ms = (time.perf_counter() - started) * 1e3
        spec = policy.spec
        cameras = ", ".join(f"{camera.name} {camera.height}x{camera.width}" for camera in spec.cameras)
        results = [
            Check(
                "bundle",
                "ok",
                f"{spec.name} ({spec.architecture}) loaded in {load_ms:.0f} ms; cameras {cameras}",
            ),
            Check("bundle device", "ok", f"{policy.device}: {policy.choice.device_reason}"),
            Check(
                "bundle precision",
                "warn" if policy.choice.ignored else "ok",
                f"{policy.precision_text}: {policy.dtype_reason}",
            ),
            _engine(policy),
            _handover(spec),
            _statistics(policy),
            _memory(policy, available, needs),
        ]
        chunk = policy.warm_up()
    except SinewError as error:
        bad = isinstance(error, BundleError) and path.exists()
        advice = (
            "convert the checkpoint again with `sinew convert`"
            if bad
            else "correct the option or the path that the message names"
        )
        return [Check("bundle", "fail", str(error), advice)]
    if not policy.bundle.infos:
        results.append(_parity_of_graphs(policy))
    elif not BACKENDS[policy.engine_name].reference:
        results.append(_parity(policy))
    finite = bool(np.isfinite(chunk.actions).all())
    results.append(
        Check(
            "bundle inference",
            "ok" if finite else "fail",
            f"{len(chunk.actions)} actions in {chunk.timing.total_ms:.0f} ms (first inference), "
            + ("all finite" if finite else "some not finite")
            + (f"; {gib(gpu['peak'])} of {gpu['name']} at most" if (gpu := machine.gpu()) else ""),
            ""
            if finite
            else "the weights or the statistics contain NaN or infinity; convert the checkpoint again",
        )
    )
    return results


def _parity(policy: Policy) -> Check:
    """Run the short form of ``sinew validate``: compare the policy with the reference engine (eager, in float32) on one
    observation.
    """
    if not installed("torch"):
        return Check("bundle parity", "ok", "skipped: no torch, which the reference engine needs")
    from sinew.checks.validate.observations import random_observations
    from sinew.checks.validate.parity import compare
    from sinew.policy import Policy

    reference = Policy(policy.bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    parity = compare(policy, reference, islice(random_observations(reference), 1))
    errors = ", ".join(f"{stage.name} {stage.error:.1e}" for stage in parity.stages.values())
    detail = f"engine {policy.engine_name} against eager fp32 on one random observation: relative L2 {errors}"
    if parity.passed:
        return Check("bundle parity", "ok", f"{detail}; `sinew validate` compares more and plays the gate")
    wrong = [stage.name for stage in parity.stages.values() if not stage.passed] + parity.faults
    advice = f"do not serve with this engine: {', '.join(wrong) or 'indices'} differ; run `sinew validate` for details"
    return Check("bundle parity", "fail", detail, advice)


def _parity_of_graphs(policy: Policy) -> Check:
    """Compare a policy from a folder of graphs with the chunk that `sinew export` has stored in the folder. The
    reference engine cannot run, because the folder has no weights.
    """
    from sinew.checks.validate.exported import REFERENCE, against_reference

    try:
        errors = against_reference(policy, policy.bundle.path.parent)
    except SinewError as error:
        return Check("bundle parity", "fail", str(error), "copy the folder again, or `sinew export` it again")
    if errors is None:
        detail = f"the folder has no {REFERENCE} (exported before 2026-11-26), so nothing was compared"
        return Check("bundle parity", "warn", detail, "run `sinew export` again")
    error_, bound = errors
    detail = (
        f"engine {policy.engine_name} on this machine against eager fp32 on the exporting machine, on one random"
        f" observation: relative L2 of the actions {error_:.1e} (bound {bound:.0e})"
    )
    if error_ <= bound:
        return Check("bundle parity", "ok", detail)
    return Check("bundle parity", "fail", detail, "do not serve with this folder on this machine")


def _memory(policy: Policy, available: int, needs: Needs | None) -> Check:
    """Compare the memory that the policy needs with the memory that was available before it was loaded."""
    needed, parts = (policy.facts.weights_nbytes, "weights alone") if needs is None else needs(policy)
    detail = f"needs {gib(needed)} in addition to this program ({parts}); {gib(available)} were available"
    if needed > available:
        return Check(
            "bundle memory",
            "fail",
            detail,
            "close programs or use a smaller dtype; otherwise each inference reads weights from the disk",
        )
    return Check("bundle memory", "ok", detail)


def _engine(policy: Policy) -> Check:
    detail = f"{policy.engine_name} ({policy.choice.engine_reason}), {policy.threads} threads"
    detail = ", ".join([detail, *policy.facts.notes])
    return Check("bundle engine", "ok", detail)


def _statistics(policy: Policy) -> Check:
    """Report statistics of states and actions that cannot be right."""
    manifest = policy.manifest
    problems = statistics.notes(manifest.spec, manifest.processing)
    if not problems:
        return Check("bundle statistics", "ok", "states and actions vary like those of a robot")
    advice = "convert the checkpoint again with the statistics of its training data (--stats FILE)"
    return Check("bundle statistics", "warn", "; ".join(problems), advice)


def _handover(spec: PolicySpec) -> Check:
    """Report how `sinew run` merges late chunks of this policy, and which options change that."""
    from sinew_client.control import choose

    return Check("bundle hand-over", "ok", str(choose(policy=spec.to_dict())).removeprefix("hand-over "))


def hashes(path: Path) -> Check:
    """Compare every tensor of a bundle with its stored hash. Reads the whole file."""
    from sinew.policy import open_bundle

    name = "bundle hashes"
    try:
        opened = open_bundle(path)
        if opened.hashes is None:
            detail = "the bundle contains no hashes (written before 2026-11-21), so nothing was compared"
            return Check(name, "warn", detail, "convert the checkpoint again")
        damaged = opened.verify()
    except SinewError as error:
        return Check(name, "fail", str(error), "copy or convert the bundle again")
    if damaged:
        named = ", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        detail = (
            f"{len(damaged)} of {len(opened.hashes)} tensors were changed after they were written: {named}"
        )
        return Check(name, "fail", detail, "copy or convert the bundle again")
    return Check(name, "ok", f"the header and {len(opened.hashes)} tensors are unchanged")

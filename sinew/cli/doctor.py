"""``sinew doctor``: is this installation able to run a policy, and how well?

Every check says why it passed or what to do. Exit code 1 if one failed; warnings do not fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators
from rich.markup import escape

from sinew import progress
from sinew.cli import terminal
from sinew.cli.options import RUNS, Runs
from sinew.core import SinewError
from sinew.engine.backend import AUTO, BACKENDS, installed

if TYPE_CHECKING:
    from sinew.checks import Check
    from sinew.policy import Policy

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def doctor(
    bundle: Path | None = None,
    /,
    *,
    verify: Annotated[bool, Parameter(negative="")] = False,
    observe: str | None = None,
    robot_options: str | None = None,
    cameras: Annotated[list[str] | None, Parameter(negative="")] = None,
    joints: Annotated[list[str] | None, Parameter(negative="")] = None,
    seconds: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=600))] = 3.0,
    learn: Path | None = None,
    out: Path | None = None,
    runs: Runs = RUNS,
) -> int:
    """Check the installation and this machine.

    Args:
        bundle: also load this bundle, folder of `sinew export`, checkpoint or name of the hub, and run it once.
        verify: read all of the bundle and compare every tensor with the hash that was written with it.
        observe: look at this robot (as of `sinew run --robot`), which is not commanded, or at a folder of `sinew serve
            --record`, and say what is wired otherwise than in the training data; nothing else is checked then.
        robot_options: of --observe, as of `sinew run`.
        cameras: of --observe, POLICY=ROBOT, as of `sinew run`; repeatable.
        joints: of --observe, POLICY=ROBOT, as of `sinew run`; repeatable.
        seconds: of --observe.
        learn: a folder of `sinew serve --record`, of the right robot: write the bundle once more to --out with what its
            cameras and joints look like, which --observe compares with.
        out: of --learn.
    """
    if observe is not None or learn is not None:
        from sinew.cli import doctor_observe as wiring

        if bundle is None:
            raise SinewError(
                "--observe, --learn: expected a policy, as in `sinew doctor POLICY --observe ROBOT`"
            )
        if verify or runs != RUNS or (observe is not None and learn is not None):
            raise SinewError(
                "--observe, --learn: expected one of them, without --verify and flags of engines"
            )
        if observe is not None:
            return wiring.observe(bundle, observe, robot_options, cameras, joints, seconds)
        if out is None:
            raise SinewError("--learn: expected --out, the bundle to write")
        assert learn is not None
        return wiring.learn(bundle, learn, out)
    from sinew import checks
    from sinew.sources import resolve

    results: list[Check] = []
    if bundle is not None:
        try:
            bundle = resolve(bundle)
        except SinewError as error:
            results.append(checks.Check("bundle", "fail", str(error), "give what the message expects"))
            bundle = None
    asked: str = runs.engine
    if asked == AUTO and bundle is not None and bundle.is_dir():  # graphs alone
        asked = next(name for name, backend in BACKENDS.items() if backend.runs_graphs)
    with progress.task("checking the installation"):
        results[:0] = checks.installation(asked)
    if bundle is not None and verify:
        with progress.task(f"reading {bundle}"):
            results.append(hashes(bundle))
    if bundle is not None:
        with progress.task(f"checking {bundle}"):
            results += checks.bundle(bundle, runs.keywords(), memory_needs)
    failed = [check for check in results if check.status == "fail"]

    console = terminal.console()
    console.print(
        terminal.findings(
            (MARKS[check.status], check.name, escape(check.detail) + terminal.advised(check.advice))
            for check in results
        )
    )
    warned = sum(check.status == "warn" for check in results)
    console.print(f"{len(results)} checks, {len(failed)} failed, {warned} with a warning")
    terminal.emit({"ok": not failed, "checks": [check.to_dict() for check in results]})
    return 1 if failed else 0


def hashes(path: Path) -> Check:
    """Compare every tensor of a bundle with the hash that was written with it; reads the whole file."""
    from sinew.checks import Check
    from sinew.policy import open_bundle

    name = "bundle hashes"
    try:
        opened = open_bundle(path)
        if opened.hashes is None:
            detail = "the bundle carries no hashes, as those written before 2026-11-21; nothing was compared"
            return Check(name, "warn", detail, "convert the checkpoint again")
        changed = opened.verify()
    except SinewError as error:
        return Check(name, "fail", str(error), "copy or convert the bundle again")
    if changed:
        named = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        detail = f"{len(changed)} of {len(opened.hashes)} tensors are not as they were written: {named}"
        return Check(name, "fail", detail, "copy or convert the bundle again")
    return Check(name, "ok", f"the header and {len(opened.hashes)} tensors are as they were written")


def memory_needs(policy: Policy) -> tuple[int, str]:
    """Return the bytes that a loaded policy needs beside the running program, and what they are: of an engine under
    PyTorch what `sinew perf fit` counts, else its weights."""
    weights = policy.weights_nbytes, "weights alone"
    if not installed("torch"):
        return weights
    from sinew.checks.check import gib
    from sinew.engine.example import Shapes
    from sinew.perf.memory import memory_report
    from sinew.perf.program import of_engine

    if policy.engine.model is None or policy.facts.one_graph:
        return weights
    spec, image = policy.spec, policy.bundle.manifest.processing.image
    shapes = Shapes(spec.views, image.height, image.width, spec.max_prompt_tokens, spec.solver_steps)
    device: Literal["cpu", "cuda"] = "cuda" if policy.device.startswith("cuda") else "cpu"
    report = memory_report(of_engine(policy.engine, shapes, spec.name), device)
    parts = (
        f"weights {gib(report.resident)}, activations {gib(report.peak.nbytes)}, as `sinew perf fit` counts"
    )
    return report.total - report.runtime, parts

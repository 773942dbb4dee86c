"""``sinew validate``: compare an engine and a bundle with the reference, and play the success gate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.checks.validate.record import EPISODES
from sinew.cli import terminal
from sinew.cli.infer import running
from sinew.cli.options import RUNS, Count, Flag, Runs, Whole, json_object
from sinew.core import SinewError, progress, providers
from sinew.engine import proofs

if TYPE_CHECKING:
    from sinew.policy import Policy

USUAL = 8  # default number of observations; with fewer, an outlier (one in eight) is likely to be missed


def validate(
    bundle: Path,
    /,
    *,
    runs: Runs = RUNS,
    observations: Count = USUAL,
    records: Path | None = None,
    gate: Path | None = None,
    env: str | None = None,
    adapter: str | None = None,
    env_options: str | None = None,
    reset_options: str | None = None,
    episodes: Whole = EPISODES,
    out: Path | None = None,
    audit: Flag = False,
) -> int:
    """Verify that an engine computes a bundle as the reference does, and that the policy still succeeds at its task.

    Sinew compares every stage of the engine with eager float32, on the same observations and noise. Indices must be
    equal. A float32 engine needs a cosine of at least 1 - 1e-7 in every stage, and actions within 1e-4 of their
    spread. A lower precision has weaker bounds, and the output names them. If the bundle has a task, Sinew plays
    episodes and compares the success with the gate's record. It stores a pass. `--engine auto` takes an engine on a
    GPU, or for a family that is not tested with it, only after a pass.
    The exit status is 1 if the validation fails.

    Args:
        bundle: Policy to check: a bundle with weights, a checkpoint or training run, or a hub name.
        observations: Number of observations to compare. The verdict states it.
        records: Folder of `sinew serve --record` that provides the observations. Default: episodes of a
            built-in task that fits the policy, otherwise random frames.
        gate: Gate file. Default: the built-in gate whose task fits the policy.
        env: Environment that the gate file names, if it is not a task of Sinew. Type it only if you trust it.
        adapter: Adapter that the gate file names. Type it only if you trust it.
        env_options: Options of the environment in the gate file, as a JSON object. Type them only if you
            trust them.
        reset_options: Options of every reset in the gate file, as a JSON object. Type them only if you trust
            them.
        episodes: Number of episodes of the gate. From 100 on, 0.95 of the reference's success is required. 0
            plays none.
        out: Folder for report.md and report.json.
        audit: List what a CUDA graph could not record in the program, stage by stage (--engine cuda). It
            computes nothing and needs no GPU. The exit status is 1 if there is anything.
    """
    from sinew.checks import judges
    from sinew.checks.validate.record import compared, kept_record
    from sinew.checks.validate.report import write
    from sinew.convert.sources import resolve
    from sinew.policy import Policy, open_bundle

    bundle = resolve(bundle)
    opened = open_bundle(bundle)
    if not opened.infos:
        raise SinewError(
            f"{bundle}: expected a bundle with weights, which the reference needs, got exported graphs; pass the bundle"
            " from which they were exported"
        )
    if audit:
        for flag, value in (("records", records), ("gate", gate), ("out", out)):
            if value is not None:
                raise SinewError(
                    f"--{flag}: expected none with --audit, which computes and writes nothing, got {value}; omit it"
                )
        overrides = {"device": "cpu"} if runs.device == "auto" else {}
        return show_audit(Policy(opened, **runs.keywords() | overrides))
    options = json_object("--env-options", env_options), json_object("--reset-options", reset_options)
    success_gate = None
    if gate is not None:
        judge = providers.required(judges.GROUP, "sinew validate --gate")
        success_gate = judge.gate(gate, env or "", adapter or "", *options)
    with progress.task(f"loading {bundle}"):
        policy = Policy(opened, **runs.keywords())
    with progress.task(f"loading {bundle} as the reference"):
        reference = Policy(opened, "cpu", "fp32", "eager", ignore_recipe=True)
    parity = compared(policy, reference, observations, judges.observations, records)
    why = "the command requested none"
    if success_gate is None and episodes:
        success_gate, why = judges.gate_of(bundle)
    if success_gate is not None and episodes:
        played = success_gate.play(bundle, policy.choice, episodes, runs.ignore_recipe)
    else:
        played = None
    record = kept_record(bundle, parity, terminal.typed(), played, f"not played: {why}")
    try:
        stored = f"stored in {proofs.keep(bundle, policy.engine_name, str(policy.device), record)}"
    # Print the result of minutes of work even if it cannot be stored.
    except OSError as error:
        stored = (
            f"not stored for `--engine auto`: {error}. Set XDG_CACHE_HOME to a folder that can be written"
        )
    show(record, policy)
    if out is not None:
        write(record, out)
    terminal.console().print(stored, markup=False)
    terminal.emit(record)
    return 0 if record["passed"] else 1


def show_audit(policy: Policy) -> int:
    """Print the operators of each stage that a CUDA graph cannot record. Return the exit status."""
    observation, solver = policy.dummy_observation(), policy.spec.solver
    steps = solver.fixed_steps or policy.spec.solver_steps
    audit = policy.engine.audit(policy.prepare(observation).inputs.batched(), steps)
    console, broken = terminal.console(), [stage for stage in audit if stage.breaks]
    console.print(running(policy), markup=False)
    table = terminal.table(
        "what a CUDA graph would record", "stage", ">operators", ">MB allocated", "breaks it"
    )
    for stage in audit:
        table.add_row(
            stage.stage, f"{stage.operators}", f"{stage.nbytes / 1e6:.1f}", "\n".join(stage.breaks) or "-"
        )
    console.print(table)
    names = ", ".join(stage.stage for stage in broken)
    console.print(f"[bold red]cannot be recorded: {names}[/]" if broken else "one graph records all of it")
    stages = [asdict(stage) for stage in audit]
    terminal.emit({"schema": "sinew.audit/1", "stages": stages, "recordable": not broken})
    return int(bool(broken))


def show(record: dict[str, Any], policy: Policy) -> None:
    from sinew.checks.validate.report import COLUMNS, float32_bounds, stage_rows

    console, parity, gate = terminal.console(), record["parity"], record["gate"]
    console.print(running(policy), markup=False)
    title = f"against eager fp32 over {parity['observations']} observations: {parity['source']}"
    rows = stage_rows(parity, "[green]ok[/]", "[bold red]differs[/]")
    console.print(terminal.table(title, *COLUMNS, rows=rows))
    for name, same in parity["indices"].items():
        console.print(f"indices of {name}: {'equal' if same else 'NOT EQUAL'}")
    for line in float32_bounds(parity):
        console.print(line, markup=False)
    for fault in parity["faults"]:
        console.print(f"fault: {fault}", markup=False)
    console.print(f"success gate: {gate.get('text') or gate['skipped']}", markup=False)
    for line in record["weaker"]:
        console.print(line, markup=False)
    count = parity["observations"]
    few = f"; fewer than {USUAL} observations may miss an error" if count < USUAL else ""
    verdict = "passes" if record["passed"] else "[bold red]FAILS[/]"
    console.print(f"{verdict} over {count} observation{'s' * (count != 1)}{few}")

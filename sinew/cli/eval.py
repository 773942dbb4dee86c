"""``sinew eval``: closed-loop success of a policy, with intervals, sweeps, comparisons and a gate."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, validators
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from sinew_client.control import AS_IS
from sinew_client.control.defaults import HANDOVER, REPLAN

from sinew.cli import status, terminal
from sinew.cli.options import (
    CAMERAS,
    RUNS,
    Cameras,
    Count,
    CountIfAny,
    Flag,
    Runs,
    Texts,
    Whole,
    WholeIfAny,
    changed,
    json_object,
    motion_of,
)
from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.eval import suites
from sinew.eval.evidence import plots
from sinew.eval.report import stats
from sinew.eval.report.gate import read_gate, record
from sinew.eval.runner import Episode
from sinew.eval.settings import Latency, Task, Variant, parse_replan
from sinew.eval.variants import control_hz, default_env, in_lockstep, settled, usual_workers
from sinew.eval.variants import variants as variants_of

if TYPE_CHECKING:
    from sinew.eval.foreign.run import Foreign
    from sinew.policy import Policy

EPISODES, SEED = 100, 5000


@Parameter(name="*", group=Group("Episodes", sort_key=-1))
@dataclass(frozen=True)
class EpisodeFlags:
    """Say what is played, which follows from these alone.

    Attributes:
        env: gymnasium id, module:Class or the name that an installed package gives its own; if absent, the embedded
            task whose observations the policy takes. Those of suites run in an interpreter of their own.
        suite: all tasks of a benchmark: libero, libero_spatial, metaworld_mt50, aloha ... (docs/eval-suites.md).
        episodes: one per seed; 100 if absent.
        seed: of the first episode, 5000 if absent; the others follow.
        replan: actions executed per inference, `full` for the whole chunk, or another rule of `sinew run`; a quarter of
            a chunk if absent.
        latency: simulated, from request to chunk: control steps or `50ms`, `uniform:1-4`, `normal:80,20ms`.
        handover: how a late chunk is taken over: auto (what the policy's actions ask for), freeze, naive, aligned,
            ensemble, aggregate or rtc; with settings as in aggregate:average, rtc:guided:exp:5 or aligned+halt:1.5
            (docs/control.md).
        edge_adapter: a file; a small network that refines the newest chunk in every control step (docs/fleet.md).
        stream: PREFIX:HEAD[:GUIDANCE], milliseconds of simulated time that the two loops of a stream take; instead of
            chunks; --latency is then what each window takes on top. guidance of whole chunks: guided, no-jacobian,
            ramp or none (docs/stream.md).
        motion: what actions are measured from: absolute (they are targets), or a JSON object (docs/control.md); as the
            policy states it if absent, "as is" for rows as they come.
        future: tell the policy the state that the robot will have when the answer arrives; needs --motion.
        solver_steps: instead of the bundle's own number.
        sweep: KEY=VALUE,VALUE... with a key of replan, latency, handover, solver_steps, engine, dtype, edge_adapter,
            batch; repeatable.
        gate: a file, or blocks, pen or act of this package; its protocol is run, success is held against its record.
        record_gate: write the first variant as a gate file.
        rerun: every step for Rerun's viewer: a file NAME.rrd, or the address of a viewer that is running,
            rerun+http://HOST:9876/proxy. One worker plays. Needs the extra `rerun`.
        batch: episodes that each shard plays in lockstep, so that one inference answers what they ask at the same
            moment: a number, or `auto` for what is fastest here (of a server, the most that it computes at once); one
            after the other if absent.
        realtime: pace the environment by the clock and use measured latency.
        noise: a number that enters every noise seed; 0 if absent.
        adapter: for environments of other makers: a .json mapping or module:Class.
        env_options: JSON object, arguments of the environment's constructor.
        reset_options: JSON object, options of every reset.
    """

    env: str | None = None
    suite: str | None = None
    episodes: CountIfAny = None
    seed: WholeIfAny = None
    replan: str | None = None
    latency: str | None = None
    handover: str | None = None
    edge_adapter: str | None = None
    stream: str | None = None
    motion: str | None = None
    future: Flag = False
    solver_steps: CountIfAny = None
    sweep: Texts = ()
    gate: Path | None = None
    record_gate: Path | None = None
    rerun: str | None = None
    batch: Count | Literal["auto"] = 1
    realtime: Flag = False
    noise: WholeIfAny = None
    adapter: str | None = None
    env_options: str | None = None
    reset_options: str | None = None


EPISODE = EpisodeFlags()


def eval(  # noqa: A001 - the verb's name; nothing here evaluates text
    target: str | None = None,
    /,
    *,
    on: EpisodeFlags = EPISODE,
    setup: str | None = None,
    interpreter: Path | None = None,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
    compare: Texts = (),
    out: Path | None = None,
    films: Whole = 0,
    repeat: Path | None = None,
    workers: Annotated[
        int | None, Parameter(name=("--workers", "--shards"), validator=validators.Number(gte=1))
    ] = None,
    join: str | None = None,
    listen: str | None = None,
    hosts: str | None = None,
) -> int:
    """Run a policy in closed loop and count successes.

    Exit status 1 means that the gate failed, or an error; 3 that answers could not be executed.

    Args:
        target: a bundle, a folder of `sinew export`, a checkpoint or training run, a name of the hub, the address of a
            server (tcp://host:port), or `expert`.
        setup: make the interpreter of a simulator and do nothing else: aloha, pusht, metaworld, libero.
        interpreter: a Python with the environment in it, instead of what --setup makes.
        compare: a second bundle or address, or KEY=VALUE,KEY=VALUE: another variant over the same seeds.
        out: folder for the log of episodes, report, page and figures; a run into the same folder continues.
        films: of so many failures and successes, on the page; needs --out.
        repeat: report.json or report.html of another run: play its episodes again, with its bundles, and say what is
            equal and what differs; a target and --compare say where its bundles are. Exit status 1 where an outcome is
            another one.
        workers: processes that play, of a queue of episodes: one that is killed loses nothing, and the same command
            goes on where it was; the number of cores if absent, 1 in real time.
        join: instead of a target: the --out folder of a run of several shards that plays now, there or on another
            machine, or the http:// address of one with --listen; helps it with --shards processes.
        listen: HOST:PORT where other hosts may --join without seeing the folder; beyond 127.0.0.1 with the key of
            SINEW_API_KEY, which they have too.
        hosts: a Ray cluster on whose hosts the --shards play instead of here: ray (the cluster of this machine, or of
            RAY_ADDRESS) or ray://HOST:10001. A host that has no such bundle is sent it. Needs the extra `ray`.
    """
    if setup is not None:
        return _set_up(setup)
    if join is not None and hosts is not None:
        raise SinewError("--hosts: expected the run itself; --join helps one from this machine")
    if join is not None:
        return _join(join, target, workers or usual_workers())
    if films and out is None:
        raise SinewError("--films: expected --out, the folder of the page that shows them")
    if repeat is not None:
        given_too = (
            changed(on) or changed(Cameras(cameras.rename)) or changed(Runs(runs.engine, dtype=runs.dtype))
        )
        if given_too is not None:
            raise SinewError(f"{given_too}: expected nothing that changes what --repeat plays")
        policies = [*([target] if target is not None else []), *compare]
        if hosts is not None or listen is not None:
            raise SinewError("--repeat: expected this machine, without --hosts and --listen")
        return _repeat(repeat, policies, interpreter, workers, out, films)
    if target is None:
        raise SinewError("expected a bundle file, the address of a server (tcp://host:port), or expert")
    recording = None if on.rerun is None else _recording(on.rerun, workers, on.realtime, on.stream)
    if on.suite is not None and on.env is not None:
        raise SinewError("--suite and --env: expected one of the two; --env takes a task of a suite as well")
    env = suites.named(on.suite) if on.suite is not None else on.env
    held = read_gate(on.gate) if on.gate is not None else None
    task = Task(
        env=env or default_env(target, cameras.rename, **cameras.allowed),
        env_options=json_object("--env-options", on.env_options),
        reset_options=json_object("--reset-options", on.reset_options),
        adapter=on.adapter or "",
        noise=on.noise or 0,
        realtime=on.realtime,
        motion=motion_of(on.motion),
        future=on.future,
    )
    given = {name: getattr(on, name) for name in ("replan", "latency", "handover", "solver_steps")}
    if on.record_gate is not None and on.motion is None:
        task = replaced(task, motion=dict(AS_IS))
    if held is not None:
        flags = {name: getattr(on, name) for name in ("env_options", "reset_options", "adapter", "noise")}
        task, given = held.held(task, given, {"env": env, **flags})
    usual = (SEED, EPISODES) if held is None else (held.first_seed, held.episodes)
    asked_for = (on.seed, on.episodes)
    first, count = (own if flag is None else flag for flag, own in zip(asked_for, usual, strict=True))
    if on.edge_adapter is not None and held is not None:
        raise SinewError("--edge-adapter: a gate is judged with chunks as they come")
    if on.stream is not None and (on.realtime or held is not None):
        raise SinewError(
            "--stream: expected simulated time and no gate; `sinew run --stream` runs by the clock"
        )
    if on.realtime and (on.latency is not None or any(text.startswith("latency") for text in on.sweep)):
        raise SinewError("--latency is simulated; with --realtime the latency is what it is")
    try:
        interval = parse_replan(str(REPLAN if given["replan"] is None else given["replan"]))
    except ValueError as error:
        raise SinewError(f"--replan: {error}") from None
    base = runs.variant(
        target, cameras, replan=interval, latency=Latency(given["latency"] or "0"),
        handover=given["handover"] or HANDOVER, solver_steps=given["solver_steps"], stream=on.stream or "",
        edge_adapter=on.edge_adapter or "", batch=1 if on.batch == "auto" else on.batch,
    )  # fmt: skip
    if runs.provider:
        raise SinewError(
            "--provider: expected a server of yours, `sinew serve --provider`, and its address here"
        )
    if out is not None:
        plots.check()
    asked = variants_of(base, on.sweep, compare)
    elsewhere = elsewhere_for(task, interpreter, out)
    rate = elsewhere.control_hz(task) if elsewhere is not None else control_hz(task, asked)
    said: set[str] = set()
    variants = [settled(variant, task, said) for variant in asked]
    if on.batch == "auto":
        variants = [in_lockstep(variant, task, out, _fastest_batch) for variant in variants]
    if any(variant.batch > 1 for variant in variants) and (elsewhere or recording or on.realtime):
        raise SinewError(
            "--batch: expected simulated time in this interpreter, without --rerun and --realtime"
        )
    seeds = range(first, first + count)
    if recording is not None and elsewhere is not None:
        raise SinewError(
            "--rerun: this environment asks a server; start `sinew serve --rerun` and give its address"
        )
    for flag, given_there in (("--listen", listen), ("--hosts", hosts)):
        if given_there is not None and (elsewhere or recording or on.realtime):
            raise SinewError(
                f"{flag}: expected simulated time in this interpreter, without --rerun and --realtime"
            )
    if hosts is not None:
        from sinew.eval.foreign.cluster import check

        check(hosts)
        if workers is None:
            raise SinewError("--hosts: expected --shards, how many play at once on the cluster")
    workers = workers or usual_workers(alone=on.realtime or recording is not None)
    if out is not None:
        from sinew.eval.evidence.repeat import check_place

        check_place(out, task, variants)
    report = _run(task, rate, variants, seeds, workers, out, elsewhere, recording, listen, hosts)
    failed = held is not None and not held.judge_report(report)
    broken = sum((Counter(each.faults) for played in report["episodes"] for each in played), Counter())
    report["failed"] = [f"{count} answers could not be executed: {kind}" for kind, count in broken.items()]
    if out is not None:
        _write(report, out, task, variants, films, elsewhere)
    if on.record_gate is not None:
        record(report).write(on.record_gate)

    print_report(report)
    terminal.emit({name: value for name, value in report.items() if name != "episodes"})
    broke = status.ended(report["failed"])
    return status.EXIT_ERROR if failed else broke


def print_report(report: dict[str, Any]) -> None:
    """Print under which conditions episodes or trials were played, their tables, and what a gate says of them."""
    from sinew.eval.report.report import conditions, tables

    console = terminal.console()
    console.print(conditions(report))
    for title, columns, rows in tables(report):
        console.print(terminal.table(title, *columns, rows=rows))
    for verdict in report.get("gate", {}).get("verdicts", []):
        console.print(f"gate, {verdict['label']}: {verdict['text']}")


def _repeat(
    path: Path,
    policies: Sequence[str],
    interpreter: Path | None,
    workers: int | None,
    out: Path | None,
    films: int,
) -> int:
    """Play a recorded run again, and print what is equal and what differs."""
    from sinew.eval.evidence import repeat

    recorded = repeat.read(path)
    task = recorded.task
    elsewhere = elsewhere_for(task, interpreter, out)
    asked = recorded.found(policies)
    rate = elsewhere.control_hz(task) if elsewhere is not None else control_hz(task, asked)
    said: set[str] = set()
    variants = [settled(variant, task, said) for variant in asked]
    workers = workers or usual_workers(alone=task.realtime)
    report = _run(task, rate, variants, recorded.seeds, workers, out, elsewhere)
    found = repeat.compare(recorded, report, report["episodes"])
    report["repeat"] = found
    if out is not None:
        _write(report, out, task, variants, films, elsewhere)
    console = terminal.console()
    console.print(terminal.table(None, *repeat.COLUMNS, rows=repeat.rows(found)))
    for text in repeat.sentences(found):
        console.print(text, markup=False)
    terminal.emit({name: value for name, value in report.items() if name != "episodes"})
    return 0 if found["passed"] else status.EXIT_ERROR


def _fastest_batch(policy: Policy) -> tuple[int, str]:
    """Return the batch that a server would make of this policy's requests here, and why."""
    from sinew.serve.batching import Batcher

    batcher = Batcher(None)
    batcher.calibrate(policy)
    return batcher.limit, batcher.reason


def _join(run: str, target: str | None, shards: int) -> int:
    from sinew.eval.farm.shards import join

    if target is not None:
        raise SinewError(f"--join: expected no target, as the run has one, got {target}")
    played = join(run, shards)
    terminal.console().print(f"played here  {played} episodes", markup=False)
    terminal.emit({"joined": run, "episodes": played})
    return 0


def _set_up(simulator: str) -> int:
    from sinew.eval.foreign import run as foreign

    python = foreign.set_up(simulator)
    terminal.console().print(f"interpreter  {python}", markup=False)
    terminal.emit({"simulator": simulator, "interpreter": str(python)})
    return 0


def elsewhere_for(task: Task, interpreter: Path | None = None, out: Path | None = None) -> Foreign | None:
    """Return where the environment is played, if not here."""
    found = suites.find(task.env)
    if found is None and interpreter is None:
        return None
    from sinew.eval.foreign import run as foreign

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    python = (
        foreign.interpreter(found[0].simulator) if interpreter is None and found is not None else interpreter
    )
    assert python is not None
    return foreign.Foreign(python, None if out is None else out / "serve.log")


def _recording(text: str, workers: int | None, realtime: bool, stream: str | None) -> Path | str:
    """Return where --rerun goes. Raises :class:`SinewError` for what cannot be recorded from here."""
    from sinew.records.viewers.rerun_log import target_of

    if workers not in (None, 1):
        raise SinewError(f"--rerun: expected one worker, which writes the recording, got --workers {workers}")
    if realtime or stream is not None:
        raise SinewError(
            "--rerun would slow down the loop that --realtime and --stream measure; start `sinew serve --rerun` instead"
        )
    return target_of(text)


# ----------------------------------------------------------------------------- running


def _run(
    task: Task,
    control_hz: float,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    workers: int,
    out: Path | None,
    elsewhere: Foreign | None,
    recording: Path | str | None = None,
    listen: str | None = None,
    hosts: str | None = None,
) -> dict[str, Any]:
    """The report, with the episodes themselves under "episodes"."""
    try:
        from sinew.eval import campaign
        from sinew.eval.report.report import document
        from sinew.eval.runner import reactions
    except ModuleNotFoundError as error:
        raise MissingPackageError("evaluation", error.name or "mujoco") from None
    errors = terminal.console(stderr=True)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[rate]}"), TimeRemainingColumn()),
    )
    fresh, begun = 0, 0.0  # episodes that were played now, since when
    wins: dict[Variant, list[bool]] = {variant: [] for variant in variants}
    bars: dict[Variant, TaskID] = {}
    with terminal.bars(*columns) as progress:
        bars = {v: progress.add_task(v.label(variants), total=len(seeds), rate="") for v in variants}

        def begin(todo: int) -> None:
            nonlocal fresh, begun
            if fresh:
                terminal.say(f"{fresh} of {fresh + todo} episodes were played before")
            fresh, begun = 0, time.monotonic()
            for bar in bars.values():  # what the log had says nothing of how fast this goes
                progress.reset(bar, completed=int(progress.tasks[bar].completed))

        def show(variant: Variant, episode: Episode) -> None:
            nonlocal fresh
            fresh += 1
            rate = fresh / max(time.monotonic() - begun, 1e-3)
            wins[variant].append(episode.success)
            won, count = sum(wins[variant]), len(wins[variant])
            low, high = stats.wilson(won, count)
            text = f"{variant.label(variants)}: {won}/{count} [{100 * low:.0f}, {100 * high:.0f}] %"
            shown = text.replace("[", r"\[")
            speed = f"{rate:.1f}/s" if begun else ""
            progress.update(bars[variant], completed=count, description=shown, rate=speed)
            if not errors.is_terminal and count == len(seeds):
                errors.print(text, markup=False)

        player = None
        if recording is not None:
            from sinew.eval.rerun import LoggedPlayer

            labels = {v: v.label(variants) for v in variants} if len(variants) > 1 else {}
            player = partial(LoggedPlayer, target=recording, labels=labels)
        try:
            results = campaign.run(
                task, variants, seeds, workers=workers, out=out, on_episode=show, on_todo=begin,
                elsewhere=elsewhere, player=player, listen=listen, hosts=hosts,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = "nothing is kept without --out" if out is None else f"the same command goes on from {out}"
            terminal.say(f"interrupted after {sum(map(len, wins.values()))} episodes; {kept}")
            raise
    report = document(task, control_hz, variants, results, workers=workers, command=terminal.typed())
    for entry, episodes in zip(report["variants"], results, strict=True):
        if found := reactions(episodes):
            entry["reactions_ms"] = found
            told = "; ".join(f"{name} p50 {each['p50']}, p95 {each['p95']}" for name, each in found.items())
            errors.print(f"{entry['label']}: reactions in ms: {told}", markup=False)
    return {**report, "episodes": results}


def _write(
    report: dict[str, Any],
    out: Path,
    task: Task,
    variants: Sequence[Variant],
    films: int,
    elsewhere: Foreign | None,
) -> None:
    """Write the report, its page and figures. films: of so many failures and successes, which are played once more."""
    from sinew.eval.evidence import run_page
    from sinew.eval.evidence.films import shoot
    from sinew.eval.report.report import markdown

    shown = {name: value for name, value in report.items() if name != "episodes"}
    whole = {**shown, "outcomes": run_page.outcomes(report["episodes"])}
    (out / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
    if films and (task.realtime or any(variant.stream for variant in variants)):
        terminal.say("no films: expected chunks in simulated time")
        films = 0
    made = shoot(task, variants, report["episodes"], films, report["control_hz"], elsewhere) if films else []
    (out / run_page.PAGE).write_text(run_page.write_page(whole, made))
    (out / "report.md").write_text(markdown(shown))
    for path in (*plots.write_plots(shown, out), out / run_page.PAGE):
        terminal.say(f"wrote {path}")

"""``sinew eval``: measure the closed-loop success of a policy, with intervals, sweeps, comparisons and a success
gate.
"""

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
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
from sinew.convert.sources import resolve
from sinew.core import SinewError, progress, statistics
from sinew.engine.backend import AUTO
from sinew_client.control import AS_IS
from sinew_client.control.defaults import HANDOVER, REPLAN
from sinew_client.target import LOCAL, Target

from sinew_eval import suites
from sinew_eval.episodes import campaign
from sinew_eval.episodes.outside import TypedNames, say_names
from sinew_eval.episodes.runner import Episode, reactions
from sinew_eval.episodes.settings import Latency, Task, Variant, parse_replan
from sinew_eval.episodes.variants import control_hz, default_env, in_lockstep, settled, usual_workers
from sinew_eval.episodes.variants import variants as variants_of
from sinew_eval.evidence import plots, run_page
from sinew_eval.evidence import repeat as repetition
from sinew_eval.report.gate import Gate, read_gate, record
from sinew_eval.report.report import conditions, document, markdown, tables

if TYPE_CHECKING:
    from sinew.policy import Policy

    from sinew_eval.foreign.run import Foreign

EPISODES, SEED = 100, 5000


@Parameter(name="*", group=Group("Episodes", sort_key=-1))
@dataclass(frozen=True)
class EpisodeFlags:
    """Options that determine what is played, together with the policy.

    Attributes:
        env: Gymnasium id, module:Class, or the name of an installed task package. Default: the built-in task that
            fits the policy. Tasks of suites run in their own interpreter.
        suite: Play all tasks of a benchmark: libero, libero_spatial, metaworld_mt50, aloha ...
        episodes: Number of episodes, one per seed. Default: 100.
        seed: Seed of the first episode. The others follow. Default: 5000.
        replan: Actions executed per inference, `full` for the whole chunk, or another rule of `sinew run`. Default: a
            quarter of a chunk.
        latency: Simulated time from request to chunk: control steps, `50ms`, `uniform:1-4` or `normal:80,20ms`.
        handover: Chunk merging: auto (chosen by the policy's actions), freeze (wait), naive (no compensation),
            aligned (latency-compensated), ensemble, aggregate or rtc. Settings follow a colon: aggregate:average,
            rtc:guided:exp:5, aligned+halt:1.5.
        edge_adapter: File with a small network that refines the newest chunk in every control step.
        stream: Use a stream instead of chunks: PREFIX:HEAD[:GUIDANCE] are the simulated milliseconds of its two
            loops. --latency is then the additional time of each action window. GUIDANCE of whole chunks: guided,
            no-jacobian, ramp or none.
        motion: Reference of the actions: absolute (they are targets), a JSON object that describes delta actions, or
            "as is" to execute actions unchanged. Default: as the policy states.
        future: Send the state that the robot will have when the answer arrives. Needs --motion.
        solver_steps: Number of solver steps. Default: the bundle's own number.
        sweep: Play all given values of a setting, as KEY=VALUE,VALUE... KEY is replan, latency, handover,
            solver_steps, engine, dtype, edge_adapter or batch. Repeatable.
        gate: Success gate (required success rate): a file, or the built-in blocks, pen or act. Sinew plays its
            protocol and compares the success with its record. If the file names its own environment, adapter or
            options, type the same names.
        record_gate: File to which the first variant is written as a gate.
        rerun: Send every step to Rerun: a file NAME.rrd, or the address of a running viewer,
            rerun+http://HOST:9876/proxy. One worker plays. Needs the extra `rerun`.
        batch: Episodes that each shard plays in lockstep, so that one inference answers all of them: a number, or
            `auto` for the fastest here (with a server, its largest batch). Default: one episode after the other.
        realtime: Pace the environment by the clock and use the measured latency.
        noise: Number that enters every noise seed. Default: 0.
        effects: After the episodes, measure by how much the actions change if one input changes: the instruction,
            each camera, the state. Needs bundles.
        adapter: Adapter for environments of other projects: a .json mapping or module:Class.
        env_options: Arguments of the environment's constructor, as a JSON object.
        reset_options: Options of every reset, as a JSON object.
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
    effects: Flag = False
    adapter: str | None = None
    env_options: str | None = None
    reset_options: str | None = None


EPISODE = EpisodeFlags()


def eval(  # noqa: A001 - the name of the verb; this module does not use Python's eval
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
    """Run a policy in closed loop and measure its success rate.

    The exit status is 1 if the success gate failed or an error occurred, and 3 if answers could not be executed.

    Args:
        target: Policy to evaluate: a bundle, a folder of `sinew export`, a checkpoint or training run, a hub
            name, a server's address (tcp://HOST:PORT), or `expert`.
        setup: Only create the interpreter of a simulator: aloha, pusht, metaworld or libero.
        interpreter: Python that contains the environment, instead of the one that --setup creates.
        compare: Second policy, or settings of the first one as KEY=VALUE,KEY=VALUE, played with the same
            seeds.
        out: Folder for the episode log, report, page and figures. A run into the same folder continues it.
        films: Number of failures and successes to film for the page. Needs --out.
        repeat: report.json or report.html of another run. Sinew plays its episodes again and prints what is
            equal and what differs. Built-in policies need no target. Pass other bundles, and addresses of
            servers, as the target and with --compare. If the file names its own environment, adapter, options
            or edge adapter, type the same names. The exit status is 1 if an outcome differs.
        workers: Number of processes that play episodes. If one is killed, nothing is lost, and the same
            command continues. Default: the number of cores, or 1 in real time.
        join: Run to join with --shards processes: its --out folder, on this or another machine, or the
            http:// address of a run with --listen. An address sends its bundles. For a folder, pass the run's
            bundles as the target and with --compare. If the run uses an address, an environment, an adapter,
            options or an edge adapter of its own, type the same names.
        listen: HOST:PORT where other hosts may --join without access to the folder. They need the key in
            SINEW_API_KEY. On 127.0.0.1 the run draws a key if you set none, and prints the command to join.
        hosts: Ray cluster whose hosts play the --shards: ray (the cluster of this machine, or of RAY_ADDRESS)
            or ray://HOST:10001. Sinew sends the bundle to hosts that lack it. Needs the extra `ray`.
    """
    if setup is not None:
        return _set_up(setup)
    if join is not None:
        return _join(join, _typed(on, target, compare, "--join"), workers, hosts)
    if films and out is None:
        raise SinewError("--films: also pass --out FOLDER; the page in this folder shows the films")
    if repeat is not None:
        for flags in (Cameras(cameras.rename), Runs(runs.engine, dtype=runs.dtype)):
            if options := changed(flags):
                raise SinewError(
                    f"{options}: cannot be combined with --repeat, which plays the recorded settings; omit it"
                )
        typed = _typed(on, target, compare, "--repeat")
        if hosts is not None or listen is not None:
            raise SinewError("--repeat: plays only on this machine; omit --hosts and --listen")
        return _repeat(repeat, typed, interpreter, workers, out, films)
    if target is None:
        raise SinewError(
            "expected a bundle file, the address of a server (tcp://host:port), or expert; try `sinew eval blocks`"
        )
    _refuse_together(on, runs, workers)
    viewer: Path | str | None = None
    if on.rerun is not None:
        from sinew.records.viewers.rerun_log import target_of

        viewer = target_of(on.rerun)
    gate = None if on.gate is None else read_gate(on.gate)
    task, first, seeds = _asked(target, on, cameras, runs, gate)
    if out is not None:
        plots.check()
    asked, shards = variants_of(first, on.sweep, compare), workers if viewer is None else 1
    run = _Run.of(task, asked, seeds, interpreter, shards, out)
    run = replaced(run, viewer=viewer, listen=listen, hosts=hosts)
    if on.batch == "auto":
        run = replaced(run, variants=[in_lockstep(each, task, out, _fastest_batch) for each in run.variants])
    run.check(workers)
    report = run.play()
    failed = gate is not None and not gate.judge_report(report)
    broken = sum((Counter(each.faults) for played in report["episodes"] for each in played), Counter())
    report["failed"] = [f"{count} answers could not be executed: {kind}" for kind, count in broken.items()]
    run.write(report, films)
    if on.record_gate is not None:
        record(report).write(on.record_gate)
    print_report(report)
    if on.effects:
        report["effects"] = _effects(run)
    terminal.emit(_told(report))
    broke = status.ended(report["failed"])
    return status.EXIT_ERROR if failed else broke


def _effects(run: _Run) -> dict[str, Any]:
    """Measure and print the effects of the inputs of each policy. Returns them by the policy's name."""
    from sinew.cli.doctor_observe import effects_table

    from sinew_eval.episodes.effects import effects_of

    if run.elsewhere is not None:
        raise SinewError(
            "--effects: expected a task that runs in this Python environment, such as a built-in one"
        )
    measured = {}
    for variant in {each.target: each for each in run.variants}.values():
        effects = effects_of(run.task, variant, run.seeds[0])
        terminal.console().print(effects_table(effects))
        terminal.console(markup=False).print(f"{variant.target}: {effects.text()}")
        measured[variant.target] = effects.to_dict()
    return measured


def _typed(on: EpisodeFlags, target: str | None, compare: Sequence[str], flag: str) -> TypedNames:
    """Collect the names that were typed in addition to --repeat or --join.

    Args:
        on: Options of the episodes.
        target: The policy.
        compare: Further policies.
        flag: "--repeat" or "--join", for messages.

    Returns:
        The typed names.

    Raises:
        SinewError: An option would change what is played.
    """
    others = replaced(on, env=None, adapter=None, env_options=None, reset_options=None, edge_adapter=None)
    if options := changed(others):
        raise SinewError(
            f"{options}: cannot be combined with {flag}, which plays the recorded settings; omit it"
        )
    edges = () if on.edge_adapter is None else (on.edge_adapter,)
    policies = tuple(each for each in (target, *compare) if each is not None)
    return TypedNames(
        on.env or "",
        on.adapter or "",
        json_object("--env-options", on.env_options),
        json_object("--reset-options", on.reset_options),
        edges,
        policies,
    )


def _refuse_together(on: EpisodeFlags, runs: Runs, workers: int | None) -> None:
    """Raise :class:`SinewError` for options that cannot be combined."""
    if on.suite is not None and on.env is not None:
        raise SinewError("--suite, --env: pass only one of them; --env also accepts a single task of a suite")
    if on.edge_adapter is not None and on.gate is not None:
        raise SinewError(
            "--edge-adapter: cannot be combined with --gate, which executes chunks unchanged; omit one of them"
        )
    if on.stream is not None and (on.realtime or on.gate is not None):
        raise SinewError(
            "--stream: cannot be combined with --realtime or --gate; for real time, use `sinew run --stream`"
        )
    if on.realtime and (on.latency is not None or any(text.startswith("latency") for text in on.sweep)):
        raise SinewError(
            "--latency simulates a latency and cannot be combined with --realtime, which uses the measured one; omit"
            " one of them"
        )
    if runs.provider:
        raise SinewError(
            "--provider: not supported here; start `sinew serve --provider NAME`, and pass the server's address"
        )
    if on.rerun is not None and workers not in (None, 1):
        raise SinewError(
            f"--rerun: only one worker can write the recording, got --workers {workers}; pass --workers 1"
        )
    if on.rerun is not None and (on.realtime or on.stream is not None):
        slow = "--rerun would slow down the loop that --realtime and --stream measure"
        raise SinewError(f"{slow}; start `sinew serve --rerun` instead")


def _asked(
    target: str, on: EpisodeFlags, cameras: Cameras, runs: Runs, recorded_gate: Gate | None
) -> tuple[Task, Variant, range]:
    """Return the task, the first variant and the seeds. Each setting comes from an option, else from the gate, else
    from its default.

    Args:
        target: The policy.
        on: Options of the episodes.
        cameras: Options of the cameras.
        runs: Options of the engine.
        recorded_gate: The gate. None without --gate.
    """
    env = suites.named(on.suite) if on.suite is not None else on.env
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
    if on.record_gate is not None and on.motion is None:
        task = replaced(task, motion=dict(AS_IS))
    values = {name: getattr(on, name) for name in ("replan", "latency", "handover", "solver_steps")}
    first, count = SEED, EPISODES
    if recorded_gate is not None:
        flags = {name: getattr(on, name) for name in ("env_options", "reset_options", "adapter", "noise")}
        task, values = recorded_gate.held(task, values, {"env": env, **flags})
        say_names(on.gate, task, [], recorded_gate.episodes if on.episodes is None else on.episodes)
        first, count = recorded_gate.first_seed, recorded_gate.episodes
    first = first if on.seed is None else on.seed
    seeds = range(first, first + (count if on.episodes is None else on.episodes))
    with SinewError.at("--replan", ValueError):
        replan = parse_replan(str(REPLAN if values["replan"] is None else values["replan"]))
    variant = variant_of(
        target, runs, cameras, replan=replan, latency=Latency(values["latency"] or "0"),
        handover=values["handover"] or HANDOVER, solver_steps=values["solver_steps"], stream=on.stream or "",
        edge_adapter=on.edge_adapter or "", batch=1 if on.batch == "auto" else on.batch,
    )  # fmt: skip
    return task, variant, seeds


def variant_of(target: str, runs: Runs, cameras: Cameras, **more: Any) -> Variant:
    """Build the variant of an evaluation from options.

    Args:
        target: The policy.
        runs: Options of the engine.
        cameras: Options of the cameras.
        **more: Further fields of the variant.
    """
    return Variant(
        target,
        dtype=runs.dtype,
        device=runs.device,
        engine=None if runs.engine == AUTO else runs.engine,
        ignore_recipe=runs.ignore_recipe,
        rename=cameras.rename,
        **cameras.allowed,
        **more,
    )


def elsewhere_for(task: Task, interpreter: Path | None = None, out: Path | None = None) -> Foreign | None:
    """Choose the Python interpreter that plays a task.

    A suite is played in this interpreter if its simulator has no interpreter of its own, and this one has its
    package.

    Args:
        task: The task.
        interpreter: Python executable that the user chose. None for none.
        out: Folder of the run, for the log of the policy server.

    Returns:
        The player in another interpreter. None to play in this interpreter.
    """
    simulator = "" if (suite := suites.find(task.env)) is None else suite[0].simulator
    if interpreter is None and not simulator:
        return None
    from sinew_eval.foreign import run as foreign

    if interpreter is None and not foreign.is_set_up(simulator) and suites.importable(task.env):
        progress.say(
            f"{task.env}: plays in this Python environment, which has the package of {simulator}. For the tested"
            f" versions, run `sinew eval --setup {simulator}`"
        )
        return None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    python = interpreter or foreign.interpreter(simulator)
    return foreign.Foreign(python, None if out is None else out / "serve.log")


def _fastest_batch(policy: Policy) -> tuple[int, str]:
    """Return the batch size that a server would choose for this policy on this machine, and the reason."""
    from sinew.serve.batching import Batcher

    batcher = Batcher(None)
    batcher.calibrate(policy)
    return batcher.limit, batcher.reason


@dataclass(frozen=True)
class _Run:
    """Everything that is played, and where it is played.

    Attributes:
        task: The task.
        variants: The variants.
        seeds: Seeds of the episodes.
        control_hz: Control steps per second.
        workers: Number of processes that play.
        elsewhere: Player in another interpreter. None to play in this interpreter.
        out: Folder of the run. None for none.
        viewer: Rerun file or viewer that receives every step. None for none.
        listen: HOST:PORT where other hosts can join. None for none.
        hosts: Address of a Ray cluster that plays. None for none.
    """

    task: Task
    variants: Sequence[Variant]
    seeds: Sequence[int]
    control_hz: float
    workers: int
    elsewhere: Foreign | None
    out: Path | None
    viewer: Path | str | None = None
    listen: str | None = None
    hosts: str | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        requested: Sequence[Variant],
        seeds: Sequence[int],
        interpreter: Path | None,
        workers: int | None,
        out: Path | None,
    ) -> _Run:
        """Build a run. Each variant gets the engine, device and chunk merging that will be used.

        Args:
            task: The task.
            requested: Variants as they were requested.
            seeds: Seeds of the episodes.
            interpreter: Python executable that the user chose. None for none.
            workers: Number of processes. None for the default.
            out: Folder of the run. None for none.
        """
        elsewhere = elsewhere_for(task, interpreter, out)
        rate = elsewhere.control_hz(task) if elsewhere is not None else control_hz(task, requested)
        said: set[str] = set()
        variants = [settled(variant, task, said) for variant in requested]
        return cls(task, variants, seeds, rate, workers or usual_workers(task.realtime), elsewhere, out)

    def check(self, workers: int | None) -> None:
        """Check the options before anything is played.

        Args:
            workers: Number of processes that the user requested. None for the default.

        Raises:
            SinewError: The options cannot be combined.
        """
        batched = any(variant.batch > 1 for variant in self.variants)
        if self.viewer and self.elsewhere:
            raise SinewError(
                "--rerun: this environment runs in another Python environment; start `sinew serve --rerun` and pass"
                " the server's address"
            )
        for flag, given in (("--batch", batched), ("--listen", self.listen), ("--hosts", self.hosts)):
            if given and (self.elsewhere or self.viewer or self.task.realtime):
                raise SinewError(
                    f"{flag}: expected simulated time in this Python environment; omit --rerun and --realtime, and use"
                    " no suite"
                )
        if self.hosts is not None:
            from sinew_eval.foreign.cluster import check

            check(self.hosts)
            if workers is None:
                raise SinewError(
                    "--hosts: also pass --shards N, the number of episodes that the cluster plays at once"
                )
        if self.out is not None:
            repetition.check_place(self.out, self.task, self.variants)

    def play(self) -> dict[str, Any]:
        """Play the episodes. Returns the report, with the episodes themselves under "episodes"."""
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TextColumn("{task.fields[rate]}"), TimeRemainingColumn()),
        )
        player: Any = None
        if self.viewer is not None:
            from sinew_eval.episodes.rerun import LoggedPlayer

            several = len(self.variants) > 1
            labels = {each: each.label(self.variants) for each in self.variants} if several else {}
            player = partial(LoggedPlayer, target=self.viewer, labels=labels)
        with terminal.bars(*columns) as shown:
            bars = EpisodeBars(shown, self.variants, len(self.seeds))
            try:
                results = campaign.run(
                    self.task, self.variants, self.seeds, workers=self.workers, out=self.out,
                    on_episode=bars.show, on_todo=bars.begin, elsewhere=self.elsewhere, player=player,
                    listen=self.listen, hosts=self.hosts,
                )  # fmt: skip
            except KeyboardInterrupt:
                goes_on = f"run the same command to continue from {self.out}"
                next_step = (
                    "the episodes are lost; pass --out FOLDER to store them" if self.out is None else goes_on
                )
                terminal.say(f"interrupted after {bars.played} episodes; {next_step}")
                raise
        report = document(
            self.task, self.control_hz, self.variants, results, workers=self.workers, command=terminal.typed(),
            simulator=None if self.elsewhere is None else self.elsewhere.versions,
        )  # fmt: skip
        for entry, episodes in zip(report["variants"], results, strict=True):
            if reaction_times := reactions(episodes):
                entry["reactions_ms"] = reaction_times
                summary = "; ".join(
                    f"{name} p50 {each['p50']}, p95 {each['p95']}" for name, each in reaction_times.items()
                )
                terminal.say(f"{entry['label']}: reaction times in ms: {summary}")
        return {**report, "episodes": results}

    def write(self, report: dict[str, Any], films: int) -> None:
        """Write the report, its page and its figures into the folder of the run, if there is one.

        Args:
            report: The report.
            films: Number of failures, and of successes, to film. Each filmed episode is played once more.
        """
        if self.out is None:
            return
        shown = _told(report)
        whole = {**shown, "outcomes": run_page.outcomes(report["episodes"])}
        (self.out / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
        if films and (self.task.realtime or any(variant.stream for variant in self.variants)):
            terminal.say(
                "no films were made: --films needs chunks in simulated time; omit --realtime and --stream"
            )
            films = 0
        made = []
        if films:
            from sinew_eval.evidence.films import shoot

            made = shoot(self.task, self.variants, report["episodes"], films, self.control_hz, self.elsewhere)
        (self.out / run_page.PAGE).write_text(run_page.write_page(whole, made))
        (self.out / "report.md").write_text(markdown(shown))
        for path in (*plots.write_plots(shown, self.out), self.out / run_page.PAGE):
            terminal.say(f"wrote {path}")


class EpisodeBars:
    """Progress bars: one for each variant, with its successes so far, their interval, and the speed.

    Args:
        progress: Rich's progress display.
        variants: The variants.
        episodes: Number of episodes of each variant.
    """

    def __init__(self, progress: Progress, variants: Sequence[Variant], episodes: int):
        self._progress, self._variants, self._episodes = progress, variants, episodes
        self._bars = {v: progress.add_task(v.label(variants), total=episodes, rate="") for v in variants}
        self._wins: dict[Variant, list[bool]] = {variant: [] for variant in variants}
        # The number of episodes that this process has played, and the time at which the process began, in seconds.
        self._fresh, self._begun = 0, 0.0

    @property
    def played(self) -> int:
        """Return the number of finished episodes, including those from the log."""
        return sum(map(len, self._wins.values()))

    def begin(self, todo: int) -> None:
        """Start to measure the speed. Episodes from the log do not count, because they took no time.

        Args:
            todo: Number of episodes that the log lacks.
        """
        if self._fresh:
            terminal.say(f"{self._fresh} of {self._fresh + todo} episodes are already in the log")
        self._fresh, self._begun = 0, time.monotonic()
        for bar in self._bars.values():
            self._progress.reset(bar, completed=int(self._progress.tasks[bar].completed))

    def show(self, variant: Variant, episode: Episode) -> None:
        """Add a finished episode to the progress bar of its variant."""
        self._fresh += 1
        rate = self._fresh / max(time.monotonic() - self._begun, 1e-3)
        wins = self._wins[variant]
        wins.append(episode.success)
        low, high = statistics.wilson(sum(wins), len(wins))
        label = variant.label(self._variants)
        text = f"{label}: {sum(wins)}/{len(wins)} [{100 * low:.0f}, {100 * high:.0f}] %"
        shown = text.replace("[", r"\[")
        speed = f"{rate:.1f}/s" if self._begun else ""
        self._progress.update(self._bars[variant], completed=len(wins), description=shown, rate=speed)
        if self._progress.disable and len(wins) == self._episodes:
            terminal.say(text)


def _told(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without its episodes, which are in the log."""
    return {name: value for name, value in report.items() if name != "episodes"}


def print_report(report: dict[str, Any]) -> None:
    """Print the conditions of a run, its tables, and the verdict of its gate."""
    console = terminal.console()
    console.print(conditions(report), markup=False)
    for title, columns, rows in tables(report):
        console.print(terminal.table(title, *columns, rows=[list(map(escape, row)) for row in rows]))
    for verdict in report.get("gate", {}).get("verdicts", []):
        console.print(f"gate, {verdict['label']}: {verdict['text']}", markup=False)


def _set_up(simulator: str) -> int:
    from sinew_eval.foreign import run as foreign

    python = foreign.set_up(simulator)
    terminal.console().print(f"interpreter  {python}", markup=False)
    terminal.emit({"simulator": simulator, "interpreter": str(python)})
    return 0


def _join(run: str, typed: TypedNames, workers: int | None, hosts: str | None) -> int:
    from sinew_eval.farm.shards import join

    if hosts is not None:
        raise SinewError(
            "--hosts: cannot be combined with --join, which plays on this machine; pass --hosts to the command that"
            " starts the run"
        )
    policies = tuple(
        each if Target.parse(each).kind != LOCAL else str(resolve(each)) for each in typed.policies
    )
    played = join(run, workers or usual_workers(), replaced(typed, policies=policies))
    terminal.console().print(f"played  {played} episodes on this machine", markup=False)
    terminal.emit({"joined": run, "episodes": played})
    return 0


def _repeat(
    path: Path,
    typed: TypedNames,
    interpreter: Path | None,
    workers: int | None,
    out: Path | None,
    films: int,
) -> int:
    """Play a recorded run again, and print what is equal and what differs. Returns the exit status."""
    recorded = repetition.read(path)
    task, variants = recorded.local(typed)
    say_names(path, task, variants, len(recorded.seeds))
    run = _Run.of(task, variants, recorded.seeds, interpreter, workers, out)
    report = run.play()
    report["repeat"] = comparison = repetition.compare(recorded, report, report["episodes"])
    run.write(report, films)
    console = terminal.console()
    rows = [list(map(escape, row)) for row in repetition.rows(comparison)]
    console.print(terminal.table(None, *repetition.COLUMNS, rows=rows))
    for text in repetition.sentences(comparison):
        console.print(text, markup=False)
    terminal.emit(_told(report))
    return 0 if comparison["passed"] else status.EXIT_ERROR

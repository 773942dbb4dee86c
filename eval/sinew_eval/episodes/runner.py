"""Play one episode of an environment with a policy, a replan rule, a latency and a chunk merging.

With simulated latency, the arguments determine the episode. The seed determines the environment. (noise, seed, k)
determines the delay and the noise of the k-th chunk for every variant. Therefore variants are paired: at the same
seed they get the same scene and the same random numbers.

Commands repeat bit for bit on the same machine with the same engine, threads and batch. Other machines round
differently, so episodes are compared by their outcomes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew.core import SinewError, machine
from sinew.stream import Session, StreamSettings
from sinew_client.control import (
    Adapter,
    Command,
    CommandListener,
    Loop,
    Pace,
    SimulatedPace,
    Stream,
    StreamController,
)
from sinew_client.control.defaults import HANDOVER, REPLAN
from sinew_client.control.reaction import LOOPS, histogram
from sinew_client.control.report import percentiles
from sinew_client.control.run import Run
from sinew_client.control.settings import LARGEST_CHUNK
from sinew_client.control.windows import OUT_OF_NODES
from sinew_client.untrusted import named, shown

from sinew_eval.episodes.policies import EvalPolicy, InProcess, ServerPolicy
from sinew_eval.episodes.robot import SimulatedRobot, StreamedRobot
from sinew_eval.episodes.settings import Latency, rows_between
from sinew_eval.episodes.sources import Measured, Simulated, SimulatedLink, StreamCosts, chunk_seed, way

if TYPE_CHECKING:
    import gymnasium
    from sinew.policy import Policy

    from sinew_eval.episodes.adapters import EnvAdapter

# Maximum age of a frame in seconds. It is so large that no simulated frame is too old to act on.
NEVER_S = 1e9

# Called with the control step, the observation, and True if a chunk was requested in this step.
Watcher = Callable[[int, dict[str, Any], bool], None]


@dataclass(frozen=True, slots=True)
class Episode:
    """The record of one episode.

    Attributes:
        seed: Seed of the reset.
        task: Name of the task.
        success: True if it succeeded.
        steps: Number of control steps until the end.
        chunks: Number of chunks that were received.
        executed: Number of control steps with an action.
        held: Number of control steps after the first chunk that had no action.
        misses: Number of chunks that came after the remaining actions had run out.
        delays: For each chunk, the number of control steps from its request to its arrival.
        latency_ms: Time of each inference, on the clock.
        chunk_size: Number of actions in a chunk.
        late_ticks: Number of control steps that began late.
        wall_s: Duration in seconds.
        seam: Largest change of a command between the last action of a chunk and the first action of the next chunk, in
            units of the action.
        jerk: Root mean square of the third difference of the commands (a measure of jerk), in units of the action.
        reactions_ms: For streams: reaction times, by loop.
        faults: Answers that could not be executed, by kind.
        reasons: Number of control steps in which the robot held, by reason.
        digest: Digest of all commands, bit for bit (:func:`digest_of`); "" for a stream.
        peak_bytes: Largest memory of the policy's process until the end of the episode, with the simulator if it is
            the same process; 0 if a server does not state it.
        clipped: Number of commands that a limit changed.
        ages: Number of executed actions, by their age (control steps since the frame).
        trial: For a trial on a robot (:mod:`sinew_eval.trials`): its number and attempt, such as "007-2".
        prompt: For a trial: the instruction.
        judge: For a trial: the origin of its outcome ("key", "file", "robot", "time").
        note: For a trial: the judge's note.
        counted: False for a discarded trial.
    """

    seed: int
    task: str
    success: bool
    steps: int
    chunks: int
    executed: int
    held: int
    misses: int
    delays: list[int]
    latency_ms: list[float]
    chunk_size: int = 0
    late_ticks: int = 0
    wall_s: float = 0.0
    seam: float = 0.0
    jerk: float = 0.0
    reactions_ms: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    peak_bytes: int = 0
    clipped: int = 0
    ages: dict[str, int] = field(default_factory=dict)
    trial: str = ""
    prompt: str = ""
    judge: str = ""
    note: str = ""
    counted: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the record, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Episode:
        """Build an episode from a record.

        Args:
            values: The record.

        Returns:
            The episode.

        Raises:
            SinewError: A field is unknown, missing, or has another type.
        """
        types = {field.name: str(field.type) for field in fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise SinewError(
                    f"episode: expected fields of this version of Sinew, got {named(name)}; update Sinew"
                )
            if not _FITS[types[name]](value):
                raise SinewError(f"episode.{name}: expected {types[name]}, got {shown(value)}")
        try:
            return cls(**values)
        # A missing field raises TypeError.
        except TypeError as error:
            raise SinewError(f"episode: {error}") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


# Key: the annotation of a field of Episode. Value: a test whether a value has that type.
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": _is_whole,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "float": _is_number,
    "list[int]": lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    "list[float]": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_is_whole, value.values())),
    "dict[str, list[float]]": lambda value: (
        isinstance(value, dict) and all(map(_FITS["list[float]"], value.values()))
    ),
}


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of an episode: the part of a variant that the runner needs, and the settings that all episodes
    share.

    Attributes:
        replan: Rule for the next request, see :class:`sinew_eval.episodes.settings.Variant`.
        latency: Simulated delay from request to chunk.
        handover: Chunk merging.
        reset_options: Options of the environment's reset.
        noise: Number that enters every noise seed.
        realtime: True to use the wall clock and the measured latency.
        motion: Reference of the actions, see ``sinew_client.control.Settings``. None to use the policy's own
            statement.
        future: True to send the state that the robot will have when the answer arrives.
        edge_adapter: File with a small network that refines the newest chunk in every control step
            (docs/edge-and-cloud.md). "" if there is none.
        envelope: Filter, speed and limits of ``sinew_client.control.Settings``.
    """

    replan: int | str = REPLAN
    latency: Latency = field(default_factory=Latency)
    handover: str = HANDOVER
    reset_options: dict[str, Any] | None = None
    noise: int = 0
    realtime: bool = False
    motion: Mapping[str, Any] | None = None
    future: bool = False
    edge_adapter: str = ""
    envelope: Mapping[str, Any] = field(default_factory=dict)


def run_episode(
    env: gymnasium.Env,
    adapter: EnvAdapter,
    policy: EvalPolicy,
    conduct: EpisodeSettings,
    seed: int,
    watch: Watcher | None = None,
) -> Episode:
    """Play one episode with the robot's own control loop.

    Args:
        env: The environment.
        adapter: Its adapter.
        policy: The policy.
        conduct: Settings of the episode.
        seed: Seed of the episode.
        watch: Called before every control step.

    Returns:
        The record of the episode.
    """
    begun = time.perf_counter()
    robot = SimulatedRobot(env, adapter, 1, seed, options=conduct.reset_options)
    task = adapter.task(robot.info)
    policy.start(env)
    hz = adapter.control_hz
    pace: Pace
    source: Measured | Simulated
    if conduct.realtime:
        pace, source = StepByStep(1.0 / hz), Measured(policy, conduct.noise, seed)
    else:
        pace = SimulatedPace(hz)
        source = Simulated(policy, conduct.noise, seed, conduct.latency, hz)
    edge = Adapter.read(conduct.edge_adapter) if conduct.edge_adapter else None
    tally = Tally()
    driving = Run.open(
        _description(policy),
        robot,
        settings_of(policy, conduct),
        prompt=None,
        source=source,
        edge=edge,
        pace=pace,
    )
    with driving:
        loop = driving.loop
        loop.controller.listeners.append(tally.hear)
        if watch is not None:
            CommandListener(
                lambda command: watch(command.step, robot.observe(), tally.last_request == command.step)
            ).attach(loop)
        report = driving.run()
    seam, jerk = smoothness(robot.actions, tally.seams)
    return Episode(
        seed=seed,
        task=task,
        success=bool(robot.successes),
        steps=robot.steps,
        chunks=len(tally.delays),
        executed=report.executed,
        held=tally.held,
        misses=tally.misses,
        delays=tally.delays,
        latency_ms=[round(value, 3) for value in source.latencies],
        chunk_size=policy.chunk_size,
        late_ticks=report.late + report.skipped,
        wall_s=round(time.perf_counter() - begun, 4),
        seam=round(seam, 5),
        jerk=round(jerk, 5),
        faults=dict(report.faults["kinds"]),
        reasons=report.held,
        digest=digest_of(robot.actions),
        peak_bytes=peak_of(policy),
        clipped=report.clipped_commands,
        ages=ages_of(loop),
    )


def peak_of(policy: EvalPolicy) -> int:
    """Return the largest memory of the process in which the policy computes, in bytes. 0 if a server does not state
    it.
    """
    if isinstance(policy, ServerPolicy):
        return int(policy.client.health().get("peak_bytes", 0))
    return machine.resident_bytes()["peak"] if isinstance(policy, InProcess) else 0


def digest_of(actions: Sequence[Any]) -> str:
    """Return a digest (a short hash) of all actions of an episode. It is equal only if every number of every action is
    equal.

    Args:
        actions: Actions that the environment executed.

    Returns:
        16 hexadecimal digits of the SHA-256 over the actions as little-endian float64.
    """
    whole = b"".join(np.asarray(action, "<f8").tobytes() for action in actions)
    return hashlib.sha256(whole).hexdigest()[:16]


def ages_of(loop: Loop) -> dict[str, int]:
    """Count the executed actions by their age. The key is the number of control steps since the frame (as text, for
    JSON), and the value is the number of actions.
    """
    return {str(age): count for age, count in sorted(loop.controller.ages.items())}


def _description(policy: EvalPolicy) -> dict[str, Any]:
    """Return a policy's description. A foreign server may state only its chunk size."""
    own = {"motion": policy.motion, "chunk_size": policy.chunk_size, "committed_rows": policy.committed_rows}
    return {**policy.served, **own}


def settings_of(policy: EvalPolicy, conduct: EpisodeSettings) -> dict[str, Any]:
    """Return the settings of the robot's controller that an evaluation chooses for this policy and these settings of
    the episode.
    """
    replan = conduct.replan
    if isinstance(replan, int):
        replan = str(rows_between(replan, policy.chunk_size))
    return {
        "handover": conduct.handover,
        "replan": replan,
        "motion": conduct.motion,
        "future": conduct.future,
        "stale": NEVER_S,
        **conduct.envelope,
    }


def run_stream_episode(
    env: gymnasium.Env,
    adapter: EnvAdapter,
    policy: Policy,
    conduct: EpisodeSettings,
    seed: int,
    costs: StreamCosts,
) -> Episode:
    """Play one episode with a stream. The conduct's latency delays each action window additionally.

    An environment may state when something happened: ``info["stimuli"]`` maps "image" and "sensor" to seconds or
    None. The episode then contains the reaction times.

    Args:
        env: The environment.
        adapter: Its adapter.
        policy: The policy, which is loaded in this process.
        conduct: Settings of the episode.
        seed: Seed of the episode.
        costs: Simulated times of the stream's two loops.

    Returns:
        The record of the episode.
    """
    begun = time.perf_counter()
    robot = StreamedRobot(env, adapter, 1, seed, options=conduct.reset_options)
    task, hz = adapter.task(robot.info), adapter.control_hz
    pace = SimulatedPace(hz)
    settings = StreamSettings(hz, costs.guidance, seed=chunk_seed(conduct.noise, seed, 0) >> 2)
    session = Session(policy, settings, robot.task, clock=lambda: 0.0)
    link = SimulatedLink(session, costs, pace.now, way(conduct.latency))
    chosen = {"stale": NEVER_S, "fusion": "latest_only", "chunk_size": LARGEST_CHUNK}
    described = policy.metadata()["policy"]
    with Run.open(
        described, robot, chosen, prompt=robot.task or None, source=Stream(link), pace=pace
    ) as driving:
        report, loop = driving.run(), driving.loop
    controller = loop.controller
    assert isinstance(controller, StreamController)
    reactions = {
        name: [round(1e3 * each, 3) for each in controller.reactions.of(name, [at])]
        for name, at in robot.info.get("stimuli", {}).items()
        if at is not None
    }
    return Episode(
        seed=seed,
        task=task,
        success=bool(robot.successes),
        steps=robot.steps,
        chunks=report.chunks,
        executed=report.executed,
        held=report.held.get(OUT_OF_NODES, 0),
        misses=controller.misses,
        delays=[],
        latency_ms=[],
        chunk_size=policy.spec.chunk_size,
        wall_s=round(time.perf_counter() - begun, 4),
        reactions_ms=reactions,
        faults=dict(report.faults["kinds"]),
        reasons=report.held,
        ages=ages_of(loop),
    )


class StepByStep(Pace):
    """Clock of a simulation that waits between its steps. Each tick is the next step, however late it is."""

    def next(self) -> int:
        super().next()
        return self.ticks - 1


class Tally:
    """Counts events of an episode. It is a listener of the episode's controller.

    Attributes:
        last_request: Control step of the newest request.
        held: Control steps after the first answer without an action to execute.
        misses: Chunks that arrived after the remaining actions had run out.
        delays: Control steps from request to answer, for each answer.
        seams: The control steps in which another chunk began.
    """

    def __init__(self) -> None:
        self.last_request = -1
        self.held = self.misses = 0
        self.delays: list[int] = []
        self.seams: list[int] = []
        # _starved is True if there was a step without an action since the request.
        self._waiting = self._starved = False

    def hear(self, event: str, values: dict[str, Any]) -> None:
        if event == "ask":
            self.last_request, self._waiting, self._starved = values["step"], True, False
        elif event in ("arrived", "bad_chunk") and self._waiting:
            self._waiting = False
            self.delays.append(values["step"] - self.last_request)
            # The first chunk has no deadline, because no earlier actions can run out.
            self.misses += self._starved and len(self.delays) > 1
        elif event == "command":
            command: Command = values["command"]
            if command.row is None:
                self.held += bool(self.delays)
                self._starved = True
            elif command.seam:
                self.seams.append(command.step)


def smoothness(actions: Sequence[Any], seams: Sequence[int]) -> tuple[float, float]:
    """Measure how smooth the actions of an episode are.

    Args:
        actions: The actions.
        seams: Indices of the actions with which another chunk began.

    Returns:
        The largest change of the action where another chunk begins (a seam), and the root mean square of the actions'
        third difference, both in units of the action.
    """
    rows = [np.atleast_1d(np.asarray(action, np.float64)) for action in actions]
    jumps = [float(np.abs(rows[k] - rows[k - 1]).max()) for k in seams if 0 < k < len(rows)]
    if len(rows) < 4:
        return max(jumps, default=0.0), 0.0
    return max(jumps, default=0.0), float(np.sqrt(np.mean(np.diff(np.stack(rows), 3, axis=0) ** 2)))


def reactions(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Summarise the reaction times of streams.

    Args:
        episodes: Episodes of one variant.

    Returns:
        For each loop of the stream ("image", "sensor"): p50, p95, p99 and maximum of its reaction times in
        milliseconds, their count, and a histogram.
    """
    found: dict[str, Any] = {}
    for name in LOOPS:
        values = [each for episode in episodes for each in episode.reactions_ms.get(name, ())]
        if values:
            found[name] = {**percentiles(values), "count": len(values), "histogram": histogram(values)}
    return found

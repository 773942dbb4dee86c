"""One episode: an environment, a policy, a replan interval, a delay, a way to take over late chunks.

The outcome is a function of the arguments alone (with simulated latency): the environment is determined by
its seed, the delay and the noise of the k-th chunk by (noise, seed, k), whatever the variant. So variants are
paired: at the same seed they meet the same world and the same luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.control import Adapter, Command, Refinement, Settings, choose
from sinew_client.control.defaults import HANDOVER, REPLAN

from sinew.eval.channel import Measured, Simulated
from sinew.eval.policies import EvalPolicy
from sinew.eval.settings import Latency, rows_between

if TYPE_CHECKING:
    import gymnasium

    from sinew.eval.adapters import EnvAdapter

Watcher = Callable[[int, dict[str, Any], bool], None]  # control step, observation, a chunk has been asked for


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened. ``steps``: control steps until the end. ``held``: of these, steps after the first chunk
    in which there was nothing to execute. ``misses``: chunks that came after the actions at hand had run out.
    ``delays``: control steps from request to chunk, ``latency_ms``: of each inference, on the clock.
    ``seam``: the largest change of a command from the last row of a chunk to the first of the next. ``jerk``: the
    root mean square of the commands' third difference. Both in units of the action, over its numbers.
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
    reactions_ms: dict[str, list[float]] = field(default_factory=dict)  # of streams, by loop
    faults: dict[str, int] = field(default_factory=dict)  # answers that could not be executed, by kind

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Conduct:
    """How to play: the part of a variant that the runner needs, and what all episodes share."""

    replan: int | str = REPLAN  # see Variant
    latency: Latency = field(default_factory=Latency)
    handover: str = HANDOVER
    reset_options: dict[str, Any] | None = None
    noise: int = 0
    realtime: bool = False
    motion: Mapping[str, Any] | None = (
        None  # see sinew_client.control.Settings; None: as the policy states it
    )
    future: bool = False
    edge_adapter: str = ""  # a file: refines the newest chunk in every control step (docs/fleet.md)


def chunk_seed(noise: int, seed: int, replan: int) -> int:
    """Seed of the noise of one chunk; 63 bits, as every wire can carry."""
    words = np.random.SeedSequence([noise, seed, replan]).generate_state(2, np.uint32)
    return int(words[0]) << 31 | int(words[1]) >> 1


def run_episode(
    env: gymnasium.Env,
    adapter: EnvAdapter,
    policy: EvalPolicy,
    conduct: Conduct,
    seed: int,
    watch: Watcher | None = None,
) -> Episode:
    """Play one episode. ``watch`` sees every control step before it is taken."""
    begun = time.perf_counter()
    raw, info = env.reset(seed=seed, options=conduct.reset_options)
    policy.start(env)
    channel: Simulated | Measured = (
        Measured(policy, adapter.control_hz) if conduct.realtime else Simulated(policy)
    )
    replan = conduct.replan
    if isinstance(replan, int):
        replan = str(rows_between(replan, policy.chunk_size))
    edge_adapter = Adapter.read(conduct.edge_adapter) if conduct.edge_adapter else None
    chosen = choose(
        conduct.handover, conduct.motion, {"motion": policy.motion}, refined=edge_adapter is not None
    )
    settings = Settings(
        adapter.control_hz,
        chosen.handover,
        replan,
        motion=chosen.motion,
        future=conduct.future,
        committed_rows=policy.committed_rows,
        refine=0 if edge_adapter is None else edge_adapter.form.max_age,
        chunk_size=policy.chunk_size,
    )
    controller = settings.controller(0)
    edge = None if edge_adapter is None else Refinement(edge_adapter, controller)
    player = controller.player
    task = adapter.task(info)
    last: Any = None
    observation: dict[str, Any] = {}
    state: Any = None
    step = asked = executed = held = misses = 0
    starved = False  # since the request under way there has been a step without an action
    delays: list[int] = []
    smoothness = _Smoothness()

    def poll() -> None:
        nonlocal misses
        if player.request is not None and (actions := channel.poll(step)) is not None:
            delays.append(step - player.request.step)
            if edge is not None:
                edge.arrived(actions)
            controller.arrived(step, actions)
            misses += starved and len(delays) > 1  # the first chunk has no deadline: nothing runs out

    try:
        while True:
            # An answer that arrives now frees the policy for a question now, with this observation.
            poll()
            looks = watch is not None or player.motion.needs_state or controller.refines(step)
            if (asks := controller.wants_chunk(step)) or looks:
                observation = adapter.observation(raw)  # drawing frames may take longer than everything else
                state = observation.get("state")
            if asks:
                rng = np.random.default_rng([conduct.noise, seed, asked, 1])
                age = round(float(info.get("frame_age", 0.0)) * adapter.control_hz)
                delay = conduct.latency.steps(rng, adapter.control_hz)
                request = controller.ask(step, step - age, state)
                if edge is not None:
                    edge.asked(observation)
                noise_seed = chunk_seed(conduct.noise, seed, asked)
                channel.submit({**observation, **request.fields}, noise_seed, step, delay)
                asked, starved = asked + 1, False
                poll()  # no latency at all
            if edge is not None and controller.refines(step):
                edge.refine(step, observation)
            command = controller.command(step, state)
            if command.row is None:
                action = adapter.hold(last)
                held += bool(delays)
                starved = True
            else:
                action = adapter.action(command.row)
                executed += 1
            smoothness.add(action, command)
            if watch is not None:
                watch(step, observation, asks)
            raw, reward, terminated, truncated, info = env.step(action)
            last = action
            step += 1
            channel.tick()
            if terminated or truncated or step >= adapter.max_steps:
                break
    finally:
        channel.close()
    return Episode(
        seed=seed,
        task=task,
        success=adapter.success(info, terminated, float(reward)),
        steps=step,
        chunks=len(delays),
        executed=executed,
        held=held,
        misses=misses,
        delays=delays,
        latency_ms=[round(value, 3) for value in channel.latencies],
        chunk_size=policy.chunk_size,
        late_ticks=channel.late_ticks,
        wall_s=round(time.perf_counter() - begun, 4),
        seam=round(smoothness.seam, 5),
        jerk=round(smoothness.jerk, 5),
        faults=dict(controller.faults.counts),
    )


class _Smoothness:
    """How far commands jump at the seams of chunks, and how unsteady they are everywhere."""

    def __init__(self) -> None:
        self.seam = 0.0
        self._actions: list[np.ndarray] = []

    def add(self, action: Any, command: Command) -> None:
        action = np.atleast_1d(np.asarray(action, np.float64))
        if command.seam and self._actions:
            self.seam = max(self.seam, float(np.abs(action - self._actions[-1]).max()))
        self._actions.append(action)

    @property
    def jerk(self) -> float:
        if len(self._actions) < 4:
            return 0.0
        return float(np.sqrt(np.mean(np.diff(np.stack(self._actions), 3, axis=0) ** 2)))

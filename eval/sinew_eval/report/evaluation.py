"""``sinew.evaluate``: play episodes of a policy in an environment, from Python."""

from __future__ import annotations

import html
import importlib.util
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from sinew.convert.sources import resolve
from sinew.core import SinewError, statistics
from sinew_client.control.defaults import HANDOVER, REPLAN
from sinew_client.policy import Policy
from sinew_client.target import EXPERT, LOCAL, Target

from sinew_eval import suites
from sinew_eval.episodes import campaign
from sinew_eval.episodes.adapters import Direct, EnvAdapter, Mapped, make_env, mapping_of, named_adapter
from sinew_eval.episodes.fitting import check_variants
from sinew_eval.episodes.lockstep import WorkerSlot, play_together
from sinew_eval.episodes.player import EpisodePlayer, groups, one_thread
from sinew_eval.episodes.policies import EpisodePolicy, EvalPolicy, chosen
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Latency, Task, Variant
from sinew_eval.episodes.variants import default_env
from sinew_eval.episodes.vector import VectorParts
from sinew_eval.report import stats

if TYPE_CHECKING:
    Env = gymnasium.Env | gymnasium.vector.VectorEnv

Adapter = str | Mapping[str, Any] | Callable[[gymnasium.Env], EnvAdapter] | None


WIDTH = 160  # width of a bar in a notebook, in pixels


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of :func:`evaluate`.

    Attributes:
        policy: Name of the policy.
        env: Name of the environment.
        control_hz: Control steps per second.
        episodes: One entry for each seed, in their order.
        batch: Episodes that were played at once.
        one_by_one: Why they were still answered one after the other; "" if they were not.
    """

    policy: str
    env: str
    control_hz: float
    episodes: tuple[Episode, ...]
    batch: int = 1
    one_by_one: str = ""

    @property
    def successes(self) -> int:
        return sum(episode.success for episode in self.episodes)

    @property
    def success(self) -> float:
        """Return the share of episodes that succeeded."""
        return self.successes / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % score interval of the success (Wilson 1927)."""
        return statistics.wilson(self.successes, len(self.episodes))

    @property
    def failed_seeds(self) -> list[int]:
        return [episode.seed for episode in self.episodes if not episode.success]

    def by_task(self) -> dict[str, Evaluation]:
        """Return the episodes of each task, in alphabetical order."""
        found: dict[str, list[Episode]] = defaultdict(list)
        for episode in self.episodes:
            found[episode.task].append(episode)
        return {task: replace(self, episodes=tuple(found[task])) for task in sorted(found)}

    def compare(self, other: Evaluation) -> stats.McNemar:
        """Compare two evaluations by McNemar's exact test, over the seeds that both have.

        Args:
            other: The other evaluation.

        Returns:
            The test's result.
        """
        first, second = ({e.seed: e.success for e in each.episodes} for each in (self, other))
        return stats.mcnemar(first, second)

    def rows(self) -> list[dict[str, Any]]:
        """Return the episodes ready for JSON, a data frame or a table."""
        return [episode.to_dict() for episode in self.episodes]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole result, ready for JSON."""
        facts = {"policy": self.policy, "env": self.env, "control_hz": self.control_hz, "batch": self.batch}
        return {**facts, **stats.success([e.success for e in self.episodes]), "rows": self.rows()}

    def __repr__(self) -> str:
        return f"<Evaluation {self}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the success of each task, its 95 % interval as a plot, and the mean number of
        steps.
        """
        tasks = self.by_task()
        parts = {"all": self, **(tasks if len(tasks) > 1 else {})}
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{each.successes}/{len(each.episodes)}</td><td>{_bar(each)}</td>"
            f"<td>{100 * each.interval[0]:.1f} to {100 * each.interval[1]:.1f} %</td><td>{_mean_steps(each)}</td></tr>"
            for name, each in parts.items()
        )
        head = "".join(
            f"<th>{name}</th>"
            for name in ("task", "success", "0 to 100 %", "95 % interval", "steps to success")
        )
        title = html.escape(f"{self.policy} on {self.env}")
        return f"<table><caption>{title}</caption><tr>{head}</tr>{rows}</table>"

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.policy} on {self.env}: {self.successes}/{len(self.episodes)} ({100 * self.success:.1f} %),"
            f" 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
        )


def _bar(result: Evaluation) -> str:
    """Draw the success as a bar and its interval as a line. Returns an inline SVG."""
    low, high = (WIDTH * each for each in result.interval)
    return (
        f'<svg role="img" width="{WIDTH}" height="16" viewBox="0 0 {WIDTH} 16"><title>{html.escape(str(result))}'
        f'</title><rect width="{WIDTH}" height="16" fill="#8883"/><rect width="{WIDTH * result.success:.1f}"'
        f' height="16" fill="#4a90d9"/><path d="M{low:.1f} 8H{high:.1f}M{low:.1f} 4V12M{high:.1f} 4V12"'
        ' stroke="currentColor" stroke-width="2" fill="none"/></svg>'
    )


def _mean_steps(result: Evaluation) -> str:
    steps = [episode.steps for episode in result.episodes if episode.success]
    return f"{sum(steps) / len(steps):.1f}" if steps else "-"


def evaluate(
    policy: str | os.PathLike[str] | Policy,
    env: str | Env | Callable[[], gymnasium.Env] | None = None,
    *,
    episodes: int | Sequence[int] = 100,
    seed: int = 5000,
    adapter: Adapter = None,
    replan: int | str = REPLAN,
    latency: int | str = 0,
    handover: str = HANDOVER,
    motion: Mapping[str, Any] | None = None,
    solver_steps: int | None = None,
    noise: int = 0,
    env_options: dict[str, Any] | None = None,
    reset_options: dict[str, Any] | None = None,
    batch: int = 1,
    workers: int = 1,
    out: str | os.PathLike[str] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """Play a policy in closed loop, with the robot's own controller.

    The environment is reset with the episode's seed, and the noise of its k-th chunk follows from (noise, seed, k).
    So the same call gives the same outcomes, and two policies over the same seeds are paired
    (``Evaluation.compare``).

    Args:
        policy: A bundle, a checkpoint, a hub name, the address of a server or ``expert``; or an open policy of
            ``sinew.load`` or ``sinew.connect``, or your own object with ``spec``, ``infer``, ``reset`` and ``close``
            (:class:`sinew_client.Policy`). ``infer`` returns ``sinew_client.ActionChunk(actions)``, numbers of
            ``[rows, action.dim]`` in robot units. An open policy stays open.
        env: A gymnasium id, which may be a suite's such as ``gym_pusht/PushT-v0`` if its package is installed; an
            environment; a vectorised one, whose parts request actions in one batch; or a function that makes an
            environment, called ``batch`` times. None takes the built-in task that fits a policy by name.
        episodes: Number of episodes, one per seed from ``seed`` on; or the seeds.
        seed: First seed.
        adapter: Meaning of the environment's observation: a mapping, its .json file, or a class as
            ``package.module:Class``, as the page "Evaluate a policy" explains. None for an environment whose
            observation is images, state and prompt.
        replan: Number of actions executed per inference, or another rule, as ``sinew eval --replan``.
        latency: Simulated time from request to chunk, as ``sinew eval --latency``.
        handover: Chunk merging, as ``sinew eval --handover``.
        motion: Reference of the actions, as ``sinew eval --motion``; None takes the policy's.
        solver_steps: Number of solver steps; None for the bundle's.
        noise: A number that enters every noise seed.
        env_options: Arguments of an id's constructor.
        reset_options: Options of every reset.
        batch: Episodes that are played in lockstep, so that one inference answers them all.
        workers: Processes that play (:mod:`sinew_eval.farm`). Needs a policy and an environment by name.
        out: A folder for the log of episodes, from which a killed run continues. Needs a policy and an environment by
            name.
        on_episode: Called for each episode that has ended.

    Returns:
        The evaluation.

    Raises:
        SinewError: An argument does not fit. Errors of an episode are raised too.

    Example:
        >>> result = sinew.evaluate("blocks", episodes=20)
        >>> print(result)
    """
    try:
        return _evaluate(
            policy, env, episodes, seed, adapter, replan, latency, handover, motion, solver_steps, noise,
            env_options, reset_options, batch, workers, out, on_episode,
        )  # fmt: skip
    except SinewError as error:
        words = _in_python(str(error))
        # Keep subclasses of SinewError as they are, because they have additional fields.
        if words != str(error) and type(error) is SinewError:
            raise SinewError(words) from error
        raise


FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])")


def _in_python(text: str) -> str:
    """Replace options of ``sinew eval`` in a message by parameters of :func:`evaluate`, except in backticks."""
    parameters = inspect.signature(evaluate).parameters

    def parameter(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in parameters else flag[0]

    parts = text.split("`")
    return "`".join(FLAG.sub(parameter, part) if not index % 2 else part for index, part in enumerate(parts))


def _evaluate(
    policy: str | os.PathLike[str] | Policy,
    env: str | Env | Callable[[], gymnasium.Env] | None,
    episodes: int | Sequence[int],
    seed: int,
    adapter: Adapter,
    replan: int | str,
    latency: int | str,
    handover: str,
    motion: Mapping[str, Any] | None,
    solver_steps: int | None,
    noise: int,
    env_options: dict[str, Any] | None,
    reset_options: dict[str, Any] | None,
    batch: int,
    workers: int,
    out: str | os.PathLike[str] | None,
    on_episode: Callable[[Episode], None] | None,
) -> Evaluation:
    seeds = list(range(seed, seed + episodes)) if isinstance(episodes, int) else list(episodes)
    if not seeds or len(set(seeds)) < len(seeds):
        raise SinewError(f"episodes: expected a number from 1 on, or different seeds, got {episodes!r}")
    if isinstance(env, str) and suites.find(env) is not None:
        module, slash, _ = env.partition("/")
        if not slash or importlib.util.find_spec(module) is None:
            package = f"the package {module}" if slash else "a simulator of its own"
            raise SinewError(
                f"env: {env} needs {package}, which this Python environment lacks; install it, pass an environment"
                f" object, or run `sinew eval --env {env}`, which plays suites in their own Python environments"
            )
    named = isinstance(policy, (str, os.PathLike))
    target = _target(policy) if named else type(policy).__name__
    if env is None:
        if not named:
            raise SinewError(
                "env: expected an environment together with an open policy, got none; pass `env`"
            )
        env = default_env(target)
    label = env if isinstance(env, str) else _name(env)
    task = Task(
        env=label,
        env_options=env_options,
        reset_options=reset_options,
        adapter=adapter if isinstance(adapter, str) else "",
        noise=noise,
        motion=dict(motion) if motion is not None else None,
    )
    options = {"replan": replan, "latency": Latency(str(latency)), "handover": handover}
    variant = Variant(target, **options, solver_steps=solver_steps, batch=batch)  # type: ignore[arg-type]
    if named and Target.parse(target).kind == LOCAL:
        engine_choice = chosen(variant)
        variant = replace(variant, engine=engine_choice.engine, device=engine_choice.options.device)
    if named and isinstance(env, str) and (adapter is None or isinstance(adapter, str)):
        heard = None if on_episode is None else lambda _, episode: on_episode(episode)
        place = None if out is None else Path(out)
        hz = check_variants(task, [variant])
        played = campaign.run(task, [variant], seeds, workers=workers, out=place, on_episode=heard)[0]
        return Evaluation(target, label, hz, tuple(played), batch)
    if workers != 1 or out is not None:
        raise SinewError(
            "workers, out: pass the policy, the environment and the adapter by name, so that other processes can open"
            " them"
            f" and a log can identify them; got {target} and {label}"
        )
    if env_options is not None and not isinstance(env, str):
        raise SinewError(
            "env_options: expected a gymnasium id as env; otherwise pass these options to your environment's"
            " constructor"
        )
    open_policy = None if named else EpisodePolicy(_checked(policy), solver_steps)
    with one_thread([variant] if named else []):
        if isinstance(env, gymnasium.vector.VectorEnv):
            return _vectorised(task, variant, env, adapter, open_policy, seeds, on_episode)
        return _single(task, variant, env, adapter, open_policy, seeds, on_episode)


def _single(
    task: Task,
    variant: Variant,
    env: str | gymnasium.Env | Callable[[], gymnasium.Env],
    adapter: Adapter,
    policy: EpisodePolicy | None,
    seeds: Sequence[int],
    on_episode: Callable[[Episode], None] | None,
) -> Evaluation:
    if isinstance(env, gymnasium.Env) and variant.batch > 1:
        raise SinewError(
            f"batch {variant.batch}: expected a gymnasium id, a function that makes environments, or a vectorised one,"
            f" got {task.env}"
        )

    def make() -> tuple[gymnasium.Env, EnvAdapter]:
        if isinstance(env, str):
            made: Any
            made, own = make_env(env, "", task.env_options)
            if adapter is None:
                # A suite's simulator has its own adapter.
                return made, own
        else:
            made = env if isinstance(env, gymnasium.Env) else env()
        if not isinstance(made, gymnasium.Env):
            raise SinewError(
                f"env: expected a gymnasium.Env, or a function that makes one, got {type(made).__name__}"
            )
        return made, adapted(made, adapter)

    player = GivenPlayer(task, make, policy, keeps=isinstance(env, gymnasium.Env))
    found: list[Episode] = []
    try:
        for group in groups(variant, seeds):
            for episode in player.play_group(variant, group):
                found.append(episode)
                if on_episode is not None:
                    on_episode(episode)
        by_seed = {episode.seed: episode for episode in found}
        rows = tuple(by_seed[seed] for seed in seeds)
        return Evaluation(variant.target, task.env, player.adapter.control_hz, rows, variant.batch)
    finally:
        player.close()


def _vectorised(
    task: Task,
    variant: Variant,
    env: gymnasium.vector.VectorEnv,
    adapter: Adapter,
    policy: EpisodePolicy | None,
    seeds: Sequence[int],
    on_episode: Callable[[Episode], None] | None,
) -> Evaluation:
    if variant.batch not in (1, env.num_envs):
        raise SinewError(
            f"batch: expected {env.num_envs}, the number of the vectorised environment's parts, got {variant.batch}"
        )
    if variant.target == EXPERT:
        raise SinewError("env: expected a single environment for an expert, got a vectorised one")
    shared = VectorParts(env)
    parts = shared.parts()
    waiting = iter(parts)

    def make() -> tuple[gymnasium.Env, EnvAdapter]:
        part = next(waiting)
        return part, adapted(part, adapter)

    player = GivenPlayer(task, make, policy, keeps=True)
    try:
        open_policy = player.ready(variant)
        seats = [WorkerSlot(part, each) for part, each in player.beside(len(parts), open_policy)]
        rows = play_together(seats, open_policy, player.conduct(variant), seeds, shared, on_episode)
        hz = player.adapter.control_hz
        return Evaluation(variant.target, task.env, hz, tuple(rows), len(parts), open_policy.one_by_one)
    finally:
        player.close()


class GivenPlayer(EpisodePlayer):
    """A player with environments that the caller makes, and optionally with the caller's open policy.

    Args:
        task: The task.
        make: Makes an environment and its adapter.
        policy: The caller's policy. None to open the policy of the variant.
        keeps: True if the environments belong to the caller and stay open.
    """

    def __init__(
        self,
        task: Task,
        make: Callable[[], tuple[gymnasium.Env, EnvAdapter]],
        policy: EpisodePolicy | None,
        keeps: bool,
    ):
        self._given, self._keeps = policy, keeps
        super().__init__(task, make)

    def _open(self, variant: Variant) -> EvalPolicy:
        if self._given is None:
            return super()._open(variant)
        self._fits = bool(self._given.served["cameras"])
        if variant.batch > 1 and (why := self._given.one_by_one):
            raise SinewError(f"batch {variant.batch}: {why}")
        return self._given

    def close_policy(self) -> None:
        if self._given is None:
            super().close_policy()

    def close(self) -> None:
        if self._keeps:
            self.close_policy()
        else:
            super().close()


def adapted(env: gymnasium.Env, adapter: Adapter) -> EnvAdapter:
    """Return the adapter of an environment.

    Args:
        env: The environment.
        adapter: Name of an adapter, a mapping, a class, or None for an environment that returns Sinew's observations.

    Raises:
        SinewError: There is no such adapter.
    """
    if adapter is None:
        return Direct(env)
    if isinstance(adapter, str):
        return named_adapter(adapter, env)
    if isinstance(adapter, Mapping):
        with SinewError.at("adapter", TypeError):
            return Mapped(env, mapping_of(adapter))
    return adapter(env)


def _target(policy: Any) -> str:
    text = os.fspath(policy)
    return text if Target.parse(text).kind != LOCAL else str(resolve(text))


def _checked(policy: Any) -> Policy:
    lost = [name for name in ("spec", "infer", "reset", "close") if not hasattr(policy, name)]
    if lost:
        raise SinewError(
            "policy: expected a bundle, an address, or a policy with spec, infer, reset and close, got"
            f" {type(policy).__name__}, without {', '.join(lost)}"
        )
    found: Policy = policy
    return found


def _name(env: Any) -> str:
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    if not callable(env):
        raise SinewError(
            f"env: expected a gymnasium id, an environment, or a function that makes one, got {type(env).__name__}"
        )
    return getattr(env, "__name__", type(env).__name__)

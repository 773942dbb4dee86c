"""Show episodes in the terminal while they run, measure their times, and film the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import gymnasium
from PIL import Image
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from sinew.core import statistics

from sinew_eval.episodes.adapters import EnvAdapter
from sinew_eval.episodes.policies import ServerPolicy
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode
from sinew_eval.episodes.settings import Variant
from sinew_eval.evidence.animation import compose

RECENT = 5  # the live view lists this many newest episodes


Player = tuple[ServerPolicy, gymnasium.Env, EnvAdapter]


class ReportView:
    """Plays variants one after the other on one server.

    Args:
        console: Rich console for the output.
        policy: Connection to the server.
        env: The environment. It must render if an episode is filmed.
        adapter: Its adapter.
        also: Further players that play episodes at the same time, each with its own connection and environment.

    Attributes:
        stages: For each stage of the inference, its milliseconds in every request.
        frames: Frames of the film, for ``animation.write_gif``.
        pauses: Pauses of the film, for ``animation.write_gif``.
    """

    def __init__(
        self,
        console: Console,
        policy: ServerPolicy,
        env: gymnasium.Env,
        adapter: EnvAdapter,
        also: Sequence[Player] = (),
    ):
        self.console, self.env = console, env
        self.players: list[Player] = [(policy, env, adapter), *also]
        self.stages: dict[str, list[float]] = {}
        self.frames: list[Image.Image] = []
        self.pauses: dict[int, float] = {}

    def play(
        self, variants: Sequence[Variant], seeds: range, film: int = 0, look: int = 0
    ) -> list[list[Episode]]:
        """Play the episodes of each variant.

        Args:
            variants: The variants, one after the other.
            seeds: Seeds of each variant.
            film: Number of episodes of the first variant that are filmed. These need a single player.
            look: Number of episodes after which a variant ends if all or none of them succeeded. 0 for no early end.

        Returns:
            The episodes of each variant, in the order of their seeds.
        """
        results: list[list[Episode]] = []
        with (
            Live(console=self.console, transient=True, refresh_per_second=8) as live,
            ThreadPoolExecutor(len(self.players)) as pool,
        ):
            free: Queue[Player] = Queue()
            for player in self.players:
                free.put(player)
            for variant in variants:
                label = variant.label(variants) if len(variants) > 1 else "closed loop"
                episodes: list[Episode] = []

                def play(
                    seed: int, variant: Variant = variant, label: str = label, episodes: list = episodes
                ) -> Episode:
                    player = free.get()
                    try:
                        filmed = seed - seeds.start < film and not results
                        return self._episode(player, variant, seed, filmed, label, episodes, len(seeds), live)
                    finally:
                        free.put(player)

                for part in (seeds[:look], seeds[look:]):
                    episodes.extend(pool.map(play, part))
                    if look and len(episodes) == look and sum(each.success for each in episodes) in (0, look):
                        break
                results.append(episodes)
                if not self.console.is_terminal:
                    self.console.print(f"{label}: {_score(episodes)}", soft_wrap=True)
        return results

    def _episode(
        self,
        player: Player,
        variant: Variant,
        seed: int,
        filmed: bool,
        label: str,
        finished: Sequence[Episode],
        total: int,
        live: Live,
    ) -> Episode:
        policy, env, adapter = player
        conduct = EpisodeSettings(variant.replan, variant.latency, variant.handover)
        chunks, seen = 0, {}

        def watch(step: int, observation: dict[str, Any], requested: bool) -> None:
            nonlocal chunks, seen
            chunks += requested
            seen = observation
            if requested:
                self._time(policy)
            if filmed:
                self._film(observation, f"step {step}, chunk {chunks}")
            if step % 5 == 0:
                now = f"step {step:3d}, chunk {chunks:2d}: {observation['prompt']}"
                live.update(_picture(label, finished, total, now, self.stages))

        episode = run_episode(env, adapter, policy, conduct, seed, watch)
        if filmed:
            text = f"{'success' if episode.success else 'no success'} after {episode.steps} steps, {chunks} chunks"
            self._film(seen, text, episode.success)
            self.pauses[len(self.frames) - 1] = 1.2
        return episode

    def _film(self, observation: dict[str, Any], text: str, success: bool | None = None) -> None:
        scene: Any = self.env.render()
        self.frames.append(compose(scene, observation["images"], observation["prompt"], text, success))

    def _time(self, policy: ServerPolicy) -> None:
        chunk = policy.last
        assert chunk is not None
        timing = chunk.timing
        for name, value in (
            ("round trip", chunk.round_trip_ms),
            ("preprocess", timing.preprocess_ms),
            ("vision", timing.vision_ms),
            ("prefix", timing.prefix_ms),
            ("head", timing.head_ms),
            ("client, transport, queue", chunk.round_trip_ms - timing.total_ms),
        ):
            self.stages.setdefault(name, []).append(value)


def _score(episodes: Sequence[Episode]) -> str:
    wins = sum(e.success for e in episodes)
    low, high = statistics.wilson(wins, len(episodes))
    return f"{wins}/{len(episodes)} succeeded, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"


def _picture(
    label: str, finished: Sequence[Episode], total: int, now: str, stages: dict[str, list[float]]
) -> Group:
    recent = Table.grid(padding=(0, 2))
    for episode in finished[-RECENT:]:
        mark = Text("success", "green") if episode.success else Text("no success", "red")
        recent.add_row(f"seed {episode.seed}", episode.task, mark, f"{episode.steps} steps")
    trip = statistics.summarize(stages.get("round trip", []))
    latency = f"; round trip p50 {trip['p50']:.1f} ms, p95 {trip['p95']:.1f} ms" if trip else ""
    return Group(
        Text(label, "bold"),
        ProgressBar(total=total, completed=len(finished), width=60),
        Text(_score(finished) + latency),
        recent,
        Text(now, "dim"),
    )

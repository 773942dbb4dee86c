"""Films of episodes that were played, by playing them once more: the outcome of an episode follows from its seed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from sinew.eval.adapters import make_env
from sinew.eval.player import EpisodePlayer, one_thread
from sinew.eval.report.animation import compose
from sinew.eval.runner import Episode
from sinew.eval.settings import Task, Variant
from sinew.eval.watched import WatchedSteps

SIDE = 240  # pixels of the scene
FPS = 10  # pictures per second of the episode's own time, at most
PAUSE_S = 1.5  # at the end
QUALITY = 60
MOST_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class Film:
    """variant: index of it. episode: what was played now. same: it gave every command of the run's. webp, still: the
    film, and its last picture, as files."""

    variant: int
    episode: Episode
    same: bool
    webp: bytes
    still: bytes


def chosen(results: Sequence[Sequence[Episode]], count: int) -> list[int]:
    """Return the seeds to film: of up to ``count`` failures and as many successes of the first variant, those first
    about which variants disagree."""
    won = [{each.seed: each.success for each in episodes} for episodes in results]
    disputed = {seed for seed, success in won[0].items() if any(each[seed] != success for each in won[1:])}
    seeds = sorted(won[0], key=lambda seed: (seed not in disputed, seed))
    return [
        seed
        for outcome in (False, True)
        for seed in [seed for seed in seeds if won[0][seed] is outcome][:count]
    ]


def shoot(
    task: Task, variants: Sequence[Variant], results: Sequence[Sequence[Episode]], count: int
) -> list[Film]:
    """Play the chosen seeds of the first ``MOST_VARIANTS`` variants again, and film them."""
    seeds = chosen(results, count)
    films: list[Film] = []
    player = _FilmPlayer(task)
    try:
        with one_thread(variants):
            for index, variant in enumerate(variants[:MOST_VARIANTS]):
                before = {each.seed: each for each in results[index]}
                for seed in seeds:
                    player.pictures, player.label = [], variant.label(variants)
                    episode = player.play(variant, seed)
                    player.finish(episode)
                    webp, still = _files(player.pictures, player.every / player.adapter.control_hz)
                    same = (episode.success, episode.digest) == (before[seed].success, before[seed].digest)
                    films.append(Film(index, episode, same, webp, still))
    finally:
        player.close()
    return films


class _FilmPlayer(EpisodePlayer):
    """A player whose episodes leave pictures: the scene where the environment draws it, and what the policy saw."""

    def __init__(self, task: Task):
        super().__init__(task)
        modes = self.env.metadata.get("render_modes") or ()
        if "rgb_array" in modes and self.env.render_mode is None:
            self.env.close()
            self.env, self.adapter = make_env(
                task.env, task.adapter, task.env_options, render_mode="rgb_array"
            )
        self.draws = self.env.render_mode == "rgb_array"
        self.every = max(1, round(self.adapter.control_hz / FPS))
        self.env = WatchedSteps(self.env, self.show)
        self.pictures: list[Image.Image] = []
        self.label = ""
        self._seen: Mapping[str, Any] = {}

    def show(self, raw: Any, _action: Any, step: int) -> None:
        """Draw what is there before a control step."""
        if step % self.every == 0:
            self._seen = self.adapter.observation(raw)
            self._draw(f"step {step}")

    def finish(self, episode: Episode) -> None:
        """Draw the end."""
        outcome = "success" if episode.success else "no success"
        self._draw(f"{outcome} after {episode.steps} steps", episode.success)

    def _draw(self, status: str, success: bool | None = None) -> None:
        images = {name: _square(frame, SIDE // 2) for name, frame in self._seen["images"].items()}
        drawn: Any = self.env.render() if self.draws else next(iter(self._seen["images"].values()))
        prompt = str(self._seen.get("prompt", ""))
        self.pictures.append(compose(_square(drawn, SIDE), images, prompt, status, success))


def _square(frame: Any, side: int) -> np.ndarray:
    """Return a frame, uint8 or floats in [0, 1], as uint8 [side, side, 3], with bars where it is none."""
    pixels = np.asarray(frame)
    if pixels.dtype.kind == "f":
        pixels = (255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    return np.asarray(ImageOps.pad(Image.fromarray(pixels), (side, side), Image.Resampling.BILINEAR))


def _files(pictures: Sequence[Image.Image], period_s: float) -> tuple[bytes, bytes]:
    """Return the film as an animated WebP, and its last picture."""
    durations = [round(1e3 * period_s)] * (len(pictures) - 1) + [round(1e3 * PAUSE_S)]
    film, still = io.BytesIO(), io.BytesIO()
    options: dict[str, Any] = {"append_images": list(pictures[1:]), "duration": durations, "loop": 0}
    pictures[0].save(film, "WEBP", save_all=True, quality=QUALITY, method=3, **options)
    pictures[-1].save(still, "WEBP", quality=QUALITY)
    return film.getvalue(), still.getvalue()

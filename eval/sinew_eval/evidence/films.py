"""Film episodes by playing them again. The seed determines an episode, so its outcome is the same."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.episodes.watched import WatchedMoment, every, watch
from sinew_eval.evidence.animation import compose

if TYPE_CHECKING:
    from sinew_eval.episodes.campaign import RemotePlayer

SIDE = 240  # width and height of the scene, in pixels
FPS = 10  # largest number of frames per second of the episode's own time
PAUSE_S = 1.5  # pause after the last frame, in seconds
QUALITY = 60
MOST_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class Film:
    """The film of an episode.

    Attributes:
        variant: Index of the variant.
        episode: Record of the filmed episode.
        same: True if the filmed episode had the same commands as the episode of the run.
        webp: Animated WebP.
        still: Last picture as WebP.
    """

    variant: int
    episode: Episode
    same: bool
    webp: bytes
    still: bytes


def chosen(results: Sequence[Sequence[Episode]], count: int) -> list[int]:
    """Choose the seeds to film: failures and successes of the first variant. Seeds at which the variants disagree
    come first.

    Args:
        results: The episodes of each variant.
        count: Maximum number of failures, and of successes.

    Returns:
        The seeds.
    """
    won = [{each.seed: each.success for each in episodes} for episodes in results]
    disputed = {seed for seed, success in won[0].items() if any(each[seed] != success for each in won[1:])}
    seeds = sorted(won[0], key=lambda seed: (seed not in disputed, seed))
    return [
        seed
        for outcome in (False, True)
        for seed in [seed for seed in seeds if won[0][seed] is outcome][:count]
    ]


def shoot(
    task: Task,
    variants: Sequence[Variant],
    results: Sequence[Sequence[Episode]],
    count: int,
    control_hz: float,
    elsewhere: RemotePlayer | None = None,
) -> list[Film]:
    """Play the chosen seeds of the first ``MOST_VARIANTS`` variants again, and film them.

    Args:
        task: The task.
        variants: The variants.
        results: The episodes of each variant.
        count: Maximum number of failures, and of successes.
        control_hz: Control steps per second.
        elsewhere: Player in another interpreter. None to play in this interpreter.

    Returns:
        The films.
    """
    seeds, shown = chosen(results, count), variants[:MOST_VARIANTS]
    todo = [(index, seed) for index in range(len(shown)) for seed in seeds]
    before = [{each.seed: each for each in episodes} for episodes in results]
    films: list[Film] = []
    for index, episode, moments in (watch if elsewhere is None else elsewhere.watch)(task, shown, todo, FPS):
        was = before[index][episode.seed]
        same = (episode.success, episode.digest) == (was.success, was.digest)
        films.append(film_of(index, episode, moments, every(control_hz, FPS) / control_hz, same))
    return films


def film_of(
    variant: int, episode: Episode, moments: Sequence[WatchedMoment], period_s: float, same: bool = True
) -> Film:
    """Make the film of an episode from the control steps that were stored while it was played.

    Args:
        variant: Index of the variant.
        episode: Record of the episode.
        moments: Stored steps of the episode.
        period_s: Duration of each picture, in seconds.
        same: True if the episode had the same commands as the episode of the run.
    """
    pictures = [_picture(each, f"step {each.step}") for each in moments[:-1]]
    outcome = "success" if episode.success else "no success"
    pictures.append(_picture(moments[-1], f"{outcome} after {episode.steps} steps", episode.success))
    return Film(variant, episode, same, *_files(pictures, period_s))


def _picture(moment: WatchedMoment, status: str, success: bool | None = None) -> Image.Image:
    """Compose a picture of a stored control step: on the left the scene (or the first camera if the environment draws
    no scene), and on the right the policy's images.
    """
    images = {name: _square(frame, SIDE // 2) for name, frame in moment.images.items()}
    scene = next(iter(moment.images.values())) if moment.scene is None else moment.scene
    return compose(_square(scene, SIDE), images, moment.prompt, status, success)


def _square(frame: Any, side: int) -> np.ndarray:
    """Convert a frame (uint8, or floats in [0, 1]) to uint8 [side, side, 3], with plain bars where a frame that is not
    square has no pixels.
    """
    pixels = np.asarray(frame)
    if pixels.dtype.kind == "f":
        pixels = (255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    return np.asarray(ImageOps.pad(Image.fromarray(pixels), (side, side), Image.Resampling.BILINEAR))


def _files(pictures: Sequence[Image.Image], period_s: float) -> tuple[bytes, bytes]:
    """Encode the film as an animated WebP, and its last picture as a WebP."""
    durations = [round(1e3 * period_s)] * (len(pictures) - 1) + [round(1e3 * PAUSE_S)]
    film, still = io.BytesIO(), io.BytesIO()
    options: dict[str, Any] = {"append_images": list(pictures[1:]), "duration": durations, "loop": 0}
    pictures[0].save(film, "WEBP", save_all=True, quality=QUALITY, method=3, **options)
    pictures[-1].save(still, "WEBP", quality=QUALITY)
    return film.getvalue(), still.getvalue()

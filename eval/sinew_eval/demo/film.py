"""Film of episodes: the scene as MuJoCo draws it, and next to it the policy's images, actions and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sinew.core.figures import COLORS

from sinew_eval.episodes.adapters import EnvAdapter
from sinew_eval.episodes.policies import ServerPolicy
from sinew_eval.episodes.runner import EpisodeSettings, run_episode
from sinew_eval.episodes.watched import WatchedEpisode

SIDE = 400  # width of the area to the right of the scene, in pixels
TRAIL = 40  # number of past control steps whose actions are drawn
REQUESTS = 24  # number of past latencies that are drawn
STRIDE = 2  # from one picture to the next, the film advances by this many control steps
PAUSE_S = 1.2  # pause after an episode, in seconds
QUALITY = 72
_INK, _PAPER, _LINE, _FAINT = (27, 31, 36), (250, 250, 248), (209, 217, 224), (72, 80, 88)
_GOOD, _BAD = (0, 122, 70), (190, 45, 30)


@dataclass(frozen=True)
class Shot:
    """One control step of a film.

    Attributes:
        pose: Pose of the scene, for the renderer.
        images: The frame of each camera that the policy received, by the camera's name.
        prompt: Instruction.
        actions: Executed actions up to this step, float32 [n, D].
        latency_ms: Latencies of all requests so far, in milliseconds.
        step: Number of the control step.
        names: Names of the action's values.
        result: Text with the outcome, at the end of an episode. "" before.
        success: True if the episode succeeded.
    """

    pose: np.ndarray
    images: Mapping[str, np.ndarray]
    prompt: str
    actions: np.ndarray
    latency_ms: tuple[float, ...]
    step: int
    names: tuple[str, ...] = ()
    result: str = ""
    success: bool = False


def shoot(policy: ServerPolicy, env: gymnasium.Env, adapter: EnvAdapter, seeds: range) -> list[Shot]:
    """Play one episode for each seed with a policy on a server. Return the control steps that the film shows."""
    shots: list[Shot] = []
    scene: Any = env.unwrapped
    names = tuple(policy.served["action"].get("names") or getattr(scene, "action_names", ()))
    for seed in seeds:
        recorded = WatchedEpisode(env, adapter)
        poses: list[np.ndarray] = []
        latencies: list[float] = []
        counts: list[int] = []

        def watch(
            _step: int, _seen: dict[str, Any], requested: bool, poses: list = poses, latencies: list = latencies,
            counts: list = counts,
        ) -> None:  # fmt: skip
            if requested and policy.last is not None:
                latencies.append(policy.last.round_trip_ms)
            counts.append(len(latencies))
            poses.append(scene.pose())

        episode = run_episode(recorded, adapter, policy, EpisodeSettings(), seed, watch)
        taken = recorded.moments
        actions = np.stack([frame.action for frame in taken])
        text = f"{'success' if episode.success else 'no success'} after {episode.steps} steps"
        for step, frame in enumerate(taken):
            last = step == len(taken) - 1
            shots.append(
                Shot(
                    poses[step], frame.images, frame.prompt, actions[: step + 1], tuple(latencies[: counts[step]]),
                    step, names, text if last else "", episode.success,
                )
            )  # fmt: skip
    return shots


def write_film(shots: Sequence[Shot], path: Path, fps: float) -> None:
    """Draw every second control step, and the last one of each episode with a pause, as an animated WebP. A picture
    takes 0.2 s without a GPU.

    Args:
        shots: The control steps.
        path: File to write.
        fps: Control steps per second.
    """
    from sinew_eval.sim.film import frames

    shots = [shot for shot in shots if shot.step % STRIDE == 0 or shot.result]
    poses = np.stack([shot.pose for shot in shots])
    pictures = [compose(scene, shot) for scene, shot in zip(frames(poses), shots, strict=True)]
    durations = [round(1e3 * (PAUSE_S if shot.result else STRIDE / fps)) for shot in shots]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=QUALITY, method=2
    )


def compose(scene: np.ndarray, shot: Shot) -> Image.Image:
    """Compose one picture: the scene on the left, and cameras, actions and latency on the right.

    Args:
        scene: Picture of the scene, uint8 [height, width, 3].
        shot: The control step.
    """
    height, width = scene.shape[:2]
    picture = Image.new("RGB", (width + SIDE, height), _PAPER)
    picture.paste(Image.fromarray(scene), (0, 0))
    draw = ImageDraw.Draw(picture)
    small, large = ImageFont.load_default(size=20), ImageFont.load_default(size=26)
    _words(draw, shot, width, height, large)
    left, inner = width + 14, SIDE - 28
    size = (inner - 8 * (len(shot.images) - 1)) // max(1, len(shot.images))
    draw.text((left, 8), "camera images of the policy", fill=_FAINT, font=small)
    for index, (name, image) in enumerate(shot.images.items()):
        at = left + index * (size + 8)
        picture.paste(Image.fromarray(image).resize((size, size), Image.Resampling.NEAREST), (at, 36))
        draw.text((at, 38 + size), name, fill=_FAINT, font=small)
    top = 70 + size
    low, high = _bounds(shot.actions)
    draw.text((left, top), f"actions, {low:g} to {high:g}; step {shot.step}", fill=_FAINT, font=small)
    _trails(draw, shot, (left, top + 28, left + inner, height - 160), small)
    draw.text((left, height - 152), _said(shot.latency_ms), fill=_FAINT, font=small)
    _bars(draw, shot.latency_ms, (left, height - 122, left + inner, height - 14))
    return picture


def _bounds(actions: np.ndarray) -> tuple[float, float]:
    """Return the range of the plotted actions. This is -1 to 1, or more if an action is outside this range."""
    return min(-1.0, float(actions.min())), max(1.0, float(actions.max()))


def _words(draw: ImageDraw.ImageDraw, shot: Shot, width: int, height: int, font: Any) -> None:
    """Write the instruction and the outcome of a control step (``shot``) onto the picture of the scene."""
    lines = [(shot.prompt, (255, 255, 255))]
    if shot.result:
        lines.append((shot.result, (140, 240, 170) if shot.success else (255, 160, 150)))
    draw.rectangle((0, height - 14 - 36 * len(lines), width, height), fill=(30, 34, 40))
    for index, (text, color) in enumerate(lines):
        draw.text((16, height - 8 - 36 * (len(lines) - index)), text, fill=color, font=font)


def _trails(draw: ImageDraw.ImageDraw, shot: Shot, box: tuple[int, int, int, int], font: Any) -> None:
    """Draw a curve for each value of the action over the last control steps. Each curve has its own strip inside
    ``box``.
    """
    left, top, right, bottom = box
    actions = shot.actions
    rows = actions[-TRAIL:]
    each = (bottom - top) / rows.shape[1]
    low, high = _bounds(actions)
    for joint in range(rows.shape[1]):
        y0 = top + joint * each
        middle = y0 + (each - 10) / 2
        draw.rectangle((left, y0, right, y0 + each - 10), outline=_LINE)
        draw.line((left, middle, right, middle), fill=_LINE)
        if joint < len(shot.names):
            draw.text((left + 5, y0 + 2), shot.names[joint], fill=_FAINT, font=font)
        points = [
            (left + (TRAIL - len(rows) + index) * (right - left) / (TRAIL - 1),
             y0 + 3 + (each - 16) * (1 - (float(value) - low) / (high - low)))
            for index, value in enumerate(rows[:, joint])
        ]  # fmt: skip
        if len(points) > 1:
            draw.line(points, fill=COLORS[joint % len(COLORS)], width=3, joint="curve")


def _bars(draw: ImageDraw.ImageDraw, latencies: Sequence[float], box: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = box
    shown = latencies[-REQUESTS:]
    draw.line((left, bottom, right, bottom), fill=_LINE)
    wide, highest = (right - left) / REQUESTS, max([*shown, 1.0])
    for index, value in enumerate(shown):
        x = left + index * wide
        draw.rectangle((x, bottom - (bottom - top) * value / highest, x + wide - 3, bottom), fill=COLORS[0])


def _said(latencies: Sequence[float]) -> str:
    if not latencies:
        return "ms per request"
    return f"ms per request: last {latencies[-1]:.0f}, median {np.median(latencies):.0f}"

"""``sinew recording dataset``: write a LeRobot data set from episodes that are played now, or from requests that a
server recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinew.cli import terminal
from sinew.cli.options import CAMERAS, RUNS, Cameras, Count, Flag, PositiveIfAny, Runs, Whole
from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew_client.control import is_journal
from sinew_client.control.defaults import REPLAN


def dataset(
    source: str,
    out: Path,
    /,
    *,
    env: str | None = None,
    episodes: Count = 10,
    seed: Whole = 5000,
    replan: str = REPLAN,
    successes: Flag = False,
    hz: PositiveIfAny = None,
    bundle: Path | None = None,
    corrections: Flag = False,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
) -> int:
    """Write a LeRobot data set (version 3.0) from episodes or a recording.

    Args:
        source: Policy, as for `sinew eval`, or `expert`: it plays episodes, and every control step becomes a
            frame. Or a folder of `sinew serve --record`: every request becomes a frame. Or a folder of `sinew
            run --frames`: every control step becomes a frame, and LeRobot's `intervention` states
            whether a person drove.
        out: New folder to write.
        env: Gymnasium id, a suite, or a task of a suite. Default: the built-in task that fits the policy.
        episodes: Number of episodes to play, one per seed.
        seed: Seed of the first episode.
        replan: Actions executed per inference, `full`, or another rule of `sinew run`.
        successes: Leave out failed episodes.
        hz: Requests per second of records. Default: the rate of `sinew run --frames`, or the bundle's
            control rate.
        bundle: Policy of the records. It gives the joints their names. Folders of `sinew run --frames` have
            names already.
        corrections: Keep only the recorded steps in which a person drove.
    """
    from sinew_eval.cli.eval import elsewhere_for, variant_of
    from sinew_eval.dataset.make import of_episodes, of_records
    from sinew_eval.episodes.settings import Task, parse_replan
    from sinew_eval.episodes.variants import default_env, settled, variants

    of_frames = next(Path(source).glob("*.npz"), None) is not None or is_journal(Path(source))
    if of_frames:
        if env is not None or successes:
            raise SinewError(
                "--env, --successes: apply only to episodes that are played now; omit them for a recording"
            )
        counts: dict[str, Any] = of_records(Path(source), out, hz, bundle, corrections)
    else:
        if hz is not None or bundle is not None or corrections:
            raise SinewError(
                f"--hz, --bundle, --corrections: apply only to a recording, but {source} contains no records (*.npz);"
                " omit these options"
            )
        try:
            task = Task(env or default_env(source, cameras.rename, **cameras.allowed))
            (variant,) = variants(variant_of(source, runs, cameras, replan=parse_replan(replan)))
            seeds, elsewhere = range(seed, seed + episodes), elsewhere_for(task)
            counts = of_episodes(settled(variant), task, seeds, out, successes, elsewhere)
        except ModuleNotFoundError as error:
            raise MissingPackageError("playing episodes", error.name or "mujoco") from None
    console = terminal.console(markup=False)
    text = ", ".join(f"{value} {name}" for name, value in counts.items())
    why = (
        "; a pause, a hold, another instruction or an error begins a new episode"
        if of_frames and counts["episodes"] > 1
        else ""
    )
    console.print(f"{out}: {text}{why}")
    terminal.emit({"dataset": str(out), **counts})
    return 0

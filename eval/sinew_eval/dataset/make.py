"""Write a data set from the requests that a server recorded, or from episodes that a policy plays now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinew.core import SinewError, progress

from sinew_eval.dataset.writer import DatasetFrame, DatasetWriter
from sinew_eval.episodes.campaign import RemotePlayer
from sinew_eval.episodes.settings import Task, Variant


def of_records(
    records: Path, out: Path, hz: float | None, bundle: Path | None, corrections: bool = False
) -> dict[str, Any]:
    """Write the requests of a recording as frames of a data set.

    Args:
        records: Folder of the recording.
        out: New folder of the data set.
        hz: Requests per second. None for the rate of `sinew run --frames`, or the control rate of ``bundle``.
        bundle: Bundle that names the joints if the recording does not. None if there is none.
        corrections: True to keep only the control steps in which a person drove the robot
            (:func:`sinew_eval.dataset.records.episodes`).

    Returns:
        Number of episodes, frames and tasks.

    Raises:
        SinewError: The rate is unknown, or no two requests follow each other.
    """
    from sinew.policy import open_bundle
    from sinew.records.recorder import read_records

    from sinew_eval.dataset.records import control_hz, episodes

    spec = None if bundle is None else open_bundle(bundle).manifest.spec
    rate = hz or control_hz(read_records(records)) or (None if spec is None else spec.control_hz)
    if rate is None:
        raise SinewError(
            "--hz: expected the rate of the requests in Hz, got none; pass --hz HZ, or a --bundle that states its rate"
        )
    groups = episodes(read_records(records), rate, corrections)
    first = next(groups, None)
    if first is None and corrections:
        raise SinewError(
            f"{records}: expected two consecutive control steps in which a human drove, got none; omit --corrections"
            " for all steps"
        )
    if first is None:
        raise SinewError(
            f"{records}: expected two consecutive requests of one session, got none; record at least two requests"
        )
    own = next(read_records(records)).names
    state = own.get("state", () if spec is None else spec.state.names)
    action = own.get("action", () if spec is None else spec.action.names)
    with (
        DatasetWriter(out, rate, state=state, action=action) as writer,
        progress.task(f"writing {out}"),
    ):
        writer.add(first)
        for each in groups:
            writer.add(each)
    return writer.close()


def of_episodes(
    variant: Variant,
    task: Task,
    seeds: range,
    out: Path,
    successes: bool,
    elsewhere: RemotePlayer | None = None,
) -> dict[str, Any]:
    """Play an episode per seed, and write every control step as a frame of a data set.

    Args:
        variant: The policy, as :func:`sinew_eval.episodes.variants.settled` returns it.
        task: The task.
        seeds: Seeds of the episodes.
        out: New folder of the data set.
        successes: True to leave out failed episodes.
        elsewhere: Player in another interpreter. None to play in this interpreter.

    Returns:
        Number of episodes, frames, tasks, played episodes and successes.
    """
    from sinew_eval.episodes.variants import control_hz
    from sinew_eval.episodes.watched import watch

    rate = control_hz(task, [variant]) if elsewhere is None else elsewhere.control_hz(task)
    play, won = watch if elsewhere is None else elsewhere.watch, 0
    with (
        DatasetWriter(out, rate, robot=task.env) as writer,
        progress.task(f"writing {out}", len(seeds)) as advance,
    ):
        for _, episode, moments in play(task, [variant], [(0, seed) for seed in seeds]):
            won += episode.success
            if episode.success or not successes:
                frames = [DatasetFrame(m.images, m.state, m.action, m.prompt) for m in moments[:-1]]
                writer.add(frames, episode.success)
            advance("success" if episode.success else "failure")
    return {**writer.close(), "played": len(seeds), "successes": won}

"""``sinew dataset``: a LeRobot data set of episodes that are played here, or of what a server recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from sinew_client.control.defaults import REPLAN

from sinew import progress
from sinew.cli import terminal
from sinew.cli.options import CAMERAS, RUNS, Cameras, Flag, Runs
from sinew.core import SinewError
from sinew.extras import MissingPackageError


def dataset(
    source: str,
    out: Path,
    /,
    *,
    env: str | None = None,
    episodes: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 10,
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 5000,
    replan: str = REPLAN,
    successes: Flag = False,
    hz: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    bundle: Path | None = None,
    corrections: Flag = False,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
) -> int:
    """Write a LeRobot data set (version 3.0), to look at, to share or to train on.

    Args:
        source: a policy as of `sinew eval`, or `expert`: it plays episodes, and every control step is a frame. Or the
            folder that `sinew serve --record` wrote: every request is a frame. Or that of `sinew run --frames`: every
            control step is, and says in LeRobot's `intervention` whether a human drove.
        out: a new folder.
        env: gymnasium id; if absent, the embedded task that the policy fits.
        episodes: to play, one per seed.
        seed: of the first episode.
        replan: actions executed per inference, `full`, or another rule of `sinew run`.
        successes: leave out episodes that failed.
        hz: of records: requests per second; the control rate of --bundle if absent.
        bundle: of records: the policy, which gives the joints their names.
        corrections: of records: only the steps in which a human drove.
    """
    if Path(source).is_dir() and next(Path(source).glob("*.npz"), None) is not None:
        if env is not None or successes:
            raise SinewError("--env, --successes: belong to episodes that are played, not to records")
        counts: dict[str, Any] = _of_records(Path(source), out, hz, bundle, corrections)
    else:
        if hz is not None or bundle is not None or corrections:
            raise SinewError(
                "--hz, --bundle, --corrections: belong to records, and the environment has its own rate"
            )
        try:
            counts = _of_episodes(
                source, out, env, range(seed, seed + episodes), replan, successes, cameras, runs
            )
        except ModuleNotFoundError as error:
            raise MissingPackageError("playing episodes", error.name or "mujoco") from None
    console = terminal.console(markup=False)
    text = ", ".join(f"{value} {name}" for name, value in counts.items())
    console.print(f"{out}: {text}")
    terminal.emit({"dataset": str(out), **counts})
    return 0


def _of_records(
    records: Path, out: Path, hz: float | None, bundle: Path | None, corrections: bool
) -> dict[str, Any]:
    from sinew.eval.dataset.records import episodes
    from sinew.eval.dataset.writer import DatasetWriter
    from sinew.policy import open_bundle
    from sinew.records.recorder import read_records

    spec = None if bundle is None else open_bundle(bundle).manifest.spec
    rate = hz or (None if spec is None else spec.control_hz)
    if rate is None:
        raise SinewError("--hz: expected the rate of the requests; there is no --bundle that states one")
    found = episodes(read_records(records), rate, corrections)
    first = next(found, None)
    if first is None and corrections:
        raise SinewError(f"{records}: no two steps that follow each other in which a human drove")
    if first is None:
        raise SinewError(f"{records}: no two requests of a session follow each other")
    state, action = ((), ()) if spec is None else (spec.state.names, spec.action.names)
    with (
        DatasetWriter(out, rate, state=state, action=action) as writer,
        progress.task(f"writing {out}"),
    ):
        writer.add(first)
        for each in found:
            writer.add(each)
    return writer.close()


def _of_episodes(
    source: str,
    out: Path,
    env: str | None,
    seeds: range,
    replan: str,
    successes: bool,
    cameras: Cameras,
    runs: Runs,
) -> dict[str, Any]:
    from sinew_client.policy import is_address

    from sinew.cli.eval import default_env
    from sinew.cli.eval_variants import settled, variant_of
    from sinew.eval.campaign import EpisodePlayer
    from sinew.eval.dataset.episodes import RecordedEpisode
    from sinew.eval.dataset.writer import DatasetWriter
    from sinew.eval.settings import Task, parse_replan
    from sinew.sources import resolve

    task = Task(env or default_env(source, cameras))
    target = source if source == "expert" or is_address(source) else str(resolve(source))
    variant = settled(variant_of(target, runs, cameras, replan=parse_replan(replan)))
    player = EpisodePlayer(task)
    player.env = recorded = RecordedEpisode(player.env, player.adapter)
    won = 0
    try:
        with (
            DatasetWriter(out, player.adapter.control_hz, robot=task.env) as writer,
            progress.task(f"writing {out}", len(seeds)) as advance,
        ):
            for number in seeds:
                episode = player.play(variant, number)
                won += episode.success
                if episode.success or not successes:
                    writer.add(recorded.frames, episode.success)
                advance("success" if episode.success else "failure")
    finally:
        player.close()
    return {**writer.close(), "played": len(seeds), "successes": won}

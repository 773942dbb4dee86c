"""``sinew demo``: a robot that works from the first command.

A trained policy of the package, behind the real server, moves simulated blocks in closed loop. With
``--full-size`` a random policy of SmolVLA's size goes the whole way instead, from checkpoint to actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sinew.cli import terminal
from sinew.cli.options import Count, Flag, Whole
from sinew.core.extras import MissingPackageError


def demo(
    policy: Literal["blocks", "act"] = "blocks",
    /,
    *,
    out: Path = Path("build/demo"),
    episodes: Count = 50,
    sweep_episodes: Whole = 30,
    film: bool | None = None,
    full_size: Flag = False,
    prepare: Flag = False,
    rounds: Count = 1,
    tiny: Flag = False,
) -> int:
    """Run a trained demo policy in closed loop, through the real server and client.

    Args:
        policy: blocks, a small SmolVLA that is told in words which block goes into which bin; act, a small ACT that
            is told in numbers.
        out: folder for the animation, the figure and the report; with --full-size for the checkpoint and the
            bundle (3.6 GB, what is already there is used again).
        episodes: of the blocks task, at most: it ends after 20 if all of them succeeded, or none.
        sweep_episodes: per point of the figure of success over injected latency, at most: a point ends after 10 if
            all of them succeeded, or none. 0 leaves the figure out.
        film: animate by MuJoCo's own renderer, with actions and latency, which needs EGL or OSMesa; --no-film: the
            small frames that the policy sees. If absent the first where it can be drawn.
        full_size: instead, a random policy of 450M parameters: written, converted, served, sent photographs.
        prepare: with --full-size, only write the bundle, OUT/policy.gguf.
        rounds: with --full-size, how many times to send each of the three scenes.
        tiny: with --full-size, a policy of a million parameters, for tests.
    """
    console = terminal.console()
    if full_size:
        from sinew.eval.demo import full_size as full

        full.run(out, console, prepare_only=prepare, rounds=rounds, tiny=tiny)
        return 0
    try:
        from sinew.eval.demo import closed_loop
    except ImportError as error:
        raise MissingPackageError("the simulated task", error.name or "mujoco") from None
    closed_loop.run(out, episodes, console, policy=policy, sweep_episodes=sweep_episodes, film=film)
    return 0

"""``sinew demo``: a simulated robot that works after one command.

A trained policy of this package moves simulated blocks in closed loop, through the real server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sinew.cli import terminal
from sinew.cli.options import Count, Whole
from sinew.core.extras import MissingPackageError


def demo(
    policy: Literal["blocks", "act"] = "blocks",
    /,
    *,
    out: Path = Path("build/demo"),
    episodes: Count = 50,
    sweep_episodes: Whole = 20,
    film: bool | None = None,
) -> int:
    """Run a trained policy in closed loop, through the real server and client.

    Args:
        policy: Built-in policy: blocks (a small SmolVLA that gets the block and the bin in words), or act (a
            small ACT that gets them as numbers).
        out: Folder for the animation, the figure and the report.
        episodes: Number of episodes of the blocks task.
        sweep_episodes: Episodes for each point of the figure of success over injected latency. 0 leaves the
            figure out.
        film: Draw the animation with MuJoCo's renderer, with actions and latency. This needs EGL or OSMesa.
            --no-film shows the small frames that the policy receives. Default: MuJoCo's renderer if it works
            here.
    """
    console = terminal.console()
    try:
        from sinew_eval.demo import closed_loop
    except ImportError as error:
        raise MissingPackageError("the simulated task", error.name or "mujoco") from None
    closed_loop.run(out, episodes, console, policy=policy, sweep_episodes=sweep_episodes, film=film)
    return 0

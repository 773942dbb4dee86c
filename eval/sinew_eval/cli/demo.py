"""``sinew demo``: a simulated robot that works after one command.

A trained policy of this package moves simulated blocks in closed loop, through the real server. With ``--full-size``,
a random policy with the size of SmolVLA is written, converted and served instead.
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
    sweep_episodes: Whole = 20,
    film: bool | None = None,
    full_size: Flag = False,
    prepare: Flag = False,
    rounds: Count = 1,
    tiny: Flag = False,
) -> int:
    """Run a trained policy in closed loop, through the real server and client.

    Args:
        policy: Built-in policy: blocks (a small SmolVLA that gets the block and the bin in words), or act (a
            small ACT that gets them as numbers).
        out: Folder for the animation, the figure and the report. With --full-size, also for the checkpoint
            and the bundle (3.6 GB). Existing files are used again.
        episodes: Number of episodes of the blocks task.
        sweep_episodes: Episodes for each point of the figure of success over injected latency. 0 leaves the
            figure out.
        film: Draw the animation with MuJoCo's renderer, with actions and latency. This needs EGL or OSMesa.
            --no-film shows the small frames that the policy receives. Default: MuJoCo's renderer if it works
            here.
        full_size: Instead, write, convert and serve a random policy of 450M parameters, and send it
            photographs.
        prepare: With --full-size, only write the bundle, OUT/policy.gguf.
        rounds: With --full-size, how often each of the three scenes is sent.
        tiny: With --full-size, use a policy of a million parameters, for tests.
    """
    console = terminal.console()
    if full_size:
        from sinew_eval.demo import full_size as full

        full.run(out, console, prepare_only=prepare, rounds=rounds, tiny=tiny)
        return 0
    try:
        from sinew_eval.demo import closed_loop
    except ImportError as error:
        raise MissingPackageError("the simulated task", error.name or "mujoco") from None
    closed_loop.run(out, episodes, console, policy=policy, sweep_episodes=sweep_episodes, film=film)
    return 0

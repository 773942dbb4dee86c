"""Simulated tasks that need no download, no display and no GPU, as gymnasium environments.

Importing this module registers them: ``sinew/Blocks-v0``, ``sinew/BlocksShove-v0``, ``sinew/BlocksGoal-v0``,
``sinew/Pen-v0``, ``sinew/Egg-v0``.
"""

from __future__ import annotations

import gymnasium

gymnasium.register("sinew/Blocks-v0", entry_point="sinew_eval.sim.blocks:BlocksEnv", max_episode_steps=120)
gymnasium.register(
    "sinew/BlocksShove-v0",
    entry_point="sinew_eval.sim.blocks:BlocksEnv",
    max_episode_steps=120,
    kwargs={"shove_step": 6},
)
gymnasium.register(
    "sinew/BlocksGoal-v0",
    entry_point="sinew_eval.sim.blocks:BlocksEnv",
    max_episode_steps=120,
    kwargs={"goal_in_state": True, "image_size": 96},
)
gymnasium.register("sinew/Pen-v0", entry_point="sinew_eval.sim.pen:PenEnv", max_episode_steps=120)
gymnasium.register("sinew/Egg-v0", entry_point="sinew_eval.sim.egg:EggEnv", max_episode_steps=360)

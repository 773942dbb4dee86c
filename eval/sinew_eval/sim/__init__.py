"""Simulated tasks as gymnasium environments. They need no download, no display and no GPU.

Importing this module registers ``sinew/Blocks-v0``, ``sinew/BlocksShove-v0``, ``sinew/BlocksGoal-v0``,
``sinew/Pen-v0`` and ``sinew/Egg-v0``.
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

"""X-VLA (Zheng et al. 2025, arXiv 2510.10274): Florence-2 and one transformer with learned tokens ("soft prompts") per
robot.

The transformer predicts the actions several times, and mixes its prediction with noise between two steps. Sinew
converts checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/xvla``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"xvla": "model:XVLA"},
    backbones={"xvla": "Florence-2"},
    converters=("convert",),
    units={"xvla": ("recorded",)},
)

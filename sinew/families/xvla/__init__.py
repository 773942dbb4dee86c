"""X-VLA (Zheng et al. 2025, arXiv 2510.10274) in LeRobot's layout: one transformer with soft prompts for each robot."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"xvla": "model:XVLA"},
    backbones={"xvla": "Florence-2"},
    converters=("convert",),
    units={"xvla": ("recorded",)},
)

"""ACT (Zhao et al. 2023, arXiv 2304.13705) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"act": "model:ACT"},
    backbones={"act": "ResNet-18"},
    converters=("convert",),
    units={"act": ("recorded",)},
)

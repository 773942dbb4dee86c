"""VQ-BeT (Lee et al. 2024, arXiv 2403.03181) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"vqbet": "model:VQBeT"},
    backbones={"vqbet": "ResNet-18"},
    converters=("convert",),
    units={"vqbet": ("recorded",)},
)

"""EO-1 (Qu et al. 2025, arXiv 2508.21112) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"eo1": "model:EO1"},
    backbones={"eo1": "Qwen2.5-VL"},
    converters=("convert",),
    units={"eo1": ("recorded",)},
)

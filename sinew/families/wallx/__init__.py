"""Wall-X, a policy of X Square Robot, in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"wallx": "model:WallX"},
    backbones={"wallx": "Qwen2.5-VL"},
    converters=("convert",),
    units={"wallx": ("recorded",)},
)

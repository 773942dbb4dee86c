"""Wall-X of X Square Robot: Qwen2.5-VL whose own layers denoise the action chunk by flow matching.

Action tokens have their own feed-forward expert in each layer. Sinew converts checkpoints in LeRobot's layout.
Reference implementation: LeRobot ``policies/wall_x``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"wallx": "model:WallX"},
    backbones={"wallx": "Qwen2.5-VL"},
    converters=("convert",),
    units={"wallx": ("recorded",)},
)

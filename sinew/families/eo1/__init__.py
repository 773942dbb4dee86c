"""EO-1 (Qu et al. 2025, arXiv 2508.21112): Qwen2.5-VL whose own layers denoise the action chunk by flow matching.

Sinew converts checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/eo1``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"eo1": "model:EO1"},
    backbones={"eo1": "Qwen2.5-VL"},
    converters=("convert",),
    units={"eo1": ("recorded",)},
)

"""The multi-task diffusion transformer (LeRobot ``multi_task_dit``) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"multi_task_dit": "model:MultiTaskDiT"},
    backbones={"multi_task_dit": "CLIP ViT-B/16"},
    converters=("convert",),
    units={"multi_task_dit": ("recorded",)},
)

"""The multi-task diffusion transformer: CLIP features of frames and prompt, and a transformer over the action chunk.

The transformer denoises the chunk by diffusion or flow matching. Sinew converts checkpoints in LeRobot's layout.
Reference implementation: LeRobot ``policies/multi_task_dit``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"multi_task_dit": "model:MultiTaskDiT"},
    backbones={"multi_task_dit": "CLIP ViT-B/16"},
    converters=("convert",),
    units={"multi_task_dit": ("recorded",)},
)

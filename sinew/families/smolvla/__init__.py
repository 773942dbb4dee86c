"""SmolVLA (Shukor et al. 2025, arXiv 2506.01844): a small vision-language model and an action expert.

The expert denoises the action chunk by flow matching. Sinew converts checkpoints in LeRobot's layout. Reference
implementation: LeRobot ``policies/smolvla``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"smolvla": "model:SmolVLA"},
    backbones={"smolvla": "SmolVLM2"},
    converters=("convert",),
    units={"smolvla": ("recorded",)},
    golden="golden:check",
)

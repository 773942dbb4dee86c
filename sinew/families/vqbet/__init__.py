"""VQ-BeT (Lee et al. 2024, arXiv 2403.03181): a small policy for one task, without a language input.

A causal transformer over the last observations chooses two codes, which a decoder converts to an action chunk. Sinew
converts checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/vqbet``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"vqbet": "model:VQBeT"},
    backbones={"vqbet": "ResNet-18"},
    converters=("convert",),
    units={"vqbet": ("recorded",)},
)

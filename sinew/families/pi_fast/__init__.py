"""pi0-FAST (Pertsch et al. 2025, arXiv 2501.09747): PaliGemma generates the action chunk as tokens of the FAST
tokenizer.

Sinew converts checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/pi0_fast``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"pi0_fast": "model:PI0Fast"},
    backbones={"pi0_fast": "PaliGemma"},
    converters=("convert",),
    units={"pi0_fast": ("recorded",)},
    base="pi",
)

"""pi0-FAST (Pertsch et al. 2025, arXiv 2501.09747) in LeRobot's layout: PaliGemma generates action chunks as tokens."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"pi0_fast": "model:PI0Fast"},
    backbones={"pi0_fast": "PaliGemma"},
    converters=("convert",),
    units={"pi0_fast": ("recorded",)},
    base="pi",
)

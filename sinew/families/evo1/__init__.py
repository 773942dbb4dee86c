"""Evo-1 (Lin et al. 2025, arXiv 2511.04555): InternVL3-1B and a cross-attention action head.

The head denoises the action chunk by flow matching. Sinew converts checkpoints in LeRobot's layout and in that of the
original repository. Reference implementations: LeRobot ``policies/evo1`` and MINT-SJTU/Evo-1.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"evo1": "model:Evo1"},
    backbones={"evo1": "InternVL3-1B"},
    converters=("convert",),
    units={"evo1": ("opening",)},
)

"""Evo-1 (Lin et al. 2025, arXiv 2511.04555), in the checkpoint layouts of LeRobot and of the original repository."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"evo1": "model:Evo1"},
    backbones={"evo1": "InternVL3-1B"},
    converters=("convert",),
    units={"evo1": ("opening",)},
)

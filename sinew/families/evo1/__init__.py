"""Evo-1 (Lin et al. 2025, arXiv 2511.04555), in LeRobot's layout and the original repository's."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"evo1": "model:Evo1"},
    backbones={"evo1": "InternVL3-1B"},
    converters=("convert",),
    units={"evo1": ("opening",)},
)

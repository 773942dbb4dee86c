"""Diffusion Policy (Chi et al. 2023, arXiv 2303.04137) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"diffusion": "model:DiffusionPolicy"},
    backbones={"diffusion": "ResNet-18"},
    converters=("convert",),
    units={"diffusion": ("recorded",)},
)

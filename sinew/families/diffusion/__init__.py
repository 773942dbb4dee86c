"""Diffusion Policy (Chi et al. 2023, arXiv 2303.04137): a small policy for one task, without a language input.

A ResNet converts each camera view to keypoints, and a U-Net denoises the action chunk in several steps. Sinew converts
checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/diffusion``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"diffusion": "model:DiffusionPolicy"},
    backbones={"diffusion": "ResNet-18"},
    converters=("convert",),
    units={"diffusion": ("recorded",)},
)

"""ACT (Zhao et al. 2023, arXiv 2304.13705): a small policy for one task, without a language input.

A ResNet encodes the camera views, and a transformer returns the whole action chunk in one pass. Sinew converts
checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/act``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"act": "model:ACT"},
    backbones={"act": "ResNet-18"},
    converters=("convert",),
    units={"act": ("recorded",)},
)

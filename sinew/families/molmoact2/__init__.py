"""MolmoAct2 (Fang et al. 2026, arXiv 2605.02881): an action expert that reads the keys and values of Molmo2's layers.

Sinew converts checkpoints in LeRobot's layout, and the released folders with ``norm_stats.json``. Reference
implementation: LeRobot ``policies/molmoact2``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"molmoact2": "model:MolmoAct2"},
    backbones={"molmoact2": "Molmo2-ER"},
    converters=("convert", "convert_released"),
    units={"molmoact2": ("recorded",)},
)

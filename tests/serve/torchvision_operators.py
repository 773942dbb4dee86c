"""Define two operators of torchvision, before it is imported in the clients' interpreter.

The torchvision on PyPI is compiled for torch with CUDA. With a CPU build of torch, its operators cannot be loaded,
but its import needs two of their names. No test calls these operators.
"""

import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""Names of torchvision's operators, imported before it in the clients' interpreter.

PyPI's torchvision is compiled against CUDA's torch. Beside a CPU build of torch its operators cannot be loaded, and its
import wants two of their names; nothing here ever calls any.
"""

import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""One place for a whole step of the head: an operation that computes the model's ``act`` at once.

By default, ``act`` of the model runs the fused layers one after another, and each product is an operation of
:mod:`.ops`. A persistent kernel computes all layers of a step in one launch instead. Such a kernel is a subclass of
:class:`HeadStep`, listed in ``Ops.steps``. ``fuse`` uses the first listed subclass that supports the model. The
outcome of ``fuse`` contains the reason why another subclass was not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from sinew.models.base import Context, Model


class HeadStep(nn.Module, ABC):
    """A whole step of the head of one model.

    The object is made once, after the model's layers are fused. Its constructor may store the weights in the layout
    that :meth:`forward` reads, for example as one stream of tiles for each block of the head. Register these tensors as
    buffers. The engine then counts them in its memory, and the audit of a recording covers them.

    Engines call :meth:`forward` while they record a CUDA graph. So it allocates only memory of the recording, copies
    nothing from the CPU and reads no value of the device. Two recordings may run at the same time, on two CUDA streams.
    So what a launch writes, such as the counters of its barriers, is memory of the recording and no buffer.

    Args:
        model: The fused model.

    Attributes:
        name: Name of the operation, for messages.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def why_not(cls, model: Any) -> str | None:
        """Return the reason why the operation does not support a fused model on the model's device. None if it does.

        Reasons are for example the structure of the head, its sizes, or a GPU with too few free multiprocessors.
        """

    @abstractmethod
    def __init__(self, model: Any):
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        """Compute :meth:`sinew.models.base.Model.act`.

        Args:
            x: float32 [B, H, A], the noisy chunk.
            time_embedding: The row of the solver step in the plan's table of time embeddings, [1, ...].
            context: The context of the observation.

        Returns:
            The output of the head, float32 [B, H, A].
        """


class WholeStep(Model):
    """A model whose head computes each step by one :class:`HeadStep`. The class is for ``rewrite.become``."""

    head_step: HeadStep

    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        return self.head_step(x, time_embedding, context)  # type: ignore[no-any-return]

"""Declare, for engines that rewrite blocks, which norms feed which linear layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class FoldSite(NamedTuple):
    """A norm (``getattr(owner, norm)``) and all that reads its output.

    A block that owns such a norm returns them from a method ``fold_sites()``. A reader is a linear layer, or a
    block with a method ``inputs()`` that returns the linear layers which are alone in reading what the block is
    given. Both methods count only for the very class that defines them: a subclass may read its input elsewhere.
    """

    owner: nn.Module
    norm: str
    readers: tuple[nn.Module, ...]

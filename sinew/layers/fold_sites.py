"""A declaration for engines that rewrite blocks: the linear layers that read the output of a norm."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class FoldSite(NamedTuple):
    """A norm and all modules that read its output. An engine may fold the norm's weight into these modules.

    A block that owns such a norm returns its sites from a method ``fold_sites()``. Both ``fold_sites()`` and
    ``inputs()`` count only for the class that defines them, because a subclass may read its input in another layer too.

    Attributes:
        owner: The block with the norm.
        norm: Attribute name of the norm in ``owner``.
        readers: Linear layers, or blocks with a method ``inputs()``. ``inputs()`` returns the linear layers of the
            block that read the block's input, and no other layer reads this input.
    """

    owner: nn.Module
    norm: str
    readers: tuple[nn.Module, ...]

"""A record of the linear layers that read a norm's output, so that an engine can fold the norm into them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class FoldSite(NamedTuple):
    """A norm and all modules that read its output. An engine may fold the norm's weight into these modules.

    A block that owns such a norm returns its sites from a method ``fold_sites()``. Subclasses do not inherit the
    meaning of ``fold_sites()`` and ``inputs()``, because a subclass may also read its input in another layer.

    Attributes:
        owner: The block with the norm.
        norm: Attribute name of the norm in ``owner``.
        readers: Linear layers, or blocks with a method ``inputs()``. ``inputs()`` returns the linear layers of the
            block that read the block's input, and no other layer reads this input.
    """

    owner: nn.Module
    norm: str
    readers: tuple[nn.Module, ...]

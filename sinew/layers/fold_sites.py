"""A record of the linear layers that read a norm's output. An engine can multiply ("fold") the norm's weight
into the weights of these layers, and then skips the multiplication at run time.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class FoldSite(NamedTuple):
    """A norm, and all modules that read its output. An engine may multiply the norm's weight into the weights
    of these modules ("fold the norm").

    A block that owns such a norm returns its sites from a method ``fold_sites()``. Each class declares
    ``fold_sites()`` and ``inputs()`` in its own body. Subclasses do not inherit their meaning, because a
    subclass may also read its input in another layer.

    Attributes:
        owner: The block with the norm.
        norm: Attribute name of the norm in ``owner``.
        readers: The modules that read the norm's output: linear layers, or blocks with a method ``inputs()``.
            ``inputs()`` returns the linear layers of the block that read the block's input. No other layer of
            the block may read this input.
    """

    owner: nn.Module
    norm: str
    readers: tuple[nn.Module, ...]

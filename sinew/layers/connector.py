"""Between vision tower and language model."""

from __future__ import annotations

from torch import Tensor, nn

from sinew.layers.linear import Linear


def pixel_shuffle(x: Tensor, rows: int, cols: int, scale: int) -> Tensor:
    """Fold each ``scale * scale`` square of patches into one token.

    x: [B, rows * cols, C] -> [B, rows * cols / scale^2, scale^2 * C]; inside a token the square's rows run
    slowest and channels fastest (SmolVLM's order).
    """
    B, _, C = x.shape
    x = x.view(B, rows // scale, scale, cols // scale, scale, C)
    return x.transpose(2, 3).reshape(B, (rows // scale) * (cols // scale), scale * scale * C)


class PixelShuffleConnector(nn.Module):
    def __init__(self, vision_size: int, language_size: int, scale: int):
        super().__init__()
        self.scale = scale
        self.proj = Linear(vision_size * scale**2, language_size, bias=False)

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.proj,)

    def forward(self, x: Tensor, rows: int, cols: int) -> Tensor:  # [B, rows * cols, C] -> [B, tokens, C']
        return self.proj(pixel_shuffle(x, rows, cols, self.scale))

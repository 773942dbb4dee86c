"""The losses of a demo policy, based on the model's own ``embed_images``, ``prefix`` and ``velocity``.

* Flow matching (LeRobot's SmolVLA): x_t = t * noise + (1 - t) * actions, target velocity noise - actions, t from
  Beta(1.5, 1) scaled to (0.001, 1). Each prefix is used with several draws of noise and time. This costs little,
  because the expert is a small part of the work.
* An auxiliary head, which is dropped after training, reads the values (V) of the state token in the attention of the
  expert's last two layers, and must return the positions of all objects. The actions depend
  on these values. Later features would not help, because the actions do not use them.
* A second auxiliary head reads single image tokens. It must return which coloured objects have their centre inside
  the token's square, and where. It trains the vision tower in a few hundred steps, while the first head alone needs
  thousands.
* Half of the images get a second, counterfactual instruction, only for the auxiliary task. The named object must
  follow from the words and not from the direction of the gripper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sinew.families.smolvla.model import SmolVLA
from sinew.models.expert import Prefix
from torch import Tensor, nn


@dataclass
class Batch:
    """B observations with an instruction each. The first B2 of them also have a second, counterfactual instruction.

    Attributes:
        pixels: Images, [B, V, 3, size, size] in [-1, 1].
        tokens: Token ids, int64 [B + B2, L].
        token_mask: True for real tokens, bool [B + B2, L].
        state: Normalised states, [B, S].
        chunk: Normalised actions, [B, H, A].
        known: True for actions that are known, bool [B, H].
        auxiliary: Targets of the auxiliary head, [B + B2, X].
        spots: For each image token and object, whether the object is there (0 or 1) and two coordinates, float32 [B,
            V, N, S, 3]. None without this head.
    """

    pixels: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor
    chunk: Tensor
    known: Tensor
    auxiliary: Tensor
    spots: Tensor | None = None


class AuxiliaryHead(nn.Module):
    """Computes the positions of objects from the values of the state token in the expert's last two layers."""

    def __init__(self, kv_size: int, outputs: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * kv_size, 128), nn.GELU(), nn.Linear(128, outputs))

    def forward(self, prefix: Prefix) -> Tensor:
        """Return the estimated positions of the objects, [B, outputs]."""
        return self.net(torch.cat([v[:, -1].flatten(1) for _, v in prefix.kv[-2:]], dim=-1))


class Objective(nn.Module):
    def __init__(
        self, model: SmolVLA, auxiliary_outputs: int, things: int, draws: int, auxiliary_weight: float
    ):
        super().__init__()
        language = model.config.language
        self.spot_head = nn.Linear(language.hidden_size, 3 * things) if things else None
        self.model, self.draws, self.weight = model, draws, auxiliary_weight
        self.auxiliary = AuxiliaryHead(language.num_kv_heads * language.head_dim, auxiliary_outputs)

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        B, second = len(batch.pixels), len(batch.tokens) - len(batch.pixels)
        image_tokens = self.model.embed_images(batch.pixels)
        cameras = torch.ones(B, batch.pixels.shape[1], dtype=torch.bool)

        def doubled(x: Tensor) -> Tensor:
            return torch.cat([x, x[:second]])

        prefix = self.model.prefix(
            doubled(image_tokens), doubled(cameras), batch.tokens, batch.token_mask, doubled(batch.state)
        )
        parts = {"auxiliary": F.mse_loss(self.auxiliary(prefix), batch.auxiliary)}
        if self.spot_head is not None and batch.spots is not None:
            parts["spots"] = self._spot_loss(image_tokens, batch.spots)

        own = repeated(prefix, B, self.draws)
        actions = batch.chunk.repeat_interleave(self.draws, 0)  # [B * draws, H, A]
        mask = batch.known.repeat_interleave(self.draws, 0)[..., None]
        noise = torch.randn(actions.shape, generator=generator)
        # The distribution function of Beta(1.5, 1) is t ** 1.5, so its inverse maps uniform numbers to samples.
        t = torch.rand(len(actions), generator=generator) ** (1 / 1.5) * 0.999 + 0.001
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * actions
        error = (self.model.velocity(x, t, own) - (noise - actions)).square() * mask
        flow = error.sum() / (mask.sum() * actions.shape[-1]).clamp_min(1)
        loss = flow + self.weight * sum(parts.values())
        return loss, {"flow": flow.detach(), **{k: v.detach() for k, v in parts.items()}}

    def _spot_loss(self, image_tokens: Tensor, spots: Tensor) -> Tensor:
        """Return the loss of the second auxiliary head.

        Args:
            image_tokens: Image tokens, [B, V, N, C].
            spots: Targets, [B, V, N, S, 3].
        """
        assert self.spot_head is not None
        guess = self.spot_head(image_tokens * image_tokens.shape[-1] ** 0.5).unflatten(-1, (-1, 3))
        there = spots[..., 0]
        presence = F.binary_cross_entropy_with_logits(guess[..., 0], there, reduction="sum")
        place = ((guess[..., 1:] - spots[..., 1:]).square().sum(-1) * there).sum()
        return (0.1 * presence + place) / there.sum().clamp_min(1)


def repeated(prefix: Prefix, rows: int, times: int) -> Prefix:
    """Repeat each of the first ``rows`` observations of a computed prefix (context of the language model) ``times``
    times.
    """

    def repeat(x: Tensor) -> Tensor:
        return x[:rows].repeat_interleave(times, 0)

    kv = tuple((repeat(k), repeat(v)) for k, v in prefix.kv)
    return Prefix(kv=kv, valid=repeat(prefix.valid), length=repeat(prefix.length))


def initialise(model: SmolVLA, seed: int) -> None:
    """Initialise the weights for training from scratch.

    The model multiplies image tokens and words by sqrt(width), as its pretrained ancestors do. Therefore these
    weights start small, so that the stream begins with unit size. Positions start as two-dimensional sines and
    cosines, so that nearby patches are similar from the beginning. A random table would have to learn this first.

    Args:
        model: The model, which is changed in place.
        seed: Seed of the random weights.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = model.config.language.hidden_size**-0.5

    def normal(weight: Tensor, std: float) -> None:
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel()
            normal(parameter, fan_in**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc2.weight")):
                parameter.data *= 0.5
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    normal(model.language.embed_tokens.weight, scale)
    model.connector.proj.weight.data *= scale
    model.action_out_proj.weight.data *= 0.1
    vision = model.config.vision
    model.vision.position_embedding.weight.data.copy_(_sines(vision.side, vision.hidden_size))


def _sines(side: int, width: int) -> Tensor:
    """Return position embeddings [side * side, width]: one quarter each for sine and cosine of the row, and sine and
    cosine of the column.
    """
    quarter = width // 4
    frequency = torch.pi / side * 2 ** torch.linspace(0, 3, quarter)
    angle = torch.arange(side)[:, None] * frequency  # [side, quarter]
    one = torch.cat([angle.sin(), angle.cos()], dim=-1)  # [side, width / 2]
    rows, cols = one[:, None].expand(side, side, -1), one[None].expand(side, side, -1)
    return 0.7 * torch.cat([rows, cols], dim=-1).reshape(side * side, -1)

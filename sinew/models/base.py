"""What an engine may ask of a model with an iterative (flow-matching) head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from sinew.layers.decoder import KeyValue
from sinew.layers.joints import Joint
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the action head reads of one observation. Lives for one integration.

    kv:    per head layer, keys and values [B, P, Hkv, D] in the form in which that layer reads them.
    valid: bool [B, P], False where the prefix is padding.
    length: int64 [B], number of valid prefix tokens: the position of the first token after it.
    state: float32 [B, 1, C], the state's token, for heads that read it beside their actions (pi0).
    """

    kv: tuple[KeyValue, ...]
    valid: Tensor
    length: Tensor
    state: Tensor | None = None


@dataclass(frozen=True)
class FlowConfig:
    """What the configurations of all flow-matching models share. Sizes in tokens and dimensions."""

    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float  # of the time embedding
    max_period: float

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0 < self.min_period < self.max_period < float("inf"):
            raise ValueError(f"periods {self.min_period} to {self.max_period} are not a range")


class Frame(NamedTuple):
    """Where the head's own tokens stand, and what they see: known once the prefix is."""

    rotations: tuple[Rotation, ...]
    masks: tuple[Tensor, ...]  # bool [B, S, keys], True = may see


class FlowModel(nn.Module):
    """One architecture in plain PyTorch. Knows nothing of devices, servers or how it is executed.

    ``config_type`` is the frozen dataclass that the bundle's ``sinew.config`` decodes into.
    ``float32_modules`` are the top-level modules that stay float32 when weights are loaded in half
    precision, because the reference keeps them so.
    """

    config_type: ClassVar[type]
    float32_modules: ClassVar[tuple[str, ...]] = ()
    config: Any

    @property
    def noise_shape(self) -> tuple[int, int]:
        """[H, A]: what the solver starts from and returns."""
        return (self.config.chunk_size, self.config.max_action_dim)

    @property
    def state_size(self) -> int:
        """S: the width of the padded state."""
        return self.config.max_state_dim

    def joints(self) -> list[Joint]:
        """Return the norms whose readers stand in another block (:class:`sinew.layers.joints.Joint`)."""
        return []

    @abstractmethod
    def embed_images(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, V, 3, height, width] -> image tokens [B, V, tokens, C], unscaled."""

    @abstractmethod
    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """The vision tower's features [N, rows * cols, C] -> image tokens [N, tokens, C']."""

    @abstractmethod
    def prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """Everything that is computed once per observation.

        image_tokens: [B, V, tokens, C]; camera_mask: bool [B, V]; tokens: int64 [B, L];
        token_mask: bool [B, L]; state: float32 [B, S], normalised and padded.
        """

    @property
    def prefix_depth(self) -> int | None:
        """How many of the language model's layers leave keys and values that the head reads, counted from
        the first. None when it reads something else."""
        return None

    def velocity(self, x: Tensor, t: Tensor, prefix: Prefix) -> Tensor:
        """x: float32 [B, H, A]; t: float32 [B] -> float32 [B, H, A].

        In three parts, by what they depend on, so that an engine may compute the first two less often.
        """
        return self.step(x, self.moment(t), self.frame(prefix), prefix)

    @abstractmethod
    def moment(self, t: Tensor) -> Tensor:
        """What a step takes from the solver's time alone: t float32 [B] -> [B, ...]."""

    @abstractmethod
    def frame(self, prefix: Prefix) -> Frame:
        """What a step takes from the prefix's length and mask alone."""

    @abstractmethod
    def step(self, x: Tensor, moment: Tensor, frame: Frame, prefix: Prefix) -> Tensor:
        """The rest: x float32 [B, H, A] -> its velocity, float32 [B, H, A]."""

"""The interface between models and engines.

An engine calls four functions and reads a few facts. It knows no family:

    image_tokens = model.embed_images(pixels)                                     # once per observation
    context = model.read(image_tokens, camera_mask, tokens, token_mask, state)    # once per observation
    time_embedding = model.embed_time(t)                                          # once per step, or from a table
    output = model.act(x, time_embedding, context)                                # once per step

The meaning of an output, and the number of steps, are data: :class:`sinew.models.solvers.Solver`.

A :class:`AutoregressiveModel` has no solver. It generates tokens, whose meaning is data too
(:class:`sinew.steps.action_tokens.base.ActionTokens`). Two other functions take the place of the last two:

    spoken = model.first(context)            # once per observation: the first token
    spoken = model.next(spoken, context)      # once per token, until one ends the sequence

A model whose bundle keeps its language head (``has_lm_head``) also generates text, from the same prefix:

    said = model.begin_text(image_tokens, camera_mask, tokens, token_mask, state)   # in place of read
    said = model.continue_text(said, tokens)                                        # once per token
    context = model.context_of(said)                                                # the context for act
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from sinew.layers.fold_sites import FoldSite
from sinew.models.solvers import FLOW, SINGLE, Solver, solve
from sinew.steps.action_tokens.base import ActionTokens

Context = Any  # a named tuple of tensors, and of tuples of them; None for a tensor that a model lacks


class TextState(NamedTuple):
    """A prompt that a language model has read, and the text after it, P rows together.

    Attributes:
        kv: For each layer, keys and values [B, P, Hkv, D].
        valid: bool [B, P], False for padding.
        sees: bool [B, P], rows that the next token of the text attends to.
        position: int64 [B], position of that token.
        last: [B, C], hidden state before the final norm, from which that token is computed.
        state: float32 [B, S], the robot's state.
    """

    kv: tuple[tuple[Tensor, Tensor], ...]
    valid: Tensor
    sees: Tensor
    position: Tensor
    last: Tensor
    state: Tensor


class Model(nn.Module):
    """One architecture in plain PyTorch. Knows nothing of devices, servers or how it is executed.

    config_type: the frozen dataclass that the bundle's ``sinew.config`` decodes into.
    float32_modules: top-level modules that stay float32 when weights are loaded in half precision, because the
        reference keeps them so.
    per_embodiment: modules that upstream's files hold once per robot; a bundle has them of one.
    components: top-level module -> component of a precision recipe; modules that are not there belong to the head.
    solver: the family's own; a loaded model has its bundle's.
    times_per_row: ``embed_time`` also takes times [B, H], and ``act`` its result: a time for each row of a chunk.
    """

    config_type: ClassVar[type]
    float32_modules: ClassVar[tuple[str, ...]] = ()
    per_embodiment: ClassVar[tuple[str, ...]] = ()
    components: ClassVar[Mapping[str, str]] = {
        "vision": "vision",
        "connector": "vision",
        "language": "language",
    }
    solver: Solver = FLOW
    times_per_row: ClassVar[bool] = False
    config: Any

    @property
    def noise_shape(self) -> tuple[int, int]:
        """[H, A]: what the solver starts from and returns."""
        return (self.config.chunk_size, self.config.max_action_dim)

    @property
    def state_size(self) -> int:
        """S: the width of the padded state."""
        return self.config.max_state_dim

    @property
    def channels(self) -> int:
        """Channels of a view: three for every set of statistics that normalises it."""
        return 3

    @property
    def views(self) -> int | None:
        """Return the number of views where the weights fix it, so that none may be missing; None where any number is
        read."""
        return None

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """Return height and width in pixels of the picture of each view where the weights fix them; () where all views
        have the size of the pixels."""
        return ()

    @property
    def views_alike(self) -> bool:
        """Return True if all views are encoded in the same way, so that a view may be encoded without the others."""
        return not self.frames

    @property
    def moments(self) -> tuple[int, int] | None:
        """Return (T, V) where one to T moments of V views each are read, as many as there are, so that views come in
        multiples of V; None where no number of moments is known here, or all are always there."""
        return None

    @property
    def min_tokens(self) -> int:
        """Return the fewest tokens that a prompt has, for engines that analyse shapes."""
        return 2

    @property
    def grid(self) -> tuple[int, int] | None:
        """Return rows and columns of a view's patches where the bundle fixes them; None where any size is taken."""
        return None

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of a view of so many pixels."""
        return self.config.vision.grid(height, width)  # type: ignore[no-any-return]

    @property
    def prefix_depth(self) -> int | None:
        """Number of layers of ``self.language``, from the first, whose keys and values the head reads. None if it
        reads something else.
        """
        return None

    @property
    def chooses_tokens(self) -> bool:
        """Return True if the head takes the likeliest token, so that a rounded context may give another action."""
        return False

    @property
    def head_reads_state(self) -> bool:
        """Return True if each step reads the state itself, so that :meth:`renew` needs no new prefix."""
        return False

    @property
    def has_lm_head(self) -> bool:
        """Return True if the bundle keeps the language model's head, so that :meth:`read_text` gives a token."""
        return False

    def read_text(
        self,
        image_tokens: Tensor,
        camera_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
        text: Tensor,
    ) -> tuple[Context, Tensor]:
        """Return the context as :meth:`read` does, and the logits [B, vocabulary] of the token that follows ``text``.

        text: int64 [B, N], what was said so far, N from 0 on. It sees views and prompt, and none of them sees it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no language head")

    def begin_text(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> TextState:
        """Read a prompt as :meth:`read` does, of which nothing is said yet; arguments as there."""
        raise NotImplementedError(f"{type(self).__name__} has no language head")

    def continue_text(self, said: TextState, tokens: Tensor) -> TextState:
        """Return the text with ``tokens``, int64 [B, N], N at least 1, appended. ``said`` is not changed."""
        raise NotImplementedError(f"{type(self).__name__} has no language head")

    def context_of(self, said: TextState) -> Context:
        """Return the context for :meth:`act`, in which the head reads the prompt and the text after it."""
        raise NotImplementedError(f"{type(self).__name__} has no language head")

    def logits(self, h: Tensor) -> Tensor:
        """Return the score of each token, [B, vocabulary], of a language model's last hidden state [B, C]."""
        raise NotImplementedError(f"{type(self).__name__} has no language head")

    def renew(self, context: Context, state: Tensor) -> Context:
        """Return the context with a newer state, float32 [B, S]; as it is where the state is in the prefix."""
        return context

    @classmethod
    def component_of(cls, name: str) -> str:
        """Return the component ("vision", "language", "head") of a module or parameter by its name."""
        return cls.components.get(name.partition(".")[0], "head")

    def fold_sites(self) -> list[FoldSite]:
        """Return the norms whose outputs are read in another block (:class:`sinew.layers.fold_sites.FoldSite`)."""
        return []

    def cache(self, context: Context) -> Any:
        """Return the part of ``context`` that reports call the cache: what each step reads of the observation."""
        return context

    @abstractmethod
    def embed_images(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, V, channels, height, width] -> image tokens [B, V, tokens, C].

        A model may put views before them that no camera gives; :meth:`read` gets them back, and its mask has no
        entries for them. Engines may add masked views behind.
        """

    @abstractmethod
    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Context:
        """Return everything that is computed once per observation, as a named tuple of tensors.

        image_tokens: [B, V, tokens, C]; camera_mask: bool [B, V]; tokens: int64 [B, L]; token_mask: bool [B, L];
        state: float32 [B, S], normalised and padded. A view or token whose mask is False must not change the
        result: engines pad the prompt on the side that the bundle's prompt recipe names. Shapes may follow from
        the shapes of the arguments, never from their values.
        """

    @abstractmethod
    def embed_time(self, t: Tensor) -> Tensor:
        """Return the part of a step that depends on the solver's time alone: t float64 [B] -> [B, ...].

        Observations of a batch share the solver's times: ``t`` then has one row, and so has the argument of ``act``.
        The time has double precision. A model whose reference rounds it to float32, or cuts it into buckets, does so
        itself.
        """

    @abstractmethod
    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        """Return the head's output, float32 [B, H, A], for x float32 [B, H, A]; its meaning is the solver's.

        time_embedding: of :meth:`embed_time`, with B rows or one for all of them.
        """

    @property
    def device(self) -> torch.device:
        """The device of the computation. Tables of tokens may be elsewhere: on the host, in the file's map."""
        return next((p.device for p in self.parameters() if p.device.type != "cpu"), torch.device("cpu"))

    def time_embeddings(
        self, steps: int, committed: Tensor | None = None, device: torch.device | None = None
    ) -> Iterator[Tensor]:
        """Yield the time embedding of each step of a solution, each [1, ...], computed when it is asked for.

        committed: bool [B, H], the rows that are actions already, at the solver's end; time embeddings are then
            [B, ...].
        device: where the model computes. None: all its weights are asked, which takes a millisecond.
        """
        device = device or self.device
        for time in self.solver.times(steps):
            if committed is None:
                t = torch.full((1,), time, dtype=torch.float64, device=device)
            else:
                t = torch.where(
                    committed, self.solver.end, torch.tensor(time, dtype=torch.float64, device=device)
                )
            yield self.embed_time(t)

    def head_runs(self, steps: int) -> int:
        """Return the largest number of head runs for a chunk in ``steps`` solver steps."""
        return steps

    def run_head(self, x: Tensor, steps: int, time_embeddings: Iterable[Tensor], context: Context) -> None:
        """Run the head once, as a chunk of ``steps`` steps begins: for costs, traces and clocks."""
        first = self.solver.steps(steps)[:1], islice(time_embeddings, 1)
        solve(lambda x, time_embedding: self.act(x, time_embedding, context), x, *first)


class Regression(Model):
    """A model whose head is asked once and answers with the actions themselves."""

    solver = SINGLE

    def embed_time(self, t: Tensor) -> Tensor:
        return torch.zeros(len(t), 1, device=t.device)

    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        return self.regress(context)

    @abstractmethod
    def regress(self, context: Context) -> Tensor:
        """Return the actions, float32 [B, H, A], in model units."""


Spoken = Any  # a named tuple of tensors and of tuples of them, whose ``token``, int64 [B], is the newest


class AutoregressiveModel(Model):
    """A model whose head generates the chunk token by token (autoregressive).

    The engine runs the loop: it ends at the token that ends a sequence, may be cancelled between two tokens, and
    exports one of them. The type Spoken is the state after the tokens so far: the newest token, and keys and values
    with room for the longest sequence, so that shapes do not change. It is never changed: each token makes a new one.
    All members of a batch run in step.

    Attributes:
        choose: Chooses the token from the scores [B, 1, vocabulary], int64 [B]: the likeliest, unless an exploration
            samples (:mod:`sinew_eval.learning.exploration`).
    """

    solver = SINGLE
    choose: Callable[[Tensor], Tensor] = staticmethod(lambda scores: scores.argmax(dim=-1)[:, 0])

    @property
    @abstractmethod
    def action_tokens(self) -> ActionTokens:
        """The length of sequences, their end, and the meaning of their tokens."""

    @abstractmethod
    def first(self, context: Context) -> Spoken:
        """Return the state after the first token of the sequence. Its shapes follow from the context's."""

    @abstractmethod
    def next(self, spoken: Spoken, context: Context) -> Spoken:
        """Return the same with one token more, of the same shapes."""

    @property
    def chooses_tokens(self) -> bool:
        return True

    def embed_time(self, t: Tensor) -> Tensor:
        return torch.zeros(t.shape[0], 1, device=t.device)

    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} says tokens: first and next")

    def head_runs(self, steps: int) -> int:
        return self.action_tokens.most

    def run_head(self, x: Tensor, steps: int, time_embeddings: Iterable[Tensor], context: Context) -> None:
        self.next(self.first(context), context)

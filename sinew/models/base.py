"""The interface between models and engines.

An engine (a program that executes a model) calls four functions of a model and reads a few properties. No
engine contains code for a single family:

    image_tokens = model.embed_images(pixels)                                     # once per observation
    context = model.read(image_tokens, camera_mask, tokens, token_mask, state)    # once per observation
    time_embedding = model.embed_time(t)                                          # once per solver step
    output = model.act(x, time_embedding, context)                                # once per solver step

The context is everything that the action head needs to know about the observation, for example the keys and
values that the language model computed. The bundle's solver (:class:`sinew.models.solvers.Solver`) defines
the meaning of an output and the number of steps.

An :class:`AutoregressiveModel` has no solver. The model generates tokens, and the bundle defines the meaning
of each token (:class:`sinew.steps.action_tokens.base.ActionTokens`). Two functions replace ``embed_time`` and
``act``:

    spoken = model.first(context)            # once per observation: the first token
    spoken = model.next(spoken, context)     # once per further token, up to the end token

Here ``spoken`` is the model's state after the tokens so far.

A model whose bundle contains its language head (``has_lm_head``) also generates text from the same prefix
(image tokens, prompt and state):

    text = model.begin_text(image_tokens, camera_mask, tokens, token_mask, state)   # replaces read
    text = model.continue_text(text, tokens)                                        # once per token
    context = model.context_of(text)                                                # the context for act
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

# The context is the part of an observation's results that the head reads. Each model has its own named tuple
# of tensors for it. A field is None if the model has no such tensor.
Context = Any


class TextState(NamedTuple):
    """The state of a language model that generates text: the prompt and the text generated so far. P is the
    number of tokens of prompt and text together.

    Attributes:
        kv: Keys and values of each layer, [B, P, Hkv, D].
        valid: bool [B, P], False for padding.
        sees: bool [B, P], True for each token to which the next token of the text attends.
        position: int64 [B], position of the next token.
        last: [B, C], hidden state before the final norm, from which the next token is computed.
        state: float32 [B, S], the robot's state.
    """

    kv: tuple[tuple[Tensor, Tensor], ...]
    valid: Tensor
    sees: Tensor
    position: Tensor
    last: Tensor
    state: Tensor


class Model(nn.Module):
    """One policy architecture in plain PyTorch, independent of devices, servers and engines.

    Attributes:
        config_type: The frozen dataclass that the bundle's ``sinew.config`` is decoded into.
        float32_modules: Top-level modules that stay float32 when the weights are loaded in half precision, because the
            reference implementation also keeps these modules in float32.
        per_embodiment: Names of modules that the original checkpoint contains several times, once per robot. A bundle
            contains the modules of one robot.
        components: The component ("vision", "language" or "head") of each top-level module. A module without an entry
            belongs to the head.
        solver: The default solver of the family. A loaded model has the solver of its bundle.
        times_per_row: True if ``embed_time`` also accepts one time per action of the chunk, [B, H], and ``act`` accepts
            the result.
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
        """Shape [H, A] of the noise that the solver starts from: H actions of A numbers. The chunk that the
        solver returns has the same shape.
        """
        return (self.config.chunk_size, self.config.max_action_dim)

    @property
    def state_size(self) -> int:
        """Width S of the robot's state after padding."""
        return self.config.max_state_dim

    @property
    def channels(self) -> int:
        """Number of channels of the model's input pixels: three for each set of normalisation statistics."""
        return 3

    @property
    def views(self) -> int | None:
        """Return the required number of views if the weights fix the number. None if the model accepts any number of
        views.
        """
        return None

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """Return height and width in pixels of each view if the weights fix these sizes. Empty if all views
        have the same size.
        """
        return ()

    @property
    def views_alike(self) -> bool:
        """Return True if the model encodes all camera views in the same way.

        An engine may then encode one view without the others.
        """
        return not self.frames

    @property
    def moments(self) -> tuple[int, int] | None:
        """Return the longest observation history that the model accepts, as (T, V), or None.

        (T, V) means that an observation contains one to T observation steps with V views each. The number of
        views is therefore a multiple of V. None means that the model reads no history, or that the history
        always has its full length.
        """
        return None

    @property
    def min_tokens(self) -> int:
        """Return the smallest number of tokens of a prompt, for engines that analyse shapes."""
        return 2

    @property
    def grid(self) -> tuple[int, int] | None:
        """Return the rows and columns of the grid of patches into which a view is divided, if the bundle
        fixes them. None if any frame size is accepted.
        """
        return None

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of patches for a view with this height and width in pixels."""
        return self.config.vision.grid(height, width)  # type: ignore[no-any-return]

    @property
    def prefix_depth(self) -> int | None:
        """Number of layers of ``self.language``, counted from the first, whose keys and values the head
        reads.

        None if the head reads other tensors.
        """
        return None

    @property
    def chooses_tokens(self) -> bool:
        """Return True if the head chooses the token with the highest score, so that a rounding error can change an
        action.
        """
        return False

    @property
    def head_reads_state(self) -> bool:
        """Return True if each solver step reads the robot's state directly. :meth:`renew` then replaces the
        state without running the language model again.
        """
        return False

    @property
    def has_lm_head(self) -> bool:
        """Return True if the bundle contains the language model's head (its output layer), so that
        :meth:`read_text` can compute the scores of a token.
        """
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
        """Read an observation and the text generated so far, and compute the scores of the next token.

        Args:
            image_tokens, camera_mask, tokens, token_mask, state: As for :meth:`read`.
            text: int64 [B, N], the tokens generated so far; N may be 0. The text attends to the views and the prompt,
                which do not attend to the text.

        Returns:
            The context that :meth:`read` returns, and the logits [B, vocabulary] of the token after ``text``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot generate text, because it has no language head"
        )

    def begin_text(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> TextState:
        """Run the language model over the prompt, before any text is generated. The arguments are those of
        :meth:`read`.

        Returns:
            The state from which :meth:`continue_text` generates the text.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot generate text, because it has no language head"
        )

    def continue_text(self, text: TextState, tokens: Tensor) -> TextState:
        """Return a new text state with ``tokens`` appended, int64 [B, N] with N at least 1. The given state is
        unchanged.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot generate text, because it has no language head"
        )

    def context_of(self, text: TextState) -> Context:
        """Return the context for :meth:`act`. With this context, the head reads the prompt and the generated text."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot generate text, because it has no language head"
        )

    def logits(self, h: Tensor) -> Tensor:
        """Return the score of each token, [B, vocabulary], from the last hidden state [B, C] of the language model."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot generate text, because it has no language head"
        )

    def renew(self, context: Context, state: Tensor) -> Context:
        """Return the context with a newer state of the robot, float32 [B, S].

        The context stays unchanged if the state is a part of the language model's input, because a newer
        state would then require a new run of the language model.
        """
        return context

    @classmethod
    def component_of(cls, name: str) -> str:
        """Return the component ("vision", "language" or "head") of a module or parameter name."""
        return cls.components.get(name.partition(".")[0], "head")

    def fold_sites(self) -> list[FoldSite]:
        """Return the norms whose weights an engine can multiply into the linear layers after them, each as a
        :class:`sinew.layers.fold_sites.FoldSite`.
        """
        return []

    def cache(self, context: Context) -> Any:
        """Return the part of ``context`` that each solver step reads, such as keys and values. Reports call
        this part the cache and state its size.
        """
        return context

    @abstractmethod
    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode the camera images.

        A model may add views of its own before the camera views. :meth:`read` then receives them too, but its
        ``camera_mask`` has entries for camera views only. An engine may append masked views.

        Args:
            pixels: float32 [B, V, channels, height, width].

        Returns:
            Image tokens [B, V, tokens, C].
        """

    @abstractmethod
    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Context:
        """Compute everything that is needed once per observation. In most models, this function runs the
        language model over image tokens, prompt and state.

        Engines pad the prompt on the side that the bundle's prompt recipe names. A view or token whose mask
        is False must therefore not change the result. Shapes may depend on the shapes of the arguments, never
        on their values.

        Args:
            image_tokens: [B, V, tokens, C].
            camera_mask: bool [B, V], False for a missing view.
            tokens: int64 [B, L], the prompt.
            token_mask: bool [B, L], False for padding.
            state: float32 [B, S], normalised and padded.

        Returns:
            The context (the results that the action head reads), a named tuple of tensors.
        """

    @abstractmethod
    def embed_time(self, t: Tensor) -> Tensor:
        """Compute the part of a solver step that depends only on the solver's time.

        If all observations of a batch have the same solver time, ``t`` and the argument of ``act`` may have a single
        row. The time is in double precision. A model rounds the time to float32 or to buckets if its reference does so.

        Args:
            t: float64 [B].

        Returns:
            The time embedding, [B, ...].
        """

    @abstractmethod
    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        """Run the action head once. The solver defines the meaning of the output, for example a velocity.

        Args:
            x: float32 [B, H, A], the noisy chunk.
            time_embedding: Result of :meth:`embed_time`, with B rows or with one row for the whole batch.
            context: Result of :meth:`read`.

        Returns:
            float32 [B, H, A].
        """

    @property
    def device(self) -> torch.device:
        """The device of the computation: the first device of a parameter that is not the CPU, otherwise the CPU.

        Tables of tokens may stay on the CPU, in the memory map of the file.
        """
        return next((p.device for p in self.parameters() if p.device.type != "cpu"), torch.device("cpu"))

    def time_embeddings(
        self, steps: int, committed: Tensor | None = None, device: torch.device | None = None
    ) -> Iterator[Tensor]:
        """Yield the time embedding of each solver step, [1, ...].

        A time embedding is computed only when the caller requests the next one.

        Args:
            steps: Number of solver steps.
            committed: bool [B, H], True for the actions of the action prefix, whose time is the solver's end.
                The time embeddings are then [B, ...].
            device: Device of the model. None searches the weights for the device, which takes a millisecond.
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
        """Return how often the head runs, at most, for one chunk with ``steps`` solver steps."""
        return steps

    def run_head(self, x: Tensor, steps: int, time_embeddings: Iterable[Tensor], context: Context) -> None:
        """Run the head once, as in the first of ``steps`` solver steps, without a result.

        Reports call this function to measure the cost and the time of the head.
        """
        first = self.solver.steps(steps)[:1], islice(time_embeddings, 1)
        solve(lambda x, time_embedding: self.act(x, time_embedding, context), x, *first)


class Regression(Model):
    """A model whose head runs once and returns the actions directly."""

    solver = SINGLE

    def embed_time(self, t: Tensor) -> Tensor:
        return torch.zeros(len(t), 1, device=t.device)

    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        return self.regress(context)

    @abstractmethod
    def regress(self, context: Context) -> Tensor:
        """Return the actions, float32 [B, H, A], in model units."""


# The state of an autoregressive model after the tokens so far: a named tuple of tensors and tuples of
# tensors. The field ``token``, int64 [B], is the newest token.
Spoken = Any


class AutoregressiveModel(Model):
    """A model whose head generates the chunk token by token (autoregressive).

    The engine calls :meth:`next` in a loop. The loop ends at the end token, and it can be cancelled between
    two tokens. An engine may also export :meth:`next` as a graph. The type Spoken is the state after the
    tokens so far. This state contains the newest token. It also contains keys and values with space for the
    longest sequence, so that the shapes stay constant. :meth:`next` returns a new state and leaves its
    argument unchanged. All members of a batch generate the same number of tokens.

    Attributes:
        choose: A function that chooses the next token, int64 [B], from the scores [B, 1, vocabulary]. The
            default is the token with the highest score. Training by exploration samples a token instead
            (:mod:`sinew_eval.learning.exploration`).
    """

    solver = SINGLE
    choose: Callable[[Tensor], Tensor] = staticmethod(lambda scores: scores.argmax(dim=-1)[:, 0])

    @property
    @abstractmethod
    def action_tokens(self) -> ActionTokens:
        """The meaning of the action tokens: the length of the longest sequence, the end token, and the number
        that each token encodes.
        """

    @abstractmethod
    def first(self, context: Context) -> Spoken:
        """Generate the first token of the sequence.

        The shapes of the result depend only on the shapes of the context.

        Returns:
            The model's state after this token.
        """

    @abstractmethod
    def next(self, spoken: Spoken, context: Context) -> Spoken:
        """Generate one more token.

        Returns:
            The model's state after this token. The shapes are those of the old state.
        """

    @property
    def chooses_tokens(self) -> bool:
        return True

    def embed_time(self, t: Tensor) -> Tensor:
        return torch.zeros(t.shape[0], 1, device=t.device)

    def act(self, x: Tensor, time_embedding: Tensor, context: Context) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} is autoregressive: call first and next instead of act"
        )

    def head_runs(self, steps: int) -> int:
        return self.action_tokens.most

    def run_head(self, x: Tensor, steps: int, time_embeddings: Iterable[Tensor], context: Context) -> None:
        self.next(self.first(context), context)

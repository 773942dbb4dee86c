"""The reference engine: the model's own PyTorch code, stage by stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES, RTC, SinewError, did_you_mean, machine
from sinew.engine.capability import Capability, Refusal
from sinew.engine.engine import Context, Engine, Facts
from sinew.engine.example import Inputs
from sinew.engine.reuse import Reuse
from sinew.engine.traced import as_array, named_arrays, recorded_rows
from sinew.engine.watch import Watch
from sinew.layers.stores.plain import PLAIN
from sinew.models.base import AutoregressiveModel, Model, TextState
from sinew.models.solvers import Guidance, solve
from sinew.processing import ModelInputs

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.engine.backend import EngineOptions

WORDS = {long: word for word, long in DTYPES.items()}
TRIES = 3  # number of measurements with one thread and with many threads
TOO_LONG_S = 1.0  # a longer inference is not measured: it always gains from all cores
_AT_FIRST = (
    torch.get_num_threads()
)  # PyTorch's number of threads before Sinew tuned the number for any policy


def open_eager(bundle: Bundle, options: EngineOptions) -> EagerEngine:
    """Return the reference engine, which runs the bundle's model."""
    # These modules read bundles. An engine that gets a loaded model does not need them.
    from sinew.engine.adapters import with_adapter
    from sinew.engine.loading import open_model

    model, where = open_model(bundle, options, "eager")
    bundle.release(model.parameters())
    adapters = {
        name: EagerEngine(with_adapter(model, each), where) for name, each in options.adapters.items()
    }
    engine = EagerEngine(model, where)
    engine.adapters = adapters
    return engine


class EagerEngine(Engine):
    """An engine that runs the PyTorch code of a model without changes.

    Args:
        model: The model.
        device: The device.
        recipe: For each component (vision, language, head) with low-bit weights, the stored format in which the
            engine multiplies.
    """

    _settled: ClassVar[int] = 0  # the number of threads that the last tuning chose

    def __init__(self, model: Model, device: torch.device, recipe: Mapping[str, str] | None = None):
        self.model = model.eval().requires_grad_(False)
        self.device = device
        self._threads = 0
        self.facts = Facts(
            device=str(device),
            weights_nbytes=sum(p.nbytes for p in model.parameters()),
            precision=precision_of(model),
            recipe=recipe or {},
            guides=RTC,  # autograd differentiates the head, and some heads support a denoising time per action
            refusals=_refusals(model, device),
            rolling=bool(getattr(model.config, "rolling", False)),
            head_reads_state=model.head_reads_state,
            chooses_tokens=model.chooses_tokens,
        )

    @property
    def threads(self) -> int:
        # PyTorch's number of threads belongs to the calling thread.
        return self._threads or torch.get_num_threads()

    def tune_threads(self, infer: Callable[[], object]) -> str:
        if self.device.type != "cpu":
            return "the device computes"
        now = torch.get_num_threads()
        # If ``now`` is the number of threads that Sinew measured to be best for an earlier policy, the user did not
        # set it. Use PyTorch's first number instead.
        many = min(_AT_FIRST if now == EagerEngine._settled else now, machine.recommended_threads()[0])
        self._threads, reason = tune_threads(infer, torch.set_num_threads, many)
        EagerEngine._settled = self._threads
        return reason

    def place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def start_reuse(self, inputs: ModelInputs) -> str:
        self.check(Capability.REUSE)
        renew = self.renew if self.facts.head_reads_state else None
        self.reuse = Reuse(
            self._encode,
            lambda parts: torch.cat(parts, 1),
            torch.equal,
            torch.get_num_threads,
            renew,
            self.model.views_alike,
        )
        return self.reuse.try_views(inputs.pixels.shape)

    @torch.inference_mode()
    def _encode(self, pixels: np.ndarray) -> Tensor:
        """Return the image tokens [B, V, N, C] of pixels."""
        return self.model.embed_images(self.place(pixels))

    @torch.inference_mode()
    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> Context:
        watch = watch or Watch()
        # A trace (the stored results of all stages) must contain computed values, so no cached result is used.
        reuse = self.reuse if watch.trace is None else None
        if reuse is not None and (stored := reuse.context(inputs, watch)) is not None:
            return stored
        with self._rows(watch):
            batch = Inputs.of(inputs, self.device)
            # [B, V, N, C]
            image_tokens = (
                self.model.embed_images(batch.pixels) if reuse is None else reuse.tokens(inputs.pixels, watch)
            )
            if (prompts := len(batch.tokens) // len(batch.pixels)) > 1:
                image_tokens = image_tokens.repeat(prompts, 1, 1, 1)
            self._lap(watch, "vision")
            context = self.model.read(image_tokens, *batch[1:])
            if watch.trace is not None:
                watch.trace.vision = as_array(image_tokens[0])
                watch.trace.prefix = named_arrays(context)
            self._lap(watch, "prefix")
            if reuse is not None:
                reuse.keep(inputs, context)
            return context

    def solve(
        self,
        context: Context,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        watch, model = watch or Watch(), self.model
        if isinstance(model, AutoregressiveModel):
            chunks = model.action_tokens.chunks(self.say(context, watch))
            if watch.trace is not None:
                watch.trace.head.append(chunks[0])
            return chunks
        if guidance is not None and getattr(guidance, "jacobian", True):
            context = pytree.tree_map(_differentiable, context)

        def act(x: Tensor, time_embedding: Tensor) -> Tensor:
            output = model.act(x, time_embedding, context)
            if watch.trace is not None:
                watch.trace.head.append(as_array(output[0]))
            return output

        with torch.inference_mode(guidance is None), torch.no_grad(), self._rows(watch):
            x = solve(
                act,
                torch.from_numpy(noise).to(self.device),
                model.solver.steps(steps),
                self.time_embeddings(steps, guidance),
                lambda: self._lap(watch, "step"),
                guidance,
            )
            if watch.trace is not None:
                watch.trace.head.append(as_array(x[0]))
            return x.float().cpu().numpy()

    @torch.inference_mode()
    def say(self, context: Context, watch: Watch | None = None) -> np.ndarray:
        """Return the tokens that an autoregressive head generates, int64 [B, n] (:meth:`ActionTokens.speak`)."""
        watch, model = watch or Watch(), self.model

        def after_token(token: np.ndarray) -> None:
            if watch.trace is not None:
                watch.trace.head.append(token[:1].copy())
            self._lap(watch, "step")

        with self._rows(watch):
            return model.action_tokens.speak(
                model.first(context),
                lambda spoken: model.next(spoken, context),
                lambda spoken: spoken.token.cpu().numpy(),
                after_token,
            )

    @torch.inference_mode()
    def say_text(
        self,
        inputs: ModelInputs,
        most: int,
        end: int = -1,
        behind: Sequence[int] | None = (),
        watch: Watch | None = None,
    ) -> tuple[Context, list[int]]:
        self.check(Capability.SPEAK)
        watch, model = watch or Watch(), self.model
        batch = Inputs.of(inputs.alone().batched(), self.device)
        image_tokens = model.embed_images(batch.pixels)
        self._lap(watch, "vision")
        text_state = model.begin_text(image_tokens, *batch[1:])
        self._lap(watch, "prefix")
        text: list[int] = []
        unread: list[int] = []  # generated tokens whose keys and values are not computed yet
        while len(text) < most:
            if unread:
                text_state, unread = self._continued(text_state, unread), []
            token = int(model.logits(text_state.last)[0].argmax())
            if token != end:
                text.append(token)
                unread.append(token)
            self._lap(watch, "text")
            if token == end:
                break
        if behind is None:
            return None, text
        if unread := [*unread, *behind]:
            text_state = self._continued(text_state, unread)
        context = model.context_of(text_state)
        self._lap(watch, "text")
        return context, text

    def _continued(self, said: TextState, tokens: list[int]) -> TextState:
        return self.model.continue_text(
            said, torch.tensor(tokens, dtype=torch.int64, device=self.device)[None]
        )

    def exchange(self, weights: Mapping[str, Any]) -> None:
        self.check(Capability.EXCHANGE)
        if self.adapters:
            raise SinewError(
                "weights: a policy with adapters cannot accept new weights, because its adapters use the old"
                " weights; load the policy without adapters"
            )
        own = self.model.state_dict()
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if name not in own:
                raise SinewError(
                    f"weights: expected names of weights in the bundle, got {name!r}{did_you_mean(name, own)}"
                )
            value, old = torch.as_tensor(weight).detach(), own[name]
            if value.shape != old.shape or not (value.is_floating_point() and old.is_floating_point()):
                expected, got = (f"{list(each.shape)} of {each.dtype}" for each in (old, value))
                raise SinewError(f"weights: {name}: expected {expected}, got {got}")
            # Copy the tensor, because the caller may continue to change it in training.
            tensors[name] = value.to(old.device, old.dtype, copy=True)
            if not tensors[name].isfinite().all():
                raise SinewError(
                    f"weights: {name}: expected finite numbers in {old.dtype}, got NaN or infinity"
                )
        self.model.load_state_dict(own | tensors, strict=True, assign=True)
        self.model.requires_grad_(False)
        if self.reuse is not None:
            self.reuse.forget()

    def time_embeddings(self, steps: int, guidance: Guidance | None = None) -> Iterable[Tensor]:
        """Return the time embedding of each solver step. With an action prefix, each action has its own time."""
        return self.model.time_embeddings(steps, getattr(guidance, "committed", None), self.device)

    @torch.inference_mode()
    def renew(self, context: Context, state: np.ndarray) -> Context:
        return self.model.renew(context, self.place(state))

    @torch.inference_mode()
    def evaluate(self, context: Context, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        self.check(Capability.ROLL)
        at = self.place(np.asarray(times, np.float64))
        return self.model.act(self.place(x), self.model.embed_time(at), context).float().cpu().numpy()

    @torch.inference_mode()
    def read_text(self, inputs: ModelInputs, text: list[int]) -> tuple[Context, int]:
        self.check(Capability.SPEAK)
        batch = Inputs.of(inputs, self.device)
        so_far = torch.tensor(text, dtype=torch.int64, device=self.device)[None]  # [1, N]
        context, logits = self.model.read_text(self.model.embed_images(batch.pixels), *batch[1:], so_far)
        return context, int(logits[0].argmax())

    def _lap(self, watch: Watch, stage: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        watch.lap(stage)

    def _rows(self, watch: Watch) -> AbstractContextManager[Any]:
        """Inside the ``with`` block, record in the trace which rows of embedding tables the model reads."""
        return nullcontext() if watch.trace is None else recorded_rows(self.model, watch.trace.rows)


def _refusals(model: Model, device: torch.device) -> dict[Capability, Refusal]:
    """Return the capabilities that a model on a device lacks, with the reasons."""
    refusals = {}
    if device.type != "cpu":
        refusals[Capability.REUSE] = Refusal("a CPU", str(device))
    if not model.has_lm_head:
        expected = "a bundle with its language head (sinew convert --set lm_head=true)"
        refusals[Capability.SPEAK] = Refusal(expected, "one without")
    return refusals


def _differentiable(leaf: Any) -> Any:
    """Return a copy of a tensor that was created in inference mode. Autograd accepts the copy, but not the original."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def tune_threads(
    infer: Callable[[], object], set_threads: Callable[[int], None], many: int
) -> tuple[int, str]:
    """Measure an inference with one thread and with ``many`` threads, and set the faster number of threads.

    Call the function on the thread that will infer, because a pool of threads belongs to the thread that uses it.
    Threads that wait for each other either sleep or spin (wait in a loop). Waking a sleeping thread costs tens of
    microseconds per matrix product, and a spinning thread loses time when another program needs a core. A policy of a
    few million parameters computes a product faster than it wakes a thread. A large policy gains from every core.
    research/log has the measurements.

    Args:
        infer: Computes one inference. It must have run before.
        set_threads: Sets the number of threads.
        many: The larger number of threads.

    Returns:
        The chosen number of threads, and the reason.
    """
    if many == 1:
        return 1, "this process may use one thread"
    set_threads(many)
    first = _seconds(infer)
    if first > TOO_LONG_S:
        return many, f"one per core; an inference takes {first:.1f} s"
    shared = min(first, *(_seconds(infer) for _ in range(TRIES - 1)))
    set_threads(1)
    alone = min(_seconds(infer) for _ in range(TRIES))
    reason = f"measured: {1e3 * alone:.1f} ms with 1, {1e3 * shared:.1f} ms with {many}"
    if alone <= shared:
        return 1, reason
    set_threads(many)
    return many, reason


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def precision_of(model: Model) -> dict[str, str]:
    """Return the precision of each component's parameters, such as "bf16+fp32".

    The type of most numbers comes first.

    Token tables that stay in their stored precision are not listed, because the model does not compute in this
    precision.
    """
    counts: dict[str, Counter[str]] = {part: Counter() for part in COMPONENTS}
    stores = {name: getattr(module, "store", PLAIN) for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        long = str(parameter.dtype).removeprefix("torch.")
        if word := stores[module].precision(part, WORDS.get(long, long)):
            counts[model.component_of(name)][word] += parameter.numel()
    for sizes in counts.values():
        if any(word.startswith("fp32 (") for word in sizes):
            del sizes["fp32"]  # float32 norms and biases between such layers compute in the same precision
    return {
        part: "+".join(word for word, _ in sizes.most_common()) for part, sizes in counts.items() if sizes
    }

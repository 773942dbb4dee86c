"""Convert observations to model inputs, and model outputs to actions. Every engine and every protocol uses this
module for these conversions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import filterfalse
from typing import TypedDict

import numpy as np

from sinew.bundle.schema import Manifest, Processing
from sinew.core import MAX_SAID, BundleError, Moment, Observation, ObservationError, SinewError, did_you_mean
from sinew.core.fields import MAX_SOLVER_STEPS
from sinew.core.hints import option
from sinew.processing.arrays import KINDS, numbers
from sinew.processing.conditioning import advantage_of, scale_of
from sinew.processing.continuation import Continuation, check_continuation, continuation
from sinew.processing.image import check_frame, empty_frame, prepare_frame
from sinew.processing.normalize import normalizer
from sinew.processing.prompt import Prompter
from sinew.steps.vector.base import apply_steps


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One observation in the form in which a model reads it. The arrays have no batch axis. :meth:`batched` and
    :func:`sinew.processing.stack` add a batch axis.

    In a batch, pixels may have fewer rows than the other arrays, because several prompts may share the same views.
    Row i of the other arrays then uses views i modulo the number of rows of pixels.

    Attributes:
        pixels: The prepared views, float32 [V, channels, H, W], the oldest observation step first.
        camera_mask: bool [V], True for views that exist.
        tokens: Token ids of the prompt, int64 [L].
        token_mask: bool [L], False for padding.
        state: Normalised and padded states, float32 [padded_state_dim], the oldest observation step first.
        frames: Camera frames before the resize, uint8 [h, w, 3] each, for engines that resize on the GPU. ``pixels``
            then contains no views. In a batch, the frames of all observations follow each other.
    """

    pixels: np.ndarray
    camera_mask: np.ndarray
    tokens: np.ndarray
    token_mask: np.ndarray
    state: np.ndarray
    frames: tuple[np.ndarray, ...] = ()

    def batched(self) -> ModelInputs:
        """Return a batch with only this observation. Every array gets a leading axis, and frames stay as they are."""
        pixels, mask, tokens = self.pixels[None], self.camera_mask[None], self.tokens[None]
        return ModelInputs(pixels, mask, tokens, self.token_mask[None], self.state[None], self.frames)

    def part(self, rows: slice) -> ModelInputs:
        """Return some observations of a batch, with a batch axis."""
        views = len(self.frames) // len(self.tokens)
        frames = self.frames[views * rows.start : views * rows.stop]
        pixels, mask, tokens = self.pixels[rows], self.camera_mask[rows], self.tokens[rows]
        return ModelInputs(pixels, mask, tokens, self.token_mask[rows], self.state[rows], frames)

    def alone(self) -> ModelInputs:
        """Return the inputs without the batch axis. The batch must contain only one observation.

        Raises:
            SinewError: The batch contains several observations.
        """
        if len(self.tokens) != 1:
            raise SinewError(f"a batch: expected one observation, got {len(self.tokens)}; pass one at a time")
        (pixels,), (mask,), (tokens,) = self.pixels, self.camera_mask, self.tokens
        (token_mask,), (state,) = self.token_mask, self.state
        return ModelInputs(pixels, mask, tokens, token_mask, state, self.frames)


@dataclass(frozen=True, slots=True)
class Words:
    """A request for text from the language head.

    Attributes:
        most: Largest number of tokens that the head may generate.
        behind: Tokens that are inserted after the text and before the actions; None if no actions follow.
    """

    most: int
    behind: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """One observation, checked and converted to everything that an inference needs.

    Attributes:
        inputs: The model inputs.
        noise: Noise from which the solver starts.
        seed: Seed of the noise; None if the client sent the noise.
        steps: Number of solver steps.
        state: float [D], in the frame and units of the training data, for actions that are relative to it.
        continuation: Actions of the running chunk that the new chunk continues, in model units.
        session: Session of the client.
        time: The observation's own time.
        missing: Cameras without a frame.
        milliseconds: Duration of the preparation.
        unsent: Number of earlier observation steps that the policy reads and the client did not send.
        words: Text that the language head generates first; None for no text.
        adapter: Adapter that computes the observation; "" for the base.
        unconditional: int64 [L], the prompt without the advantage, for classifier-free guidance; None if one prompt is
            enough.
        scale: Scale of the guidance from ``unconditional`` towards ``inputs``.
    """

    inputs: ModelInputs
    noise: np.ndarray
    seed: int | None
    steps: int
    state: np.ndarray
    continuation: Continuation | None
    session: str
    time: float | None
    missing: tuple[str, ...]
    milliseconds: float
    unsent: int
    words: Words | None
    adapter: str
    unconditional: np.ndarray | None
    scale: float


# Smallest value of exponential noise in a request. Policies divide by this noise, so it must not be zero.
SMALLEST_DRAW = np.float32(1e-30)
MOST_SHAPES = 64  # the cache has at most this many valid shapes, because clients choose the shapes


class Allowed(TypedDict, total=False):
    """Which inputs an observation may omit. The keys are names of arguments of :class:`Processor`."""

    allow_missing_cameras: bool
    allow_empty_prompt: bool


def turned_state(recipe: Processing, state: np.ndarray) -> np.ndarray:
    """Convert a robot's state [D] to the coordinate frame and the units of the training statistics."""
    return apply_steps(state, recipe.state_steps) if recipe.state_steps else state


def turned_actions(recipe: Processing, actions: np.ndarray, state: np.ndarray | None) -> np.ndarray:
    """Convert actions [..., D] from the units of the statistics to robot units. ``state`` [D] is needed only
    by processing steps that read the state.
    """
    return apply_steps(actions, recipe.action_steps, state)


class Processor:
    """Converts observations to model inputs and model outputs to actions. Stateless, so several threads may use it.

    Args:
        manifest: The bundle's manifest.
        allow_missing_cameras: Accept observations without a frame for some cameras.
        beside: Another processor with the same tokenizer; None if there is none. The tokenizer needs much memory, so
            both processors share it.
        adapter: Name of the adapter that computes the observations; "" for the base.
        allow_empty_prompt: Accept observations without an instruction if the bundle has none of its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        allow_missing_cameras: bool = False,
        beside: Processor | None = None,
        adapter: str = "",
        allow_empty_prompt: bool = False,
    ):
        self.adapter = adapter
        self.spec, self.recipe = manifest.spec, manifest.processing
        # An observation may lack as many cameras as training replaced by masked images. The caller can allow more.
        usual = max(self.recipe.empty_cameras, self.recipe.optional_cameras)
        self.may_miss = len(self.spec.cameras) if allow_missing_cameras else usual
        if self.recipe.all_cameras:
            self.may_miss = 0
        self._cameras = [camera.name for camera in self.spec.cameras]
        # Pairs (camera, shape) of uint8 frames that have passed `check_frame`. Frames with the same pair are not
        # checked again.
        self._fitting: set[tuple[str, tuple[int, ...]]] = set()
        self._images = {c.name: self.recipe.image.of_camera(i) for i, c in enumerate(self.spec.cameras)}
        opened = None if beside is None else beside.prompter.tokenizer
        self.prompter: Prompter = Prompter(manifest.tokenizer, self.recipe.prompt, opened, allow_empty_prompt)
        recipe, spec = self.recipe, self.spec
        self.state_normalizer = normalizer(recipe.state, recipe.state_parts, spec.state.dim, "state")
        self.action_normalizer = normalizer(recipe.action, recipe.action_parts, spec.action.dim, "action")
        for width, padded in (
            (spec.states_read * self.state_normalizer.width, recipe.padded_state_dim),
            (self.action_normalizer.width, recipe.padded_action_dim),
        ):
            if width > padded:
                raise BundleError(
                    f"a vector of {width} normalised numbers does not fit the model's {padded}; convert the checkpoint"
                    " again"
                )

    def check(self, observation: Observation) -> None:
        """Raise :class:`ObservationError` for the first field that this policy cannot accept."""
        self._checked(observation)
        self._noise(observation)

    def prepare(self, observation: Observation, pixels: bool = True) -> Prepared:
        """Check an observation, tokenise its prompt, normalise its state and resize its frames. Each of these steps
        runs once. Any thread may call this method.

        Args:
            observation: The observation.
            pixels: False leaves uint8 frames as they are, for an engine that resizes them (see :meth:`inputs`).

        Raises:
            ObservationError: The policy cannot accept a field. The message is about the first such field.
        """
        start = time.perf_counter()
        state, normalized, tokens, scale = self._checked(observation)
        unconditional = None
        if scale != 1.0:
            prompt = observation.prompt or self.spec.default_prompt
            unconditional = self.prompter.encode(prompt, normalized[-1])
            # With scale 0, only the prompt without the advantage is needed. The result equals that of a request without
            # an advantage, bit for bit.
            if scale == 0.0:
                tokens, unconditional = unconditional, None
        noise, seed = self.noise(observation)
        return Prepared(
            inputs=self._assemble(observation, normalized, tokens, False, pixels),
            noise=noise,
            seed=seed,
            steps=observation.solver_steps or self.spec.solver_steps,
            state=state,
            continuation=self._continuation(observation, state),
            session=observation.session,
            time=observation.time,
            missing=tuple(filterfalse(observation.images.__contains__, self._cameras)),
            milliseconds=1e3 * (time.perf_counter() - start),
            unsent=self.spec.history - 1 - len(observation.earlier),
            words=self._words(observation),
            adapter=observation.adapter,
            unconditional=unconditional,
            scale=scale,
        )

    def _checked(self, observation: Observation) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Check all fields of an observation. Return the state, the normalised states of all observation steps, the
        tokens and the guidance scale."""
        if observation.adapter != self.adapter:
            raise ObservationError(
                "adapter",
                repr(self.adapter) if self.adapter else "none for this policy",
                repr(observation.adapter)[:80],
            )
        self._check_earlier(observation)
        self._check_images(observation.images)
        self._check_words(observation)
        advantage = self.recipe.prompt.usual_advantage
        if observation.advantage is not None:
            advantage = advantage_of(observation, self.recipe.prompt)
        state, normalized, tokens = self._states(observation, advantage)
        _integer(observation.seed, "seed", 0, (1 << 64) - 1)
        # The reply repeats the time as JSON, which cannot represent infinity.
        if observation.time is not None:
            _vector(observation.time, "time", (), np.float64)
        solver = self.spec.solver
        most = min(solver.most_steps or MAX_SOLVER_STEPS, MAX_SOLVER_STEPS)
        _integer(steps := observation.solver_steps, "solver_steps", solver.fixed_steps or 1, most)
        if steps is not None and steps not in (near := solver.possible(steps)):
            raise ObservationError("solver_steps", " or ".join(map(str, near)), str(steps))
        if (request := observation.continuation) is not None:
            check_continuation(request, self.spec)
        scale = 1.0
        if observation.guidance_scale is not None:
            scale = scale_of(observation, self.recipe.prompt, advantage)
        return state, normalized, tokens, scale

    def inputs(self, observation: Observation, padded: bool = False, pixels: bool = True) -> ModelInputs:
        """Return the model inputs of a checked observation. Cameras have the order of the specification.

        A camera that the observation lacks is omitted.

        Args:
            observation: The observation.
            padded: Also add the masked, empty images and the masked tokens that upstream computes. No other input
                attends to them, and positions count only valid tokens, so the actions are the same. A test compares
                both forms with the reference.
            pixels: False to return uint8 frames as they are, for an engine that resizes them. Float32 frames are
                prepared in any case.
        """
        advantage = advantage_of(observation, self.recipe.prompt)
        _, normalized, tokens = self._states(observation, advantage)
        return self._assemble(observation, normalized, tokens, padded, pixels)

    def _states(self, observation: Observation, advantage: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three results: the newest state; the normalised states of all observation steps, oldest first,
        [steps, width]; and the tokens."""
        normalized = []
        for index, moment in enumerate(observation.earlier):
            state = self.state(moment.state, f"earlier[{index}].state")
            normalized.append(self.state_normalizer.normalize(state))
        state = self.state(observation.state)
        normalized.append(self.state_normalizer.normalize(state))
        tokens = self._tokens(observation, normalized[-1], advantage)
        return state, np.stack(normalized), tokens

    def _assemble(
        self, observation: Observation, normalized: np.ndarray, tokens: np.ndarray, padded: bool, pixels: bool
    ) -> ModelInputs:
        names = [name for name in self._cameras if name in observation.images]
        moments: list[Moment | Observation] = [*observation.earlier, observation]
        # If the model does not mask missing observation steps, copies of the oldest step replace them.
        spare = 0 if self._masked else self.spec.history - len(moments)
        raw = tuple([moment.images[name] for moment in moments for name in names])
        present, frames = len(names) * (spare + len(moments)), list[np.ndarray]()
        if pixels or padded or any(frame.dtype != np.uint8 for frame in raw):
            # A picture that does not change between steps, such as a goal image, is prepared only once. Comparing every
            # 32nd row first is fast, because other pictures already differ in a few rows.
            for n, moment in enumerate(moments):
                for name in names:
                    old, new = moments[n - 1].images[name], moment.images[name]
                    again = n and old.dtype == new.dtype and np.array_equal(old[::32], new[::32])
                    again = again and np.array_equal(old, new)
                    frames.append(frames[-len(names)] if again else prepare_frame(new, self._images[name]))
            frames, raw = frames[: len(names)] * spare + frames, ()
        else:
            raw = raw[: len(names)] * spare + raw
        token_mask = np.ones(len(tokens), bool)
        if padded:
            missing = len(self.spec.cameras) - present if self.recipe.pad_missing_cameras else 0
            frames += [empty_frame(self.recipe.image)] * (missing + self.recipe.empty_cameras)
            tokens, token_mask = self.prompter.pad(tokens)
        image = self.recipe.image
        shape = 0, len(image.mean), image.height, image.width
        stacked = np.stack(frames) if frames else np.empty(shape, np.float32)
        seen = np.arange(len(raw) or len(frames)) < present
        return ModelInputs(stacked, seen, tokens, token_mask, self._padded(normalized), raw)

    @property
    def _masked(self) -> bool:
        """Return True if the model masks missing observation steps, and False if copies of the oldest step
        replace missing steps.
        """
        return self.spec.history_padding == "mask"

    def noise(self, observation: Observation) -> tuple[np.ndarray, int | None]:
        """Return the noise from which the solver starts, float32 [H, padded_action_dim], and its seed (None if the
        client sent the noise).

        If the solver needs D noise arrays, the shape is [D, H, padded_action_dim]. Seeded noise is drawn by numpy's
        PCG64, so it is the same on every device and engine.
        """
        sent, kind = self._noise(observation), self.spec.solver.noise
        if sent is not None:
            return sent, None
        *draws, rows, _ = self.spec.noises(observation.solver_steps)
        shape = (*draws, rows, self.recipe.padded_action_dim)
        if kind == "zeros":
            return np.zeros(shape, np.float32), None
        seed = secrets.randbits(63) if observation.seed is None else int(observation.seed)
        generator = np.random.default_rng(seed)
        if kind == "uniform":
            return 2 * generator.random(shape, np.float32) - 1, seed
        if kind == "exponential":
            return np.maximum(generator.standard_exponential(shape, np.float32), SMALLEST_DRAW), seed
        return generator.standard_normal(shape, np.float32), seed

    def actions(self, chunk: np.ndarray, observation: Observation) -> np.ndarray:
        """Convert model output [H, padded_action_dim] to finite float32 [H, action_dim] in robot units."""
        return self.finish(chunk, self.state(observation.state))

    def finish(self, chunk: np.ndarray, state: np.ndarray, normalized: bool = True) -> np.ndarray:
        """Convert model output to actions, like :meth:`actions`, with the state of a :class:`Prepared` observation.

        Args:
            chunk: The model output.
            state: The prepared state.
            normalized: False for a chunk that the engine has already converted to the statistics' units,
                [H, action_dim].
        """
        chunk = chunk[self.recipe.first_row :][: self.spec.chunk_size]
        actions = (
            self.action_normalizer.unnormalize(chunk[:, : self.action_normalizer.width])
            if normalized
            else chunk
        )
        if self.recipe.action_steps:
            actions = turned_actions(self.recipe, actions, state)
        if not np.isfinite(actions).all():
            raise SinewError(
                "the model produced actions that are not finite; check the weights with `sinew doctor`"
            )
        return np.ascontiguousarray(actions, np.float32)

    def _continuation(self, observation: Observation, state: np.ndarray) -> Continuation | None:
        if (request := observation.continuation) is None:
            return None
        steps, width = self.recipe.action_steps, self.recipe.padded_action_dim
        first = self.recipe.first_row
        return continuation(request, self.spec, self.action_normalizer, steps, state, width, first)

    def _check_earlier(self, observation: Observation) -> None:
        most = self.spec.history - 1
        if not isinstance(observation.earlier, (list, tuple)):
            raise ObservationError(
                "earlier", "a list of observation steps", type(observation.earlier).__name__
            )
        if len(observation.earlier) > most:
            expected = (
                f"at most {most}, because this policy reads {most + 1}" if most else "none for this policy"
            )
            raise ObservationError("earlier", expected, f"{len(observation.earlier)} observation steps")
        for index, moment in enumerate(observation.earlier):
            if not isinstance(moment, Moment):
                raise ObservationError(f"earlier[{index}]", "a Moment", type(moment).__name__)
            self._check_images(moment.images, f"earlier[{index}].")

    def _check_words(self, observation: Observation) -> None:
        """Raise :class:`ObservationError` if the fields that request a text contradict each other."""
        for name in ("subtask", "text_only"):
            if not isinstance(value := getattr(observation, name), (bool, np.bool_)):
                raise ObservationError(name, "true or false", type(value).__name__)
        if not isinstance(observation.question, str):
            raise ObservationError("question", "a string", type(observation.question).__name__)
        _integer(observation.text_tokens, "text_tokens", 1, MAX_SAID)
        if observation.question and observation.subtask:
            raise ObservationError("question", "only one of question and subtask", "both")
        if (name := observation.asks) and not (observation.question or observation.subtask):
            raise ObservationError(name, "a subtask or a question together with it", "neither")
        if name and observation.tokens is not None:
            raise ObservationError(
                "tokens", f"none together with {name}, because the policy writes that text", "tokens"
            )
        if name:
            self._check_unconditioned(observation, name)
        if not observation.acts:
            for field in ("previous", "noise", "solver_steps"):
                if getattr(observation, field) is not None:
                    raise ObservationError(field, "no value if only text is requested", "one")

    def _check_unconditioned(self, observation: Observation, kind: str) -> None:
        """Reject a request that contains an advantage and also requests a text. The prompt of a text has no place for
        an advantage. A policy that was trained with both reads the advantage after the text.

        Args:
            observation: The observation.
            kind: The field that requests the text.
        """
        if observation.guidance_scale is not None:
            raise ObservationError(
                "guidance_scale", f"none together with {kind}, which uses only one prompt", "one"
            )
        if observation.advantage:
            expected = f"none together with {kind}, because that prompt contains no advantage"
            raise ObservationError("advantage", expected, repr(observation.advantage)[:80])
        usual = self.recipe.prompt.usual_advantage
        if usual and observation.advantage is None and observation.acts:
            raise ObservationError(
                "advantage",
                f"an empty text together with {kind}, because that prompt cannot contain the usual advantage ({usual})",
                "none",
            )

    def _words(self, observation: Observation) -> Words | None:
        """Return the text request that a checked observation contains; None if it contains none."""
        recipe = self.recipe.prompt.text
        if not observation.asks or recipe is None:
            return None
        return Words(
            observation.text_tokens or recipe.most, self.prompter.behind if observation.acts else None
        )

    def _check_images(self, images: Mapping[str, np.ndarray], prefix: str = "") -> None:
        names = self._cameras
        if not hasattr(images, "items"):
            raise ObservationError(f"{prefix}images", "a mapping of camera names", type(images).__name__)
        for name, frame in images.items():
            if name not in names:
                free = [camera for camera in names if camera not in images]
                hint = did_you_mean(str(name), free) or (
                    f" ({option('rename', {str(name): free[0]})} maps it)" if free else ""
                )
                raise ObservationError(
                    f"{prefix}images.{name}", f"one of the cameras {names}", f"an unknown camera{hint}"
                )
            plain = type(frame) is np.ndarray and frame.dtype == np.uint8
            if not (plain and (name, frame.shape) in self._fitting):
                check_frame(frame, f"{prefix}images.{name}", self._images[name])
                if plain and len(self._fitting) < MOST_SHAPES:
                    self._fitting.add((name, frame.shape))
        if not images:
            raise ObservationError(f"{prefix}images", f"at least one of the cameras {names}", "none")
        missing = [name for name in names if name not in images]
        if len(missing) > self.may_miss:
            hint = "" if self.recipe.all_cameras else f" ({option('allow_missing_cameras')} runs without)"
            raise ObservationError(
                f"{prefix}images.{missing[0]}", f"a frame of each of the cameras {names}", f"none{hint}"
            )

    def state(self, value: object, name: str = "state") -> np.ndarray:
        """Check a state, and convert it to the coordinate frame and the units of the training data, [D].

        ``name`` is the field's name for messages.
        """
        state = _vector(value, name, (self.spec.state.dim,), self.state_normalizer.dtype)
        return turned_state(self.recipe, state)

    def model_state(self, state: np.ndarray) -> np.ndarray:
        """Convert the result of :meth:`state` to the form that the model reads, float32 [padded_state_dim]."""
        return self._padded(self.state_normalizer.normalize(state)[None])

    def _padded(self, normalized: np.ndarray) -> np.ndarray:
        """Convert the normalised states of the last observation steps, [steps, width], to one vector. Each state is
        padded first."""
        count = self.spec.states_read
        state, normalized = (
            np.zeros((count, self.recipe.padded_state_dim // count), np.float32),
            normalized[-count:],
        )
        first, width = count - len(normalized), normalized.shape[1]
        state[first:, :width] = normalized
        if not self._masked:
            state[:first, :width] = normalized[0]
        return state.reshape(-1)

    def _noise(self, observation: Observation) -> np.ndarray | None:
        if observation.noise is None:
            return None
        if self.spec.solver.noise == "zeros":
            raise ObservationError("noise", "none, because this policy starts from zeros", "noise")
        noise = _vector(observation.noise, "noise", self.spec.noises(observation.solver_steps))
        if self.spec.solver.noise == "exponential" and (least := float(noise.min())) <= 0:
            raise ObservationError(
                "noise", "numbers above 0, because this policy divides by them", f"{least:g}"
            )
        return noise

    def _tokens(self, observation: Observation, state: np.ndarray, advantage: str) -> np.ndarray:
        if not isinstance(observation.prompt, str):
            raise ObservationError("prompt", "text", type(observation.prompt).__name__)
        if observation.tokens is not None:
            if observation.prompt:
                raise ObservationError("tokens", "either a prompt or tokens", "both")
            return self.prompter.check_tokens(observation.tokens)
        if observation.question:
            return self.prompter.encode_asked("question", observation.question, state)
        prompt = observation.prompt or self.spec.default_prompt
        if observation.subtask:
            return self.prompter.encode_asked("subtask", prompt, state)
        return self.prompter.encode(prompt, state, advantage)


def _vector(value: object, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Return ``value`` as an array of finite numbers with exactly this shape.

    Raises:
        ObservationError: The value has another shape, or a number is not finite.
    """
    array = value if type(value) is np.ndarray and value.dtype.kind in KINDS else numbers(name, value)
    if array.shape != shape:
        raise ObservationError(name, f"shape {list(shape)}", f"shape {list(array.shape)}")
    if array.dtype == dtype:
        array = array.copy()
    else:
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
    if not (finite := np.isfinite(array)).all():
        bad = np.flatnonzero(~finite)[0]
        raise ObservationError(name, "finite numbers", f"{array.reshape(-1)[bad]} at index {bad}")
    return array


def _integer(value: object, name: str, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ObservationError(name, "an integer", type(value).__name__)
    if not low <= int(value) <= high:
        raise ObservationError(
            name, str(low) if low == high else f"an integer from {low} to {high}", str(value)
        )

"""The facade: a bundle on a device, from observation to action chunk.

Imports no torch: a policy whose engine is ONNX Runtime runs where torch is not installed.
"""

from __future__ import annotations

import html
import inspect
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.open_policy import Limit, OpenPolicy, asking

from sinew.bundle import EXPORTED, Bundle, statistics
from sinew.bundle.adapter import check_name, fitted, open_adapter, unknown
from sinew.bundle.gguf_file import watch
from sinew.bundle.rename import rename_cameras, renamed
from sinew.bundle.schema import KEY_HEADER
from sinew.capabilities import Capabilities
from sinew.convert.sources import resolve
from sinew.core import (
    ActionChunk,
    BundleError,
    Moment,
    Observation,
    ObservationError,
    SinewError,
    did_you_mean,
)
from sinew.engine.backend import ASKED, BACKENDS, REFERENCE, choose, other_precision
from sinew.engine.capability import Capability
from sinew.engine.engine import Engine
from sinew.engine.fingerprint import fingerprint
from sinew.engine.watch import Watch
from sinew.processing import (
    Allowed,
    BatchKey,
    ModelInputs,
    Prepared,
    Processor,
    Words,
    batch_key,
    given,
    stack_prompts,
)
from sinew.processing.image import larger

log = logging.getLogger(__name__)


def load(
    path: str | Path,
    device: str | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    **options: Any,
) -> Policy:
    """Load what ``path`` names: a bundle, a checkpoint, a name of the hub (:func:`sinew.convert.sources.resolve`).

    ``options``: ``rename``, ``threads``, ``adapters``, ``reuse`` and what else ``help(sinew.Policy)`` explains.
    """
    known = list(inspect.signature(Policy).parameters)[1:]
    for word in options:
        if word not in known:
            raise TypeError(
                f"sinew.load: expected {', '.join(known)}, got {word!r}{did_you_mean(word, known)}"
            )
    policy = Policy(open_bundle(path), device, dtype, engine, **options)
    policy.source = str(path)
    return policy


def open_bundle(path: str | Path) -> Bundle:
    """Open the bundle of what ``path`` names (:func:`sinew.convert.sources.resolve`); reads no weights, imports no
    torch unless a checkpoint has to be converted."""
    found = resolve(path)
    return Bundle(found / EXPORTED if found.is_dir() else found)


def open_adapters(bundle: Bundle, given: Mapping[str, str | Path]) -> dict[str, Bundle]:
    """Open the adapters of a bundle by name; reads no weights. Raises :class:`BundleError` for those of another."""
    for name in given:
        check_name(name)
    return {name: open_adapter(Path(file), bundle) for name, file in given.items()}


def identity(bundle: Bundle) -> dict[str, str]:
    """Return what tells a bundle from another, ready for JSON.

    Returns:
        ``hash``: SHA-256 of the header, which has the hash of every tensor in it; of a bundle without hashes,
        :func:`sinew.engine.fingerprint.fingerprint`. ``version``: of Sinew that wrote it. ``date``: of the
        file, in UTC.
    """
    written = datetime.fromtimestamp(bundle.path.stat().st_mtime, UTC)
    header = bundle.file.metadata.get(KEY_HEADER)
    return {
        "hash": fingerprint(bundle.path) if bundle.hashes is None else str(header),
        "version": bundle.manifest.provenance.converter,
        "date": written.isoformat(timespec="seconds"),
    }


class Policy(OpenPolicy):
    """A loaded policy. ``infer`` is serialised by a lock; everything else may be called from any thread.

    device: "cpu", "cuda:N"; None or "auto" takes a GPU where PyTorch has one.

    dtype: "fp32", "bf16", "fp16", or "native" for what the bundle stores, component by component; None chooses by
    device and engine. Weights whose stored type is the chosen one stay in the file's memory map; the others are
    converted once, here.

    engine: "eager", the reference; "plan", the same model after the rewrites of ``sinew.engine.plan``; "cpu", that
    over low-bit weights as the bundle stores them, with compiled kernels (the others widen such weights); "onnx",
    the planned model in ONNX Runtime, exported beside the bundle on first use (which needs torch; afterwards
    nothing does); "cuda", the planned model with our kernels in one CUDA graph. None or "auto" takes the fastest that
    is installed, fits the device, follows the bundle's recipe and is proved for it. ``choice`` has the reasons.

    threads: for compute. None gives ONNX Runtime one per usable core, and lets ``warm_up`` find out by trying
    whether PyTorch is faster with one or with its own choice.
    providers: of ONNX Runtime, in order of preference, by its names or short ones such as "cuda".
    ignore_recipe: run a quantised bundle with an engine that does not compute its recipe; said in every report.
    rename: the robot's name of a camera -> the bundle's; from then on the camera has the robot's name.
    allow_missing_cameras: accept observations without a frame for some cameras; each chunk then carries a warning.
    allow_empty_prompt: accept observations without an instruction where the bundle has none of its own, for policies
    that were trained without one.
    adapters: name -> file of ``sinew convert --no-merge``: over the bundle's weights, which stay as they are, each
    computes the observations that name it, with its own statistics. Requests that name none get the bundle itself.
    prepared: take what ``sinew prepare`` found to be faster here also where it can do less, as ``sinew serve`` does.
    reuse: keep what observations repeat to the byte, image tokens and the context of the prefix, for the next ones;
    answers are the same bits, and ``timing`` says what was not computed (:mod:`sinew.engine.reuse`). It begins with
    ``warm_up``, or with the first inference, which takes two more passes of the vision tower to try it.
    stream: take an engine that runs a stream (``sinew.stream``) whose whole chunks are continued so: "none", "guided",
    "no-jacobian" or "ramp". None: there is none.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        *,
        threads: int | None = None,
        providers: Sequence[str] = (),
        ignore_recipe: bool = False,
        rename: Mapping[str, str] | None = None,
        allow_missing_cameras: bool = False,
        allow_empty_prompt: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
        prepared: bool = False,
        reuse: bool = False,
        stream: str | None = None,
    ):
        self.bundle = bundle
        self.source = str(bundle.path)  # as the user typed it
        self._identity = identity(bundle)  # of the file as it was opened
        self.adapters = open_adapters(bundle, adapters or {})
        self._files = [bundle.file.in_use, *(each.file.in_use for each in self.adapters.values())]
        self.manifest = own = bundle.manifest
        if rename:
            spec = rename_cameras(own.spec, rename)
            self.manifest = replace(own, spec=spec, seen=renamed(own.seen, own.spec, spec))
        self.spec = self.manifest.spec
        for note in statistics.notes(self.spec, own.processing):
            log.warning("%s: %s", self.spec.name, note)
        self.choice = choose(
            bundle,
            engine,
            None if device is None else str(device),  # torch.device's, too
            dtype,
            threads=threads,
            providers=providers,
            ignore_recipe=ignore_recipe,
            adapters=self.adapters,
            prepared=prepared,
            stream=stream,
        )
        self.engine_name, self.dtype = self.choice.engine, self.choice.options.dtype
        allowed: Allowed = {
            "allow_missing_cameras": allow_missing_cameras,
            "allow_empty_prompt": allow_empty_prompt,
        }
        self.processor = Processor(self.manifest, **allowed)
        self.processors = {"": self.processor}
        for name, each in self.adapters.items():
            adapted = fitted(each, self.manifest)
            self.processors[name] = Processor(adapted, beside=self.processor, adapter=name, **allowed)
        opened = BACKENDS[self.engine_name].open(bundle, self.choice.options)
        self._engine: Engine | None = opened
        self.facts = opened.facts
        self.capabilities = Capabilities.of(self.manifest, self.facts, self.engine_name)
        if reuse and (problem := self.capabilities.why_not(Capability.REUSE)):
            raise SinewError(f"reuse: {problem}")
        self.reuse_reason = "not tried yet" if reuse else "off"
        self._reuse_open = reuse
        # Of each camera the shape that was looked at last, () once it was said that it is larger than what is read
        self._looked_at: dict[str, tuple[int, ...]] = {}
        self.threads_reason = "one per core" if threads is None else ASKED
        self._threads_open = threads is None
        self._files += map(watch, self.facts.files)
        self._lock = threading.RLock()  # a run may begin between two steps of another, on the same thread

    def __repr__(self) -> str:
        cameras = ", ".join(camera.name for camera in self.spec.cameras)
        return (
            f"<sinew.Policy {self.spec.name!r} ({self.spec.architecture}), cameras {cameras},"
            f" state {self.spec.state.dim}, action {self.spec.action.dim}, chunks of {self.spec.chunk_size};"
            f" engine {self.engine_name} on {self.device}, {self.precision_text}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what goes in, what comes out, what computes it and why."""
        spec, about = self.spec, self.describe()
        rows = {
            "policy": f"{spec.name} ({spec.architecture})",
            "cameras": ", ".join(f"{each.name} {each.height}x{each.width}" for each in spec.cameras),
            "state": ", ".join(spec.state.labels) or f"{spec.state.dim} numbers",
            "action": f"{', '.join(spec.action.labels) or f'{spec.action.dim} numbers'}; chunks of {spec.chunk_size}",
            **{name: f"{about[name]}: {about[f'{name}_reason']}" for name in ("engine", "device", "dtype")},
        }
        cells = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table>{''.join(cells)}</table>"

    @property
    def keeps_frames(self) -> bool:
        """Return False: frames are not looked at any more once the actions are there."""
        return False

    @property
    def identity(self) -> dict[str, str]:
        """Return which bundle this is: its ``hash``, ``source``, ``version`` and ``date`` (:func:`identity`).

        ``source`` is what was typed to load it. Of an absolute path it has the last part, as clients may read it.
        """
        source = Path(self.source).name if Path(self.source).is_absolute() else self.source
        return {**self._identity, "source": source}

    def describe(self) -> dict[str, Any]:
        """Return what runs the policy and why, ready for JSON: for metadata, reports and ``sinew doctor``."""
        return {
            "identity": self.identity,
            "engine": self.engine_name,
            "engine_reason": self.choice.engine_reason,
            "device": self.device,
            "device_reason": self.choice.device_reason,
            "dtype": self.precision_text,
            "dtype_reason": self.dtype_reason,
            "precision": self.precision,
            "providers": list(self.facts.providers),
            "assigned": self.facts.assigned,
            "ignored_recipe": self.choice.ignored,
            **self.capabilities.to_dict(),
            "reuse": self.reuse_reason,
            "adapters": {
                name: {"policy": each.manifest.name, "hash": identity(each)["hash"]}
                for name, each in self.adapters.items()
            },
        }

    def metadata(self) -> dict[str, Any]:
        """Return what a server with default settings would state about this policy.

        Returns:
            ``policy``: what the policy reads and writes, with the limits of its actions. ``server``: what computes it
            (:meth:`describe`).
        """
        from sinew.processing.safety import Safety

        described = self.spec.to_dict()
        described["action"]["limits"] = Safety(self.processor).limits()
        return {"policy": described, "server": self.describe()}

    @property
    def engine(self) -> Engine:
        """What computes. Raises :class:`ClosedError` after :meth:`close`."""
        if self._engine is None:
            self._refuse_closed()
        assert self._engine is not None
        return self._engine

    @property
    def device(self) -> str:
        """Return what computes, such as "cpu" or "cuda:0"."""
        return self.facts.device

    @property
    def precision(self) -> dict[str, str]:
        """Component -> the precision in which it really computes: fp32, bf16, fp16, int8, int8-rows, fp8."""
        return dict(self.facts.precision)

    @property
    def precision_text(self) -> str:
        """The same for people, with the recipe that is not followed, if that is so."""
        kinds = self.precision
        words = next(iter(kinds.values()), self.dtype) if len(set(kinds.values())) < 2 else None
        text = words or ", ".join(f"{part} {kind}" for part, kind in kinds.items())
        return (
            f"{text} (the bundle's recipe is IGNORED: {self.choice.ignored})" if self.choice.ignored else text
        )

    @property
    def dtype_reason(self) -> str:
        """Why the weights have their precision."""
        reason = "the bundle's recipe" if self.recipe else self.choice.dtype_reason
        return f"{reason}; {other_precision()}" if reason.startswith(REFERENCE) else reason

    @property
    def threads(self) -> int:
        """For compute."""
        return self.engine.threads

    @property
    def recipe(self) -> dict[str, str]:
        """Precision of each component that the engine quantises; empty where it computes as ``dtype`` says."""
        return dict(self.facts.recipe)

    @property
    def padded_state_dim(self) -> int:
        """Width to which the model pads states; what vla.cpp clients send."""
        return self.manifest.processing.padded_state_dim

    @property
    def padded_action_dim(self) -> int:
        """Width of the model's own action rows; what vla.cpp clients receive."""
        return self.manifest.processing.padded_action_dim

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's weights, as the engine holds them."""
        return self.facts.weights_nbytes

    def check(self, observation: Observation | Mapping[str, Any]) -> None:
        """Raise :class:`ObservationError` for a field that this policy cannot take; computes nothing."""
        observation = self._taken(observation)
        self.processor_of(observation).check(observation)

    def infer(
        self,
        observation: Observation | Mapping[str, Any],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> ActionChunk:
        """One action chunk, float32 [H, action_dim] in world units.

        observation: also with PIL images, torch tensors, or LeRobot's flat keys (:mod:`sinew.processing.given`).
        Raises :class:`ObservationError` for a bad observation, between two stages :class:`CancelledError` once
        ``cancel`` is set and RequestTimeout after ``timeout`` seconds, :class:`BundleError` when a file of weights was
        changed in place, and ClosedError after :meth:`close`.
        """
        if timeout is None:
            return self.run(self.prepare(observation), cancel=cancel)
        with Limit(timeout, cancel) as limit:
            return self.run(self.prepare(observation), cancel=limit)

    def infer_all(
        self,
        observations: Sequence[Observation | Mapping[str, Any]],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> list[ActionChunk | SinewError]:
        """Return the chunks for several observations, in their order. Those of one :meth:`batch_key` are one inference,
        in float32 within 1e-5 of what :meth:`infer` gives for each; where the engine takes none (``unbatched`` says
        why), one by one.

        An error of one of them stands in its place. Raises what concerns them all, as :meth:`infer` does.
        """
        self._refuse_closed()
        found: list[Any] = []
        kinds: dict[Any, list[int]] = {}
        with Limit(timeout, cancel) as limit:
            for index, each in enumerate(observations):
                try:
                    found.append(self.prepare(each))
                except SinewError as error:
                    found.append(error)
                    continue
                key = None if self.unbatched else self.batch_key(found[-1])
                kinds.setdefault(index if key is None else key, []).append(index)
            for members in kinds.values():
                outcomes = self.run_batch([found[index] for index in members], cancel=limit)
                for index, outcome in zip(members, outcomes, strict=True):
                    found[index] = outcome
        return found

    def ask(
        self,
        observation: Observation | Mapping[str, Any],
        question: str,
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> str:
        """Return what the language head answers to a question about an observation, at most ``max_tokens`` tokens; the
        likeliest one each time. ``cancel`` is looked at between two of them. Raises what :meth:`infer` does."""
        return self.infer(asking(observation, question, max_tokens), timeout=timeout, cancel=cancel).text

    def subtask(
        self,
        observation: Observation | Mapping[str, Any],
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> str:
        """Return the subtask that the language head says of an observation and its instruction, without actions, as
        :meth:`ask` does. An observation with ``subtask`` has both."""
        return self.infer(asking(observation, None, max_tokens), timeout=timeout, cancel=cancel).text

    def prepare(self, observation: Observation | Mapping[str, Any]) -> Prepared:
        """The first half of :meth:`infer`, which needs no lock: check, tokenise, normalise, resize.

        A server does it while another observation is computed. Raises :class:`ObservationError`.
        """
        self._refuse_closed()
        observation = self._taken(observation)
        processor = self.processor_of(observation)
        member = processor.prepare(observation, pixels=not self.facts.takes_frames)
        self._say_larger(observation)
        return member

    def _say_larger(self, observation: Observation) -> None:
        """Say of each camera, once, that it sends far more pixels than the policy reads."""
        known = self._looked_at
        for camera in self.spec.cameras:
            frame = observation.images.get(camera.name)
            if (
                frame is None
                or known.get(camera.name) in ((), frame.shape)
                or frame is self._grey[camera.name]
            ):
                continue
            known[camera.name] = frame.shape
            trained = camera.height, camera.width
            image = self.manifest.processing.image
            if text := larger(frame, image, trained, here=not self.facts.takes_frames):
                known[camera.name] = ()
                # Where training had the same, another resolution is a choice, and no mistake to warn of
                level = logging.INFO if frame.shape[:2] == trained else logging.WARNING
                log.log(level, "camera %s: %s", camera.name, text)

    def _taken(self, found: Observation | Mapping[str, Any]) -> Observation:
        """Return an observation in our form. Raises :class:`ObservationError` for what this engine cannot do of it."""
        observation = given.observation(found, self.spec)
        self.capabilities.check(observation, self.spec)
        return observation

    def processor_of(self, observation: Observation) -> Processor:
        """Return what prepares an observation: its adapter's. Raises :class:`ObservationError` for one that is not
        known, with those that are."""
        name: object = observation.adapter
        if not isinstance(name, str) or name not in self.processors:
            raise ObservationError("adapter", *unknown(name, self.adapters))
        return self.processors[name]

    def engine_of(self, adapter: str) -> Engine:
        """Return what computes with an adapter, by a name that :meth:`prepare` has taken; the base for ""."""
        return self.engine.adapters[adapter] if adapter else self.engine

    def run(
        self,
        prepared: Prepared,
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> ActionChunk:
        """The second half, one at a time: from what :meth:`prepare` returned to actions. ``between`` is called after
        each step of the solver; another run may begin in it where ``pauses`` is True."""
        (outcome,) = self.run_batch([prepared], cancel=cancel, between=between)
        if isinstance(outcome, SinewError):
            raise outcome
        return outcome

    def run_batch(
        self,
        members: Sequence[Prepared],
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> list[ActionChunk | SinewError]:
        """Run several observations of one :func:`sinew.processing.batch_key` at once, in float32 within 1e-5 of what
        :meth:`run` gives for each (docs/fleet.md). An error of one of them stands in its place and harms no other.

        Raises :class:`SinewError` for what concerns them all: an engine without batches, members that do not fit
        together, ``cancel``, a changed file of weights.
        """
        first = members[0]
        guidance: Any = None
        processor = self.processors[first.adapter]
        if len(members) > 1:
            if self.unbatched:
                raise SinewError(f"a batch of {len(members)}: {self.unbatched}")
            if None in (keys := {self.batch_key(member) for member in members}) or len(keys) > 1:
                raise SinewError("a batch: expected observations of one batch_key")
        noises = [member.noise for member in members]
        noise = np.stack(noises) if len(noises) > 1 else noises[0][None].copy()  # [B, H, A]
        if first.continuation is not None:
            from sinew.engine.guidance import guide

            wanted = [member.continuation for member in members if member.continuation is not None]
            guidance, noise = guide(wanted, self.spec.solver, noise, self.engine_of(first.adapter).place)
        if first.unconditional is not None:
            from sinew.engine.guidance import ClassifierFree

            scales = np.array([member.scale for member in members], np.float32)
            guidance = ClassifierFree(scales, self.engine_of(first.adapter).place, guidance)
        alone = len(members) == 1 and first.unconditional is None
        inputs = first.inputs.batched() if alone else stack_prompts(members, processor.recipe.prompt)
        with self._lock:
            self.check_files()  # before the weights are read: of a truncated file that would end the process
            start, watch = time.perf_counter(), Watch(cancel, between=between)
            if self._reuse_open:
                self._start_reuse()
            engine = self.engine_of(first.adapter)
            text, context = "", None
            if first.words is None:
                chunks = engine.run(inputs, noise, first.steps, guidance, watch)
            else:
                text, context = self._say(engine, inputs, first.words, watch)
                chunks = (
                    np.zeros((1, 0, self.spec.action.dim), np.float32)
                    if first.words.behind is None
                    else engine.solve(context, noise, first.steps, guidance, watch)
                )
            computed = time.perf_counter()
            found = [self._finished(chunk, member) for chunk, member in zip(chunks, members, strict=True)]
            end = time.perf_counter()
            self.check_files()
        return [
            actions
            if isinstance(actions, SinewError)
            else ActionChunk(
                actions,
                watch.timing(
                    len(members),
                    postprocess_ms=1e3 * (end - computed),
                    preprocess_ms=member.milliseconds,
                    total_ms=1e3 * (end - start) + member.milliseconds,
                ),
                member.seed if len(actions) else None,
                member.session,
                member.time,
                self.warnings(member),
                text=text,
                adapter=member.adapter,
            )
            for actions, member in zip(found, members, strict=True)
        ]

    def _say(self, engine: Engine, inputs: ModelInputs, words: Words, watch: Watch) -> tuple[str, Any]:
        """Return what the language head says, and what the head of actions takes of prompt and words."""
        end = self.manifest.processing.prompt.eos_token_id
        context, said = engine.say_text(inputs, words.most, end, words.behind, watch)
        return self.processor.prompter.words(said), context

    def read_context(self, prepared: Prepared, form: str) -> bytes:
        """Return what the head needs of an observation, packed (:mod:`sinew.engine.contexts`). One at a time.

        Raises :class:`SinewError` for a head that chooses tokens where ``form`` rounds.
        """
        from sinew.engine.contexts import pack

        if prepared.words is not None:
            raise SinewError("context: expected an observation without words to be said, got one with them")
        if self.facts.chooses_tokens and form != "fp32":
            kind = self.spec.architecture
            raise SinewError(f"context: expected fp32 for {kind}, whose head chooses tokens, got {form}")
        if prepared.adapter:
            raise ObservationError("adapter", "none: the robot's head is the base's", repr(prepared.adapter))
        if prepared.unconditional is not None:
            raise SinewError(
                f"guidance_scale: expected 0, 1 or none of a policy in two places, got {prepared.scale:g}"
            )
        with self._lock:
            self.check_files()
            context = self.engine.read(prepared.inputs.batched())
            self.check_files()
        return pack(context, form)

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Take other weights between two inferences, by their names in the bundle: tensors or arrays, which are copied;
        those that are not named stay. Requests that wait are computed with the new ones; none is dropped.

        Raises :class:`SinewError` for names, shapes and numbers that do not fit, and for an engine that cannot
        (all but eager compute with weights that they have rewritten); the old ones then stay.
        """
        with self._lock:
            self.engine.exchange(weights)

    def batch_key(self, prepared: Prepared) -> BatchKey | None:
        """Return what other observations must have in common with this one to be run with it; None for one that is to
        be told in words, which are said for one alone."""
        if prepared.words is not None:
            return None
        key = batch_key(prepared)
        if self.facts.exact_lengths:
            return key._replace(prompt=len(prepared.inputs.tokens))
        return key

    def cost_key(self, prepared: Prepared) -> Hashable:
        """Return what other observations that take equally long have in common with this one."""
        words = prepared.words
        return (
            batch_key(prepared) if words is None else (batch_key(prepared), words.most, words.behind is None)
        )

    @property
    def pauses(self) -> bool:
        """Return True if another run may begin between two steps of one."""
        return Capability.STREAM not in self.capabilities.refusals

    def _finished(self, chunk: np.ndarray, member: Prepared) -> np.ndarray | SinewError:
        if not len(chunk):
            return chunk
        try:
            processor = self.processors[member.adapter]
            return processor.finish(chunk, member.state, normalized=not self.facts.world_units)
        except SinewError as error:
            return error

    @property
    def unbatched(self) -> str:
        """Return why this policy computes observations one at a time, "" if it can compute several at once."""
        return self.capabilities.why_not(Capability.BATCH)

    def _release(self) -> None:
        """Let go of engine and weights, after the inference that runs."""
        with self._lock:
            self._engine = None

    def problem(self) -> str | None:
        """Return a sentence if a file of weights was written to or truncated since it was loaded, else None."""
        for file in self._files:
            if problem := file.problem():
                return problem
        return None

    def check_files(self) -> None:
        """Raise :class:`BundleError` if a file of weights was written to or truncated since it was loaded."""
        if problem := self.problem():
            raise BundleError(problem)

    def warm_up(self) -> ActionChunk:
        """Inference on grey frames: pages the weights in, lets torch allocate and pick its kernels, records the CUDA
        engine's graphs for frames of the declared sizes, and settles the number of threads where it was left open.
        Call on the thread that will infer."""
        observation = self.dummy_observation()
        reuse, self._reuse_open = self.reuse_reason != "off", False
        for engine in (self.engine, *self.engine.adapters.values()):
            engine.reuse = None  # what is measured here is computed
        chunk = self.infer(observation)
        inputs = self.prepare(observation).inputs.batched()
        self.engine.warm(inputs, self.spec.solver_steps, self.spec.max_prompt_tokens)
        for name in self.adapters:
            self.infer(replace(observation, adapter=name))
        if self._threads_open:
            self._threads_open = False
            self.threads_reason = (
                self.engine.tune_threads(lambda: self.infer(observation)) or self.threads_reason
            )
        if reuse:
            self._start_reuse()
        return chunk

    def _start_reuse(self) -> None:
        self._reuse_open = False
        inputs = self.prepare(self.dummy_observation()).inputs.batched()
        found = [
            engine.start_reuse(inputs) for engine in (self.engine, *self.engine.adapters.values())
        ]  # each has weights of its own
        apart = next(filter(None, found), "")
        self.reuse_reason = f"the prefix, but no single view: {apart}" if apart else "views and the prefix"

    @cached_property
    def _grey(self) -> dict[str, np.ndarray]:
        return {c.name: np.full((c.height, c.width, 3), 128, np.uint8) for c in self.spec.cameras}

    def dummy_observation(self) -> Observation:
        """A valid observation of the spec's shapes: grey frames, zero state but for choices, a short instruction."""
        images = dict(self._grey)
        state = np.zeros(self.spec.state.dim, np.float32)
        for step in self.processor.recipe.state_steps:
            if step.choices:
                state[list(step.dims)] = step.choices[0]
        earlier = (Moment(images, state),) * (self.spec.history - 1)
        return Observation(images, state, prompt="pick up the cube", seed=0, earlier=earlier)

    def warnings(self, member: Prepared) -> tuple[str, ...]:
        """Return what the answer to an observation is computed without, in sentences."""
        names, count = ", ".join(member.missing), self.spec.history - member.unsent
        found = [f"no frame for {names}: the policy ran without"] if names else []
        if member.unsent and self.spec.history_padding == "repeat":
            found.append(
                f"earlier: the policy reads {self.spec.history} moments and got {count}; the oldest stands for the rest"
            )
        elif member.unsent and count == 1:
            found.append(
                f"earlier: the policy reads {self.spec.history} moments, {self.spec.history_stride} control steps"
                " apart, and got 1, as only an episode's start has"
            )
        if self.choice.ignored:
            found.append(f"the bundle's recipe is ignored: {self.choice.ignored}")
        return tuple(found)

"""The stream of one robot: its newest inputs, the prefix of the newest frame, and the head runs with this prefix. The
prefix is the model's result for a frame and the instruction. A head run computes actions from it.

Three callers never wait for each other. The robot adds frames and samples, and only the newest ones are used.
The slow loop calls :meth:`Session.read`, which computes a new prefix and then replaces the prefix in use. The
fast loop calls :meth:`Session.run`. Each replacement writes a single reference.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.control.windows import MAX_DELAY
from sinew_client.untrusted import shown

from sinew.core import MAX_SAID, RTC, Observation, ObservationError, SinewError
from sinew.engine.capability import Capability
from sinew.stream.text import SILENT, StreamedText, TextDecoder
from sinew.stream.windows import Chunks, Rolling, Window

if TYPE_CHECKING:
    from sinew.policy import Policy

Images = Mapping[str, np.ndarray]

MIN_RATE, MAX_RATE = 0.1, 2000.0  # lowest and highest rate, nodes per second
MAX_TIME = 1e9  # largest time of a robot's clock, seconds
AHEAD_S = 0.1  # seconds by which a frame may be newer than its sample, because robots read them in any order
OLDEST_S = 10.0  # seconds by which a frame may be older than the start of the robot's clock
INTERPOLATIONS = ("linear", "hold")
GUIDANCE = (*RTC[:3], "none")


@dataclass(frozen=True)
class StreamSettings:
    """The settings of a stream.

    Attributes:
        rate: Waypoints per second of the robot's trajectory.
        guidance: Guidance of real-time chunking (:class:`Chunks`), for heads with one noise level for all
            actions.
        interpolation: Interpolation between actions (:class:`Chunks`), for the same heads.
        solver_steps: Solver steps of the same heads; None uses the policy's number.
        seed: Seed of the noise; None draws a random seed.
        text_tokens: Tokens of each text that the language head generates in parallel (:mod:`sinew.stream.text`);
            0 generates no text.

    Raises:
        ObservationError: A field is wrong.
    """

    rate: float
    guidance: str = "none"
    interpolation: str = "linear"
    solver_steps: int | None = None
    seed: int | None = None
    text_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.text_tokens <= MAX_SAID:
            raise ObservationError("text_tokens", f"0 to {MAX_SAID} tokens", f"{self.text_tokens}")
        if not (math.isfinite(self.rate) and MIN_RATE <= self.rate <= MAX_RATE):
            raise ObservationError(
                "rate", f"nodes per second from {MIN_RATE:g} to {MAX_RATE:g}", f"{self.rate}"
            )
        for name, value, known in (
            ("rtc", self.guidance, GUIDANCE),
            ("interpolation", self.interpolation, INTERPOLATIONS),
        ):
            if value not in known:
                raise ObservationError(name, f"one of {', '.join(known)}", shown(value))


@dataclass(frozen=True, eq=False)
class StateSample:
    """A sample: one reading of the robot's sensors, which the robot sends in each control step.

    Attributes:
        state: State of the robot, float [D].
        time: Time of the reading, seconds of the robot's clock.
        delay: Number of waypoints after the sample at which its window begins. Earlier waypoints would arrive too
            late.
        arrived: Time of arrival on this machine's clock, seconds.
        tag: Number that is sent back with the window.
    """

    state: np.ndarray
    time: float
    delay: int = 1
    arrived: float = 0.0
    tag: int = 0


@dataclass(frozen=True, eq=False)
class _Frame:
    images: Callable[[], Images]
    time: float


@dataclass(frozen=True, eq=False)
class StreamPrefix:
    """The prefix of one frame: the model's result for the frame and the instruction, from which the head computes
    actions.

    Attributes:
        context: Context of the frame for the head.
        state: State with which the prefix was computed, float [D] in robot units.
        noise: Noise from which the solver starts when it computes a chunk from the beginning.
        steps: Number of evaluations of the head when the solver computes a chunk from the beginning.
        frame_time: Exposure time of the frame, seconds of the robot's clock.
        text: Text of the stream at this prefix.
    """

    context: Any
    state: np.ndarray
    noise: np.ndarray
    steps: int
    frame_time: float
    text: StreamedText = SILENT


class Session:
    """The stream of one robot: its newest inputs, and the functions that compute waypoints from them.

    Args:
        policy: The policy. Its engine must support running the prefix and the head separately.
        settings: Settings of the stream.
        prompt: The instruction.
        clock: Returns the time of this machine in seconds.

    Attributes:
        label: Description of how the windows are computed.
        frames: Number of received frames.
        samples: Number of received samples.
        prefixes: Number of computed prefixes. Frames without a prefix were replaced by newer frames.
        runs: Number of head runs. Samples without a run were replaced by newer samples.

    Raises:
        SinewError: The policy does not support streams.
        ObservationError: A setting does not fit the policy.
    """

    def __init__(
        self,
        policy: Policy,
        settings: StreamSettings,
        prompt: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ):
        if reason := policy.capabilities.why_not(Capability.STREAM):
            raise SinewError(f"stream: {reason}")
        if (moments := policy.spec.history) > 1:
            raise SinewError(
                f"stream: expected a policy without an observation history, got one with {moments} observation steps"
            )
        self.policy, self.settings, self.prompt, self._clock = policy, settings, prompt, clock
        self._engine, processor, spec = policy.engine, policy.processor, policy.spec
        self.rate = settings.rate
        self._seed = secrets.randbits(31) if settings.seed is None else settings.seed
        self._made: Rolling | Chunks
        if policy.facts.rolling:
            if spec.control_hz and settings.rate != spec.control_hz:
                raise ObservationError(
                    "rate",
                    f"{spec.control_hz:g} nodes per second, the rate at which this head was trained",
                    f"{settings.rate:g}",
                )
            self._made = Rolling(
                self._engine,
                spec.solver,
                (spec.noise_shape[0], processor.recipe.padded_action_dim),
                self._seed,
            )
        else:
            guidance = settings.guidance
            if spec.solver.kind != "euler" and guidance != "none":
                raise ObservationError("rtc", "none, because this policy does not support guidance", guidance)
            if guidance != "none" and guidance not in policy.facts.guides:
                kinds = ", ".join((*policy.facts.guides, "none"))
                raise ObservationError("rtc", f"one of {kinds} on engine {policy.engine_name}", guidance)
            self._made = Chunks(self._engine, processor, settings.rate, guidance, settings.interpolation)
        self.label = self._made.label
        self._speech = self._speaks(settings.text_tokens)
        self.frames = self.samples = self.prefixes = self.runs = 0
        self._frame: _Frame | None = None
        self._sample: StateSample | None = None
        self._prefix: StreamPrefix | None = None
        self._swapped: float  # time at which the present prefix came into use
        self._seen: tuple[Any, str] | None = None  # frame and prompt of the newest prefix
        self._used: tuple[Any, ...] = ()  # the prefix (and sample) that the last head run has used

    def push_frame(self, images: Images | Callable[[], Images], taken: float) -> None:
        """Store a frame in place of the previous one.

        Args:
            images: Camera -> frame, or a function that decodes the frames. The slow loop calls the function,
                unless a newer frame arrives first.
            taken: Exposure time of the frames, seconds of the robot's clock.

        Raises:
            ObservationError: The time is not valid: more than 10 s before the robot's clock began, more than 0.1
                s later than the newest sample, or more than 0.1 s earlier than the newest frame.
        """
        newest = MAX_TIME if self._sample is None else self._sample.time + AHEAD_S
        oldest = -OLDEST_S if self._frame is None else max(-OLDEST_S, self._frame.time - AHEAD_S)
        # This condition also rejects NaN.
        if not oldest <= taken <= newest:
            raise ObservationError(
                "frame_time",
                f"seconds of the robot's clock from {oldest:g} to {newest:g}, because times may not go back",
                f"{taken:g}",
            )
        self.frames += 1
        self._frame = _Frame(images if callable(images) else lambda: images, taken)

    def push_sample(self, sample: StateSample) -> None:
        """Store a sample (a reading of the robot's state) in place of the previous one.

        A delay above ``MAX_DELAY`` is reduced to this number. An answer tells the robot the present delay, so without
        answers the robot's estimate would never fall.

        Raises:
            ObservationError: The sample is invalid, or older than the previous one.
        """
        # This condition also rejects NaN.
        if not 0 <= sample.time < MAX_TIME:
            raise ObservationError(
                "time", f"seconds of the robot's clock, from 0 to {MAX_TIME:g}", f"{sample.time:g}"
            )
        if self.before(sample.time):
            assert self._sample is not None
            raise ObservationError(
                "time",
                f"{self._sample.time:g} s of the robot's clock or later, the time of the last sample",
                f"{sample.time:g}",
            )
        if sample.delay < 0:
            raise ObservationError("delay", "0 nodes or more", f"{sample.delay}")
        # Check the state now, because the fast loop must not reject it later.
        self.policy.processor.state(sample.state)
        self.samples += 1
        self._sample = replace(sample, delay=min(sample.delay, MAX_DELAY))

    def before(self, time: float) -> bool:
        """Return True if a time of the robot's clock is earlier than the newest sample. This means that the robot's
        clock has started again.
        """
        return self._sample is not None and time < self._sample.time

    def now(self) -> float:
        """Return the time of this machine's clock in seconds, for ``StateSample.arrived``."""
        return self._clock()

    def say(self, prompt: str) -> None:
        """Replace the instruction of the stream. The next prefix uses the new instruction, even if the frame of this
        prefix was read before the change.
        """
        self.prompt = prompt

    def _speaks(self, tokens: int) -> TextDecoder | None:
        if not tokens:
            return None
        if refusal := self.policy.facts.refusals.get(Capability.SPEAK):
            raise ObservationError(
                "text_tokens", f"0, or {refusal.expected}", f"{tokens} of {self.policy.spec.name}"
            )
        prompter = self.policy.processor.prompter
        return TextDecoder(tokens, prompter.words, prompter.recipe.eos_token_id)

    def anew(self) -> Session:
        """Create an empty session with the same settings."""
        return Session(self.policy, self.settings, self.prompt, self._clock)

    @property
    def wants_prefix(self) -> bool:
        """True if there is work for the slow loop: a frame and a state have arrived, and no prefix was computed yet
        for the newest frame and the newest instruction.
        """
        return (
            self._frame is not None and self._sample is not None and self._seen != (self._frame, self.prompt)
        )

    @property
    def wants_run(self) -> bool:
        """True if there is work for the fast loop: a prefix that no head run has used yet or, for a head that reads
        the state, a sample that no run has used yet.
        """
        prefix, sample = self._prefix, self._sample
        if prefix is None or sample is None:
            return False
        return (
            self._used != (prefix, sample)
            if self.policy.facts.head_reads_state
            else self._used[:1] != (prefix,)
        )

    @property
    def run_cost(self) -> float:
        """The cost of a head run with the newest prefix: the number of actions times the number of evaluations; 0
        without a prefix.
        """
        prefix = self._prefix
        return (
            0.0
            if prefix is None
            else float(len(prefix.noise) * (1 if self.policy.facts.rolling else prefix.steps))
        )

    def read(self) -> bool:
        """Compute the prefix of the newest frame, and put the prefix into use. Return False if there is no new
        frame.

        Raises:
            SinewError: The frame does not fit the policy. The frame will not be tried again.
        """
        made = self.compute()
        if made is not None:
            self.swap(made)
        return made is not None

    def compute(self) -> StreamPrefix | None:
        """Compute the prefix of the newest frame, while the present prefix stays in use. Return None if there is no
        new frame.
        """
        if not self.wants_prefix:
            return None
        frame, sample, prompt = self._frame, self._sample, self.prompt
        assert frame is not None
        assert sample is not None
        self._seen = (frame, prompt)
        solver_steps = None if self.policy.facts.rolling else self.settings.solver_steps
        observation = Observation(
            images=frame.images(), state=sample.state, prompt=prompt, solver_steps=solver_steps,
            seed=(self._seed + self.prefixes) % (1 << 63),
        )  # fmt: skip
        prepared = self.policy.prepare(observation)
        self.policy.files.check()
        text = SILENT
        if self._speech is None:
            context = self._engine.read(prepared.inputs.batched())
        else:
            context, token = self._engine.read_text(prepared.inputs.batched(), self._speech.begin(prompt))
            text = self._speech.add(token)
        return StreamPrefix(context, sample.state, prepared.noise, prepared.steps, frame.time, text)

    def swap(self, prefix: StreamPrefix) -> None:
        """Replace the prefix in use (the model's result for a frame). Head runs that begin from now on use the new
        prefix.
        """
        self._prefix, self._swapped = prefix, self._clock()
        self.prefixes += 1

    def run(self, pause: Callable[[], None] | None = None) -> Window | None:
        """Run the head once with the newest prefix and the newest sample, and return the resulting waypoints. Return
        None if there is no new input.

        Args:
            pause: Called after each evaluation of a whole solution. An exception of this function ends the run.
        """
        if not self.wants_run:
            return None
        prefix, sample = self._prefix, self._sample
        assert prefix is not None
        assert sample is not None
        begun = self._clock()
        self._used = (prefix, sample)
        processor = self.policy.processor
        # Delta actions are relative to the state that the model has read, even if the robot has moved since then.
        seen = sample.state if self.policy.facts.head_reads_state else prefix.state
        state = processor.state(seen)
        context = self._engine.renew(prefix.context, processor.model_state(state)[None])
        origin = math.floor(sample.time * self.rate + 1e-6) + sample.delay
        if isinstance(self._made, Rolling):
            rows = processor.finish(self._made.run(context, origin), state)
        else:
            solved = self._made.solve(
                context, prefix.noise, prefix.steps, state, prefix.frame_time, origin, pause
            )
            normalized = not self.policy.facts.world_units
            chunk = processor.finish(solved, state, normalized=normalized)
            rows = self._made.nodes(chunk, prefix.frame_time, origin)
            self._made.handed(rows, origin, self.runs)
        now = self._clock()
        self.runs += 1
        return Window(
            step=origin,
            rows=rows,
            sample_time=sample.time,
            frame_time=prefix.frame_time,
            prefix_age=now - self._swapped,
            sensor_age=now - sample.arrived,
            head_s=now - begun,
            run=self.runs,
            tag=sample.tag,
            state=seen,
            text=prefix.text,
        )

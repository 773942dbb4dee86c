"""Find the order in which changes make a policy faster on a machine, with the largest predicted gain first.

Each change is another traced program under the same roofline (:mod:`sinew_perf.roofline`), and there is no other cost
model. The start is the reference: engine eager in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError
from sinew.engine.cuda.lowbit.choice import linear_layers, rows_of
from sinew.policy import open_bundle

from sinew_perf.cuts import all_cuts
from sinew_perf.fleet import batched
from sinew_perf.hardware import Hardware, Network
from sinew_perf.memory import missing
from sinew_perf.placements import payload
from sinew_perf.program import Engine, PublishedProgram, Traffic, is_sizes_alone
from sinew_perf.request import AS_THE_POLICY, TracedRequest
from sinew_perf.roofline import seconds, timing
from sinew_perf.streams import loops

BATCH = 8
CAMERA_HZ = 30.0
ON_GPU = "cuda"  # the engine that a machine with a GPU would use
# A change must make the policy this many times as fast, because a smaller gain would be shown as 1.00.
MIN_GAIN, NO_GAIN = 1.005, "is not faster by the roofline"
# These numbers are from docs/low-bit.md, where the head also has int8.
BITS_WON = (
    "success on pen 99.0 %, as in float32; on shove {} instead of 98.0; check yours with `sinew eval --gate`"
)

VISION = "vision"
LEFT_OUT = 4  # one of this many vision layers is left out
# These numbers are from benchmarks/results/truth/skip.json (eval/tests/test_truth.py compares them).
SKIPPING = (
    "other actions: of 50 episodes, blocks won 49, 48 or 23 without one of its three vision layers; `sinew skip` ranks"
    " yours"
)
LANGUAGE_LOSES = (
    "blocks won 0 of 50 episodes without two of its four language layers; `sinew skip` tries yours"
)


_Formats = tuple[tuple[str, str], ...]  # the number format of each component
_Change = Callable[[_Formats], _Formats]


@dataclass(frozen=True, slots=True)
class Gain:
    """A change and its effect.

    Attributes:
        name: Name in the table.
        line: Option or command that a user types.
        before_ms: Predicted milliseconds before the change.
        after_ms: Predicted milliseconds after the change.
        fidelity: Effect on the actions.
        instead: Name of the other change in whose place this one can be made. "" if there is none.
        missing_bytes: Bytes by which the program exceeds the machine's memory. 0 if it fits.
    """

    name: str
    line: str
    before_ms: float
    after_ms: float
    fidelity: str
    instead: str = ""
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """Changes in the order in which they should be made.

    Attributes:
        start_ms: Milliseconds of the reference.
        taken: Changes, each based on the previous ones. Each has the largest gain of the remaining changes, and its
            alternatives follow it.
        under: Changes that help only under a condition, such as several robots. Each is predicted with all changes of
            ``taken`` already made. The name states which time their milliseconds mean.
        without: The reason for each change that does not help here, by the name of the change.
    """

    start_ms: float
    taken: list[Gain]
    under: list[Gain]
    without: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Setting:
    """A traced program, and the rules by which its time is predicted.

    Attributes:
        engine: Program to trace: "eager", or "plan" with its rewrites.
        traffic: The kind of memory traffic that counts, such as "fused" or "unfused".
        dtypes: Number formats of the components.
        request: Sizes of a request.
    """

    engine: Engine = "eager"
    traffic: Traffic = "unfused"
    dtypes: _Formats | str = "fp32"
    request: TracedRequest = AS_THE_POLICY
    left_out: int = 0

    @property
    def formats(self) -> _Formats:
        """Return the number format of each component."""
        if isinstance(self.dtypes, str):
            return tuple((part, self.dtypes) for part in COMPONENTS)
        return self.dtypes


@dataclass(frozen=True, slots=True)
class _Option:
    """A change that may make the policy faster.

    Attributes:
        name: Name in the table.
        line: Option or command that a user types.
        fidelity: Effect on the actions.
        apply: Returns the program after the change.
        group: Group of alternatives, of which one is chosen. "" if there is none.
    """

    name: str
    line: str
    fidelity: str
    apply: Callable[[_Setting], _Setting]
    group: str = field(default="")


def order(
    source: str,
    machine: Hardware,
    server: Hardware | None = None,
    route: Sequence[Network] = (),
) -> Order:
    """Find the changes that make a policy faster on a machine.

    Args:
        source: The policy.
        machine: The machine.
        server: Second machine that may compute a part. None if there is none.
        route: Links to the second machine.

    Returns:
        The changes, in order.

    Raises:
        SinewError: No engine of Sinew runs on the machine.
    """
    if machine.kind != "cpu" and (machine.kind == "npu" or "bf16" not in machine.peak):
        raise SinewError(
            f"hardware {machine.name}: expected a CPU or a GPU with a rate for bf16, got {machine.title}:"
            " no engine of Sinew runs there (`sinew export --onnx DIR --whole` writes a graph for its compiler)"
        )

    @cache
    def program(setting: _Setting) -> PublishedProgram:
        dtypes = setting.dtypes if isinstance(setting.dtypes, str) else dict(setting.dtypes)
        loaded = PublishedProgram.load(source, setting.request, dtypes=dtypes, engine=setting.engine)
        return loaded.without_layers(VISION, setting.left_out) if setting.left_out else loaded

    @cache
    def ms(setting: _Setting) -> float:
        return 1e3 * seconds(program(setting).components(setting.traffic), machine)

    now = _Setting()
    start_ms = ms(now)
    options, without = _options(source, machine, program(now))
    taken: list[Gain] = []
    while options:
        best = min(options, key=lambda option: ms(option.apply(now)))
        rivals = [
            option for option in options if option is best or (best.group and option.group == best.group)
        ]
        options = [option for option in options if option not in rivals]
        if ms(now) < MIN_GAIN * ms(best.apply(now)):
            for option in rivals:
                without[option.name] = (
                    "is included in the changes above" if option.apply(now) == now else NO_GAIN
                )
            continue
        for option in sorted(rivals, key=lambda option: ms(option.apply(now))):
            after = option.apply(now)
            instead = best.name if option is not best else ""
            short = missing(program(after), machine)
            taken.append(Gain(option.name, option.line, ms(now), ms(after), option.fidelity, instead, short))
        now = best.apply(now)
    under = _under(program(now), now.traffic, machine, without)
    if server is not None:
        under += _away(source, program(now), now.traffic, machine, server, route, without)
    without |= {gain.name: NO_GAIN for gain in under if gain.before_ms < MIN_GAIN * gain.after_ms}
    under = [gain for gain in under if gain.name not in without]
    return Order(start_ms, taken, sorted(under, key=lambda gain: gain.after_ms - gain.before_ms), without)


def _options(source: str, machine: Hardware, first: PublishedProgram) -> tuple[list[_Option], dict[str, str]]:
    """Return two results: the changes that make every request faster, and the changes that this machine or policy does
    not support, each with its reason.

    Args:
        source: The policy.
        machine: The machine.
        first: The program before any change.
    """
    without: dict[str, str] = {}
    options = []
    on_cpu = machine.kind == "cpu"
    engine = "plan" if on_cpu else ON_GPU
    # Engine eager on a CPU runs torch's kernels one by one. Engine cuda runs one graph of fused kernels.
    fused: Traffic = "unfused" if on_cpu else "fused"
    options.append(
        _Option(
            f"engine {engine}",
            f"--engine {engine}",
            "the same arithmetic with other rounding: `sinew validate` checks the error",
            lambda now: replace(now, engine="plan", traffic=fused),
        )
    )
    if not is_sizes_alone(source) and open_bundle(source).lowbit:
        without["fewer bits"] = "the bundle already has low-bit weights"
    else:
        options += _bits(on_cpu, machine, first, without)
    shapes, fixed = first.shapes, first.fixed
    if "steps" in fixed or shapes.steps < 2:
        without["fewer solver steps"] = f"the policy has {first.trace.steps} by construction"
    else:
        half = shapes.steps // 2
        options.append(
            _Option(
                f"{half} solver steps of {shapes.steps}",
                f"--solver-steps {half}",
                f"other actions: measure the success with `sinew eval --sweep solver_steps={half},{shapes.steps}`",
                lambda now: replace(now, request=replace(now.request, steps=half)),
            )
        )
    if "cameras" in fixed or shapes.views < 2:
        without["one camera less"] = f"the policy needs {shapes.views}"
    else:
        options.append(
            _Option(
                f"{shapes.views - 1} cameras of {shapes.views}",
                "a request without it (`--allow-missing-cameras`)",
                "one camera less: only if the policy was trained this way",
                lambda now: replace(now, request=replace(now.request, cameras=shapes.views - 1)),
            )
        )
    layers = first.stack(VISION)
    if layers < 2:
        without["fewer vision layers"] = "the policy has no stack of vision layers"
    else:
        count = max(1, layers // LEFT_OUT)
        options.append(
            _Option(
                f"{layers - count} vision layers of {layers}",
                "sinew skip, then sinew eval --compare",
                SKIPPING,
                lambda now: replace(now, left_out=count),
            )
        )
    if first.stack("language") > 1:
        without["fewer language layers"] = LANGUAGE_LOSES
    without["a smaller picture"] = f"the weights fix {shapes.height} x {shapes.width} pixels"
    return options, without


def _bits(on_cpu: bool, machine: Hardware, first: PublishedProgram, without: dict[str, str]) -> list[_Option]:
    """Return the changes to smaller number formats that an engine of the machine supports.

    On a CPU and in fp8, the action head keeps floats. On a GPU, low-bit weights help the components whose products are
    limited by reading their weights (:mod:`sinew.engine.cuda.lowbit.choice`): the head, and generated tokens.

    Args:
        on_cpu: True for a CPU.
        machine: The machine.
        first: The program before any change.
        without: Receives the changes that are not supported, with reasons.
    """
    engine = "cpu" if on_cpu else ON_GPU

    def narrow(name: str, stored: str, fidelity: str, parts: Collection[str], change: _Change) -> _Option:
        recipe = ",".join(f"{part}={stored}" for part in parts)
        how: Traffic = "unfused" if on_cpu else "fused"
        return _Option(
            name,
            f"sinew quantize --recipe {recipe}, then --engine {engine}",
            fidelity,
            lambda now: replace(now, dtypes=change(now.formats), engine="plan", traffic=how),
            "bits",
        )

    def only(text: str, head: str) -> _Change:
        return lambda _: (("vision", text), ("language", text), ("head", head))

    inputs = ("vision", "language")
    if on_cpu:
        return [
            narrow("int8", "int8", BITS_WON.format("97.0"), inputs, only("int8/int8", "fp32")),
            narrow("4 bits", "q4_0", BITS_WON.format("96.5"), inputs, only("int4/int8", "fp32")),
        ]
    judged = "rounded: `sinew validate` states the error, `sinew eval --gate` the success"

    def halved(before: _Formats) -> _Formats:
        return tuple((part, "bf16" if text == "fp32" else text) for part, text in before)

    options = [
        _Option(
            "bf16",
            "--dtype bf16",
            judged,
            lambda now: replace(now, dtypes=halved(now.formats)),
            "bits",
        )
    ]
    has_fp8 = "fp8" in machine.peak
    if has_fp8:
        # Engine cuda multiplies only the language model in FP8.
        eighths: _Formats = (("vision", "bf16"), ("language", "fp8/fp8"), ("head", "bf16"))
        options.append(narrow("fp8", "fp8", judged, ("language",), lambda _: eighths))
    else:
        without["fp8"] = f"{machine.title} has no rate for it"
    rows = rows_of(first.model, first.shapes, linear_layers(first.model))
    few = [part for part in COMPONENTS if 0 < rows[part] <= machine.balance]
    if not few:
        limit = f"each weight is read for more than {machine.balance:.0f} rows"
        without["int8, 4 bits"] = f"the arithmetic in bf16 limits every component: {limit}"
    for stored, text in (("int8", "int8"), ("q4_0", "int4")) if few else ():

        def change(before: _Formats, text: str = text) -> _Formats:
            # A recipe contains fp8 or low-bit weights. Where fp8 is an alternative, the other components are in bf16.
            rest = halved(before) if has_fp8 else before
            return tuple((part, text if part in few else own) for part, own in rest)

        option = narrow(
            f"{stored} weights of {' and '.join(few)}",
            stored,
            f"{judged}. The kernel has never run on a GPU",
            few,
            change,
        )
        if not has_fp8:  # a change on top of bf16 and the engine, and not in place of them

            def apply(now: _Setting, change: _Change = change) -> _Setting:
                return replace(now, dtypes=change(now.formats))

            option = replace(option, apply=apply, group="weights")
        options.append(option)
    return options


def _under(
    program: PublishedProgram, traffic: Traffic, machine: Hardware, without: dict[str, str]
) -> list[Gain]:
    """Return the changes that help only under a condition. The conditions are repeated observations, a stream, and
    several robots.

    Args:
        program: The program after all unconditional changes.
        traffic: The kind of memory traffic that counts.
        machine: The machine.
        without: Receives the changes that do not help, with reasons.
    """
    if machine.kind != "cpu":
        without["a stream"] = (
            f"engine {ON_GPU} runs prefix and head on two CUDA streams, but nobody has measured them at the same time"
        )
        without["batches"] = f"no batch of engine {ON_GPU} was ever measured on a GPU"
        without["--reuse"] = f"engine {ON_GPU} stores no prefix"
        return []
    parts = program.components(traffic)
    whole_ms, head_ms = 1e3 * seconds(parts, machine), 1e3 * timing(parts[-1], machine).seconds
    found: list[Gain] = []
    turns = loops(parts, machine, CAMERA_HZ)
    if parts[-1].repeats < 2:
        without["a stream"] = "the head has one step, so a window is a whole chunk"
    elif not turns.beside_hz:
        without["a stream"] = f"{CAMERA_HZ:g} prefixes a second take the whole machine"
    else:
        name, between = f"time between windows, at {CAMERA_HZ:g} frames a second", 1e3 / turns.beside_hz
        judged = "other actions: measure the success with `sinew eval --stream PREFIX:HEAD`"
        found.append(Gain(name, "sinew run --stream", whole_ms, between, judged))
    found.append(
        Gain("an observation that repeats to the byte", "--reuse", whole_ms, head_ms, "the same bits")
    )
    each_ms = 1e3 * seconds([batched(part, BATCH) for part in parts], machine) / BATCH
    same = "the same arithmetic in other shapes: `sinew eval --sweep batch=1,8` compares it"
    found.append(
        Gain(f"machine time of a request, {BATCH} at once", f"--max-batch {BATCH}", whole_ms, each_ms, same)
    )
    return found


def _away(
    source: str,
    program: PublishedProgram,
    traffic: Traffic,
    machine: Hardware,
    server: Hardware,
    route: Sequence[Network],
    without: dict[str, str],
) -> list[Gain]:
    """Find the fastest way to divide the stages of the policy over both machines. Return it if it is faster than this
    machine alone.

    Args:
        source: The policy.
        program: The program after all changes on this machine.
        traffic: The kind of memory traffic that counts.
        machine: This machine.
        server: The second machine.
        route: Links between both machines.
        without: Receives the reason if no division is faster.
    """
    cuts = all_cuts(program, machine, [server], [route], payload(source, program, "raw"), traffic)
    here = next(cut for cut in cuts if cut.server is None)
    best = cuts[0]
    if best.refused or best.server is None or best.latency_ms >= here.latency_ms:
        ways = " + ".join(link.title for link in route)
        without[f"a server {server.title}"] = f"this machine alone is as fast as any cut over {ways}"
        return []
    line = "sinew serve there, sinew run tcp://... here"
    judged = "the same policy; `sinew validate` there states its engine's error"
    return [Gain(best.where, line, here.latency_ms, best.latency_ms, judged)]

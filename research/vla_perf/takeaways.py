"""VLA-Perf's 15 takeaways, judged: what each claims, and whether the numbers of a study bear it out.

A rate is "acceptable" from 10 Hz and "high-performance" from 100 Hz, as the paper's introduction has it, and cameras
deliver 24 to 60 frames a second. Judged as published, with all corrections and defects put right, and with these and
uncompressed pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from research.vla_perf.defects import DEFECTS, sent
from research.vla_perf.published import CORRECTIONS, corrected_study
from research.vla_perf.study import CLOUD, EDGE, MACHINES, PARTS, SCALED, Study

ACCEPTABLE, HIGH, CAMERA = 10.0, 100.0, (24.0, 60.0)  # Hz
SERVERS = ("a100", "h100", "b100")


@dataclass(frozen=True, slots=True)
class TakeawayVerdict:
    """holds: whether the numbers bear the claim out. numbers: those that decide."""

    holds: bool
    numbers: str


@dataclass(frozen=True, slots=True)
class Takeaway:
    """verdicts: by the name of a study of :func:`studies`."""

    number: int
    claim: str
    verdicts: dict[str, TakeawayVerdict]


def studies() -> dict[str, Study]:
    """The paper as published, and put right with its own compression of pictures and without any."""
    right = [name for name in DEFECTS if not name.startswith("payload-")]
    return {
        "as published": Study(),
        "corrected": corrected_study(CORRECTIONS, right, payload=sent("jpeg")),
        "corrected, raw pictures": corrected_study(CORRECTIONS, right, payload=sent("raw")),
    }


def takeaways() -> list[Takeaway]:
    """All fifteen, in the paper's order."""
    found = studies()
    return [
        Takeaway(number, claim, {name: judge(study) for name, study in found.items()})
        for number, (claim, judge) in enumerate(CLAIMS, start=1)
    ]


# ----------------------------------------------------------------------------- one by one


def _cameras(study: Study) -> TakeawayVerdict:
    rates = {title: 1 / study.e2e(name) for name, title in MACHINES}
    holds = min(rates[dict(MACHINES)[name]] for name in SERVERS) >= CAMERA[1] and rates["Thor"] < CAMERA[0]
    return TakeawayVerdict(holds, _listed(rates, "Hz"))


def _bounds(study: Study) -> TakeawayVerdict:
    words = {what: value for _, what, value in study.table4() if what.endswith("bound")}
    expected = {
        f"{title} {part} bound": "Memory" if part == "action" or title == "Thor" else "Compute"
        for _, title in MACHINES
        for part in PARTS
    }
    other = [
        f"{what.removesuffix(' bound')}: {words[what]}" for what in expected if words[what] != expected[what]
    ]
    return TakeawayVerdict(not other, "; ".join(other) or f"{len(words)} of {len(words)} as said")


def _linear(study: Study) -> TakeawayVerdict:
    """Slope of latency over parameters, both logarithmic, between neighbouring sizes of a part."""
    slopes = []
    rows = study.sizes()
    for machine in ("thor", "rtx4090", "b100"):
        for part in ("vision", "prefix", "head"):
            own = {(r["params_b"], r["ms"]) for r in rows if (r["machine"], r["part"]) == (machine, part)}
            points = sorted((math.log(size), math.log(ms)) for size, ms in own)
            (x0, y0), (x1, y1) = points[0], points[-1]
            slopes.append((y1 - y0) / (x1 - x0))
    return TakeawayVerdict(
        min(slopes) >= 0.8 and max(slopes) <= 1.2, f"slopes {min(slopes):.2f} to {max(slopes):.2f}"
    )


def _larger(study: Study) -> TakeawayVerdict:
    rates = {what: value for _, what, value in study.table5() if what.endswith("B100 Hz")}
    base = SCALED[0].parameters
    shown = [
        f"{family.parameters / base:.1f} times larger {rates[f'{family.name} B100 Hz']:.1f} Hz"
        for family in SCALED[1:]
    ]
    big = [rates[f"{f.name} B100 Hz"] for f in SCALED if f.parameters > 10 * base]
    return TakeawayVerdict(all(rate is not None and rate >= ACCEPTABLE for rate in big), ", ".join(shown))


def _context(study: Study) -> TakeawayVerdict:
    far = {title: _steps_at(study, name) for name, title in MACHINES if name in ("thor", "rtx4090", "b100")}
    holds = far["B100"] >= 1000 and all(50 <= far[name] <= 200 for name in ("Thor", "RTX4090"))
    return TakeawayVerdict(holds, "10 Hz up to " + _listed(far, "observations", digits=0))


def _steps_at(study: Study, machine: str) -> int:
    """The most observations kept at which a machine still answers at 10 Hz."""
    low, high = 1, 1 << 14
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if study.long_context(machine, middle) <= 1 / ACCEPTABLE else (low, middle - 1)
        )
    return low


def _steps(study: Study) -> TakeawayVerdict:
    found = {what: value for _, what, value in study.section45()}
    steps, chunk = found["steps 10->50 E2E x"], found["chunk 50->250 E2E +%"]
    return TakeawayVerdict(
        steps >= 1.5 and chunk < 20, f"5 times the steps {steps:.2f} x, 5 times the chunk +{chunk:.0f} %"
    )


def _diffusion(study: Study) -> TakeawayVerdict:
    ratios = {
        f"chunk {n}": study.decoding("autoregressive", n) / study.decoding("diffusion", n)
        for n in (5, 10, 50)
    }
    return TakeawayVerdict(all(1 <= math.log10(each) < 3 for each in ratios.values()), _listed(ratios, "x"))


def _few_tokens(study: Study) -> TakeawayVerdict:
    def ms(kind: str, chunk: int, dof: int) -> float:
        return 1e3 * study.decoding(kind, chunk, dof)

    one = {kind: ms(kind, 1, 7) for kind in ("autoregressive", "diffusion-large", "diffusion")}
    few = one["diffusion"] < one["autoregressive"] < one["diffusion-large"]
    many = ms("autoregressive", 1, 42) > ms("diffusion-large", 1, 42)
    at_once = ms("parallel", 10, 14) < ms("diffusion", 10, 14) and ms("parallel", 50, 14) > ms(
        "diffusion", 50, 14
    )
    shown = (
        f"7 numbers: {_listed(one, 'ms', digits=2)}; parallel up to chunk 10: {'yes' if at_once else 'no'}"
    )
    return TakeawayVerdict(few and many and at_once, shown)


def _server(study: Study) -> TakeawayVerdict:
    device = study.e2e("thor")
    routes = study.placements()[1:]
    places = [row for row in routes if row["ms"] < 1e3 * device]
    all_of_them = len(routes)
    named = [
        study.over("rtx4090", ["wifi6"]) < device,
        study.over("b100", ["5g"]) < device,
        study.over("b100", ["ethernet-10g", "fast-cloud"]) < device,
        study.over("b100", ["4g"]) > device,
        study.over("b100", ["ethernet-10g", "slow-cloud"]) > device,
    ]
    shown = f"{len(places)} of {all_of_them} routes beat {1e3 * device:.1f} ms; its five examples: {sum(named)} of 5"
    return TakeawayVerdict(len(places) > all_of_them / 2 and all(named), shown)


def _split(study: Study) -> TakeawayVerdict:
    device = study.e2e("thor")
    slower_than_device = [study.collaboration(link) > device for link in EDGE]
    slower_than_server = [study.collaboration(link) > study.over("b100", [link]) for link in EDGE]
    shown = (
        f"slower than the device over {sum(slower_than_device)} of {len(EDGE)} links, "
        f"than the server over {sum(slower_than_server)}"
    )
    return TakeawayVerdict(all(slower_than_server) and sum(slower_than_device) > len(EDGE) / 2, shown)


def _asynchronous(study: Study) -> TakeawayVerdict:
    gains = {
        study.links[link].title: study.asynchronous([link]) * study.over("b100", [link])
        for link in ("ethernet-10g", "wifi7", "5g", "4g")
    }
    first, *wireless = gains.values()
    return TakeawayVerdict(min(wireless) > 2 > first, _listed(gains, "x", digits=2))


def _dual(study: Study) -> TakeawayVerdict:
    gains = {what.removesuffix(" cap5 x"): v for _, what, v in study.table9() if what.endswith("cap5 x")}
    holds = min(gains.values()) > 1 and max(gains.values()) / min(gains.values()) > 1.5
    return TakeawayVerdict(holds, _listed(gains, "x", digits=2))


def _device(study: Study) -> TakeawayVerdict:
    rate = 1 / study.e2e("thor")
    return TakeawayVerdict(ACCEPTABLE <= rate < HIGH, f"Thor {rate:.1f} Hz")


def _edge(study: Study) -> TakeawayVerdict:
    rates = {
        f"{study.machines[machine].title}, {study.links[link].title}": 1 / study.over(machine, [link])
        for machine, link in (
            *(("rtx4090", link) for link in ("ethernet-10g", "wifi7", "wifi6", "5g", "4g")),
            *(("b100", link) for link in ("ethernet-10g", "wifi7", "5g")),
        )
    }
    wired, *wireless, fast, wifi, cellular = rates.values()
    holds = min(wireless) >= ACCEPTABLE and wired < HIGH <= min(fast, wifi) and cellular < HIGH
    return TakeawayVerdict(holds, _listed(rates, "Hz"))


def _cloud(study: Study) -> TakeawayVerdict:
    good = ("ethernet-10g", "fast-cloud")
    rates = {"in step": 1 / study.over("b100", good), "asynchronously": study.asynchronous(good)}
    slow = 1 / min(study.over("b100", [link, cloud]) for link in EDGE for cloud in CLOUD)
    holds = ACCEPTABLE <= rates["in step"] < HIGH <= rates["asynchronously"] and slow < HIGH
    return TakeawayVerdict(holds, _listed(rates, "Hz"))


def _listed(values: Mapping[str, float], unit: str, digits: int = 1) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items()) + f" {unit}"


CLAIMS: Sequence[tuple[str, Callable[[Study], TakeawayVerdict]]] = (
    ("datacentre GPUs reach the rate of cameras for pi0, edge GPUs do not", _cameras),
    ("the action part is memory-bound everywhere, vision and VLM compute-bound but on Thor", _bounds),
    ("latency of each part grows about linearly with its size", _linear),
    ("datacentre GPUs answer in real time with models more than ten times larger", _larger),
    ("1,000 past observations on datacentre GPUs, about 100 on edge and consumer GPUs", _context),
    ("solver steps matter, the length of the chunk hardly does", _steps),
    ("diffusion is one to two orders of magnitude faster than autoregressive decoding", _diffusion),
    ("autoregressive decoding competes for few tokens or in parallel alone", _few_tokens),
    ("a server beats the device in most cases, unless its network is extremely poor", _server),
    ("device and server together are often slower than the device, always than the server", _split),
    ("asynchrony raises the rate of servers behind slow wireless networks", _asynchronous),
    ("two systems out of step help, by machine and network", _dual),
    ("Thor reaches 10 Hz, 100 Hz needs another model", _device),
    (
        "an edge server: 10 Hz with consumer GPU and wireless, 100 Hz with datacentre GPU and fast links",
        _edge,
    ),
    ("the cloud: 10 Hz in step with a good network, 100 Hz asynchronously alone", _cloud),
)

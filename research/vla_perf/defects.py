"""Further defects in VLA-Perf's numbers, beside the costs that ``published.py`` corrects: what it sends, what it
leaves out, which figures it takes for a machine. Each defect by name, as published and put right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sinew_perf.scenarios import Codec, Payload, payload

from research.vla_perf.published import CORRECTIONS, corrected_study
from research.vla_perf.study import CAMERAS, CHUNK, DOF, LANGUAGE, STEPS, Study
from sinew.core import CameraSpec, PolicySpec, VectorSpec

Values = Iterator[tuple[str, float, float]]  # quantity, as published, put right


@dataclass(frozen=True, slots=True)
class Defect:
    name: str
    why: str
    quantity: str
    published: float
    corrected: float


def policy() -> PolicySpec:
    """The robot of section 4.1: three cameras of 224 x 224, two arms of seven joints, chunks of 50."""
    cameras = tuple(CameraSpec(str(n), 224, 224) for n in range(CAMERAS))
    return PolicySpec("pi0", "pi0", cameras, VectorSpec(DOF), VectorSpec(DOF), CHUNK, 32, STEPS, LANGUAGE)


def sent(codec: Codec) -> Payload:
    return payload(policy(), codec)


def defects() -> list[Defect]:
    """All of them, each against the published model with nothing else changed, except where it says so."""
    study = Study()
    return [
        Defect(name, why, *values) for name, (why, compute) in DEFECTS.items() for values in compute(study)
    ]


def _payload(codec: Codec) -> Callable[[Study], Values]:
    def values(study: Study) -> Values:
        right = Study(payload=sent(codec))
        for title, link in (("5G", "5g"), ("4G", "4g")):
            old, new = (1e3 * each.over("b100", [link]) for each in (study, right))
            yield f"B100 over {title}, latency ms", old, new
            old, new = (each.asynchronous([link]) for each in (study, right))
            yield f"B100 over {title}, asynchronous Hz", old, new

    return values


def _vision(study: Study) -> Values:
    right = Study(put_right=["vision-in-split"])
    old, new = (1e3 * each.collaboration("ethernet-10g") for each in (study, right))
    yield "split over Ethernet 10G, ms", old, new


def _dual(study: Study) -> Values:
    """The machine computes System 2 while System 1's bytes are on their way: played out in time."""
    old, new = (
        {what: value for _, what, value in each.table9()}
        for each in (study, Study(put_right=["network-not-machine"]))
    )
    for title in ("WiFi 7", "5G"):
        quantity = f"{title} cap10 Hz"
        yield f"B100 over {title}, System 1 beside 10 Hz, Hz", old[quantity], new[quantity]


def _diffusion_large(study: Study) -> Values:
    right = Study(put_right=["one-token-per-action"])
    old, new = (1e3 * each.decoding("diffusion-large", CHUNK) for each in (study, right))
    yield "Diffusion-Large, chunk 50, ms", old, new


def _suffix(study: Study) -> Values:
    right = Study(put_right=["growing-suffix"])
    old, new = (1e3 * each.decoding("autoregressive", CHUNK) for each in (study, right))
    yield "autoregressive, chunk 50, ms", old, new


def _memory(study: Study) -> Values:
    (_, _, old), *_ = study.table6()
    (_, _, new), *_ = Study(put_right=["token-table"]).table6()
    assert old is not None
    assert new is not None
    yield "pi0, GiB", old, new


def _thor(_: Study) -> Values:
    study = corrected_study(CORRECTIONS)
    sheet, measured = study.stages("thor"), study.stages("thor-measured")
    for index, title in ((0, "vision"), (1, "VLM"), (2, "action")):
        name = f"Thor {title} ms, {sheet[index].bound} to {measured[index].bound}"
        yield name, 1e3 * sheet[index].seconds, 1e3 * measured[index].seconds
    yield "Thor end to end, ms", 1e3 * study.e2e("thor"), 1e3 * study.e2e("thor-measured")


DEFECTS: dict[str, tuple[str, Callable[[Study], Values]]] = {
    "payload-jpeg": ("3 pictures of 224 x 224 at ten to one, 50 actions of 14 numbers", _payload("jpeg")),
    "payload-raw": ("the same, pictures uncompressed", _payload("raw")),
    "vision-in-split": ("a split policy computes its image tokens, too", _vision),
    "network-not-machine": ("System 2 runs while System 1's bytes travel", _dual),
    "one-token-per-action": ("a diffusion head has one token per action, not 14", _diffusion_large),
    "growing-suffix": ("a decoder attends to what it has generated so far, not to its final length", _suffix),
    "token-table": ("PaliGemma's table of 257,152 tokens lies in memory", _memory),
    "measured-thor": ("122 TFLOP/s and 257 GB/s measured, not 400 and 270; corrected costs", _thor),
}

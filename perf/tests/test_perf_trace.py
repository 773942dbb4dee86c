"""Costs from the program itself: FLOPs, bytes, memory and calibration against independent counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sinew.core import SinewError
from sinew.engine.example import Inputs, Shapes
from sinew.models.base import Model
from sinew.policy import load
from tests.cases import tiny_bundle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from sinew_perf import meta
from sinew_perf.flops import PRODUCTS
from sinew_perf.memory import memory_report
from sinew_perf.operators import Component, Residency
from sinew_perf.precision import Precision
from sinew_perf.program import PRESETS, PublishedProgram, of_model
from sinew_perf.request import TracedRequest
from sinew_perf.trace import STAGES, trace

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
CAMERAS, TOKENS, CHUNK = 3, 32, 50  # the request of the VLA-Perf paper, arXiv 2602.18397


@pytest.fixture(scope="module")
def pi0() -> PublishedProgram:
    return PublishedProgram.load("pi0", TracedRequest(CAMERAS, TOKENS))


def by_name(component: Component) -> dict[str, int]:
    """FLOPs of one repeat by operator name, over all layers."""
    found: dict[str, int] = {}
    for operator in component.operators:
        found[operator.name] = found.get(operator.name, 0) + operator.flops * operator.count
    return found


# ------------------------------------------------- the paper's pi0 by hand, and what it leaves out or counts twice

VISION = {"L": 27, "d": 1152, "F": 4304, "H": 16, "Hk": 16, "D": 72, "g": 1}
LANGUAGE = {"L": 18, "d": 2048, "F": 16384, "H": 8, "Hk": 1, "D": 256, "g": 2}
EXPERT = {"L": 18, "d": 1024, "F": 4096, "H": 8, "Hk": 1, "D": 256, "g": 2}
PREFIX = 256 * CAMERAS + TOKENS


def qkv(m: dict, rows: int) -> int:
    return 2 * rows * m["d"] * (m["H"] + 2 * m["Hk"]) * m["D"]


def o_and_mlp(m: dict, rows: int) -> int:
    return 2 * rows * m["d"] * (m["H"] * m["D"] + (m["g"] + 1) * m["F"])


def attention(m: dict, rows: int, context: int) -> int:
    return 2 * 2 * rows * context * m["H"] * m["D"]  # scores, then values


def paper_flops() -> dict[str, int]:
    """Section 1.2 and 1.3 of the roofline's specification: layers alone, a second QKV in the action expert."""
    images, rows = 256 * CAMERAS, CHUNK
    return {
        "vision": VISION["L"]
        * (qkv(VISION, images) + CAMERAS * attention(VISION, 256, 256) + o_and_mlp(VISION, images)),
        "prefix": LANGUAGE["L"]
        * (qkv(LANGUAGE, PREFIX) + attention(LANGUAGE, PREFIX, PREFIX) + o_and_mlp(LANGUAGE, PREFIX)),
        "head": EXPERT["L"]
        * (
            2 * qkv(EXPERT, rows)
            + attention(EXPERT, rows, PREFIX)
            + attention(EXPERT, rows, rows)
            + o_and_mlp(EXPERT, rows)
        ),
    }


def flops_left_out() -> dict[str, dict[str, int]]:
    """What the program does beside (or, negative, without) the paper's table."""
    L, d = EXPERT["L"], EXPERT["d"]
    state_row = qkv(EXPERT, 1) + o_and_mlp(EXPERT, 1)
    # 51 rows over 851 keys, instead of 50 over 800 and 50 over 50
    state_attention = attention(EXPERT, 1, PREFIX + 1 + CHUNK) + attention(EXPERT, CHUNK, 1)
    return {
        "vision": {
            "patch embedding": 2 * 256 * CAMERAS * 3 * 14 * 14 * 1152,
            "image projector": 2 * 256 * CAMERAS * 1152 * 2048,
        },
        "prefix": {"state projection": 2 * 32 * 1024},
        "head": {
            "second QKV": -L * qkv(EXPERT, CHUNK),
            "state token, projections and MLP": L * state_row,
            "state token, attention": L * state_attention,
            "action projections": 2 * (2 * CHUNK * 32 * d),
            "time MLP": 2 * CHUNK * 2 * d * d + 2 * CHUNK * d * d,
        },
    }


def test_pi0_is_the_papers_table_and_the_listed_differences(pi0: PublishedProgram) -> None:
    traced = {c.name: sum(by_name(c).values()) for c in pi0.components()}
    paper, left_out = paper_flops(), flops_left_out()
    assert traced == {stage: paper[stage] + sum(left_out[stage].values()) for stage in STAGES}
    names = by_name(pi0.components()[0])
    assert names["vision.patch_embedding"] == left_out["vision"]["patch embedding"]
    assert names["connector"] == left_out["vision"]["image projector"]


def test_planned_pi0_differs_by_what_its_rewrites_say(pi0: PublishedProgram) -> None:
    """The planned engine leaves out what nothing reads, the last language layer beyond its keys and values, and
    runs the state token, which sees no action, once per observation and no further than its last keys."""
    _, language, action = (sum(by_name(c).values()) for c in replace(pi0, engine="plan").components())
    m, e, L = LANGUAGE, EXPERT, EXPERT["L"]
    query = 2 * PREFIX * m["d"] * m["H"] * m["D"]
    unread = query + attention(m, PREFIX, PREFIX) + o_and_mlp(m, PREFIX)
    state = L * qkv(e, 1) + (L - 1) * (attention(e, 1, PREFIX + 1) + o_and_mlp(e, 1))
    eager = paper_flops()["prefix"] + flops_left_out()["prefix"]["state projection"]
    assert language == eager - unread + state
    left_out = flops_left_out()["head"]
    whole = paper_flops()["head"] + sum(left_out.values())
    # The first layer of the action-time MLP: the time's half is a table, the rest is one with the projection.
    tabulated = 2 * CHUNK * 2 * e["d"] * e["d"]
    row = L * (qkv(e, 1) + o_and_mlp(e, 1) + attention(e, 1, PREFIX + 1 + CHUNK))
    assert action == whole - row - tabulated


def test_pi0_parameters_are_the_papers_and_the_listed_differences(pi0: PublishedProgram) -> None:
    """Table 11's formula L (d (H + 2 Hk) D + d d + d F (g + 1) + 4 d): 411.19 M, 1.98 B and 292.63 M."""

    def paper(m: dict) -> int:
        d = m["d"]
        return m["L"] * (d * (m["H"] + 2 * m["Hk"]) * m["D"] + d * d + d * m["F"] * (m["g"] + 1) + 4 * d)

    assert [round(paper(m) / 1e6, 2) for m in (VISION, LANGUAGE, EXPERT)] == [411.19, 1981.96, 292.63]
    counted: dict[str, int] = {}
    for row in memory_report(pi0).weights:
        counted[row.component] = counted.get(row.component, 0) + row.parameters
    v, e = VISION, EXPERT
    biases = v["L"] * (5 * v["d"] + v["F"])
    assert counted["vision"] == paper(v) + biases + (3 * 14 * 14 + 1) * v["d"] + 2 * v["d"]
    assert counted["vision embeddings"] == 256 * v["d"]
    # RMS norms have 2 d per layer where the paper has 4 d; one more at the end.
    assert counted["language"] == paper(LANGUAGE) - (2 * 18 - 1) * 2048
    # The head is the token table's transpose and is never read at inference: not in the bundle.
    assert counted["language embeddings"] == 257_152 * 2048
    # The output projection reads H D = 2048 numbers, not d = 1024.
    assert counted["expert"] == paper(e) + 18 * 1024 * (2048 - 1024) - (2 * 18 - 1) * 1024
    assert counted["connector"] == 1152 * 2048 + 2048


def test_pi0_bytes_by_kind(pi0: PublishedProgram) -> None:
    """Fused traffic in bf16: each matrix once, keys and values once per product that reads them."""
    _, language, action = pi0.components()
    read = {"weight": 0, "cache": 0}
    for operator in action.operators:
        for tensor in operator.tensors:
            if operator.name.startswith("expert.layers") or tensor.kind == "cache":
                read[tensor.kind] = read.get(tensor.kind, 0) + int(tensor.bytes) * operator.count
    e = EXPERT
    assert read["weight"] == 2 * 18 * e["d"] * ((2 * e["H"] + 2 * e["Hk"]) * e["D"] + 3 * e["F"])
    assert read["cache"] == 2 * 18 * 2 * (PREFIX + 1 + CHUNK) * e["Hk"] * e["D"]
    assert memory_report(pi0).cache == 14_745_600  # 18 layers x 800 tokens x 2 x 256 x 2 bytes
    scores = [t for c in (language, action) for o in c.operators for t in o.tensors if t.kind == "scores"]
    assert {t.residency for t in scores} == {Residency.ON_CHIP}
    assert {t.elements for t in scores} == {8 * PREFIX**2, 8 * (CHUNK + 1) * (PREFIX + 1 + CHUNK)}


# ------------------------------------------------- FLOPs by torch's own counter


def run(model: Model, shapes: Shapes) -> None:
    device = next(model.parameters()).device
    context = Inputs.example(model, shapes).read(model)
    noise = torch.zeros(1, *model.noise_shape, device=device)
    model.run_head(noise, 1, model.time_embeddings(1), context)


class Known(TorchDispatchMode):
    """Shapes that are known already, below torch's counter, which sees every call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return meta.run(func, args, kwargs or {})


FUSED_ON_CPU = {  # torch counts the fused attention of GPUs and leaves out that of CPUs
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, out_shape, **kwargs: sdpa_flop_count(q, k, v)
    )
}


# Torch counts no product of few bits, and the others are made of the same layers.
QUICK = ("smolvla", "pi0.5", "openvla-oft")
COUNTED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]


@pytest.mark.parametrize("name", [name for name in COUNTED if "bitvla" not in str(name)])
def test_flops_are_torchs_on_meta(name: str) -> None:
    program = PublishedProgram.load(name, TracedRequest(prompt_tokens=20))
    if "cameras" not in program.fixed:
        program = program.at(TracedRequest(cameras=2))
    with torch.no_grad(), Known(), FlopCounterMode(display=False) as counter:
        run(program.model, program.shapes)
    traced = sum(program.trace.flops(stage) for stage in STAGES)
    assert traced == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_counted_both_ways(groups: int) -> None:
    """Stride 2: one way half as many results, each a sum; the other way twice as many, of as many products."""
    x = torch.zeros(3, 4, 10)
    for layer, products in (
        (torch.nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=groups), 3 * 6 * 5 * (4 // groups) * 3),
        (
            torch.nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, groups=groups),
            3 * 4 * 10 * (6 // groups) * 4,
        ),
    ):
        seen: list[int] = []

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                seen.append(PRODUCTS[func.overloadpacket.__name__](args, out))  # noqa: B023 - of this layer
                return out

        with torch.no_grad(), Counting(), FlopCounterMode(display=False) as counter:
            layer(x)
        assert seen == [2 * products]
        assert groups > 1 or counter.get_total_flops() == 2 * products  # torch's counter knows no groups


def test_flops_are_torchs_on_a_real_model() -> None:
    model = load(tiny_bundle(), dtype="fp32", engine="eager").engine.model
    shapes = replace(PublishedProgram.load(tiny_bundle()).shapes, tokens=12)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=FUSED_ON_CPU) as counter:
        run(model, shapes)
    real, empty = trace(model, shapes), of_model(model, shapes).trace
    for found in (real, empty):
        assert sum(found.flops(s) for s in STAGES) == pytest.approx(counter.get_total_flops(), rel=0.01)
    # On the CPU and on meta the same calls come in the same order, with operands of the same sizes.
    calls = [
        [(c.name, c.flops, [o.nbytes for o in c.operands]) for c in t.calls if c.is_product]
        for t in (real, empty)
    ]
    assert calls[0] == calls[1]


# ------------------------------------------------- components


def test_components_repeat_as_the_request_says() -> None:
    found = PublishedProgram.load("pi0", TracedRequest(4, 100, 63, 7)).components()
    assert [(c.name, c.repeats) for c in found] == [("vision", 1), ("prefix", 1), ("head", 7)]


def test_requests_scale_as_their_shapes_say() -> None:
    small, large = (
        PublishedProgram.load("smolvla", TracedRequest(n, 16, c)).components() for n, c in ((1, 25), (4, 50))
    )
    flops = [[sum(by_name(c).values()) for c in cs] for cs in (small, large)]
    assert flops[1][0] == 4 * flops[0][0]
    mlp = "expert.layers.*.mlp.up_proj"
    assert by_name(large[2])[mlp] == 2 * by_name(small[2])[mlp]
    up = "language.layers.*.mlp.up_proj"  # 64 tokens per view, the prompt and the state
    assert by_name(large[1])[up] * (64 + 17) == by_name(small[1])[up] * (256 + 17)


def test_unfused_traffic_has_every_operator() -> None:
    fused, unfused = (
        PublishedProgram.load("smolvla", TracedRequest(1, 16)).components(t) for t in ("fused", "unfused")
    )
    for one, all_ in zip(fused, unfused, strict=True):
        assert sum(by_name(one).values()) == sum(by_name(all_).values())
        assert {t.residency for o in all_.operators for t in o.tensors} == {Residency.HBM}
        totals = [sum(o.count * sum(t.bytes for t in o.tensors) for o in c.operators) for c in (one, all_)]
        assert totals[0] < totals[1]
    names = {o.name for c in unfused for o in c.operators}
    assert {"_softmax", "gelu", "silu", "vision.layers.*.norm1", "expert.norm"} <= names
    assert {o.flops for c in unfused for o in c.operators if o.name in ("_softmax", "gelu", "silu")} == {0}


def test_precision_of_each_stage() -> None:
    dtypes = {"vision": "int8/int8", "language": "int4", "head": "bf16//int8"}
    vision, language, action = PublishedProgram.load("pi0", TracedRequest(1, 8), dtypes=dtypes).components()

    def formats(component: Component, name: str) -> tuple[list[tuple[str, str]], str]:
        operator = next(o for o in component.operators if o.name == name)
        return [(t.kind, t.dtype) for t in operator.tensors], operator.compute_dtype

    weight, activation, bias = "weight", "activation", ("weight", "bf16")
    assert formats(vision, "vision.layers.*.mlp.fc1") == (
        [bias, (activation, "int8"), (weight, "int8"), (activation, "bf16")],
        "int8",
    )
    assert formats(language, "language.layers.*.mlp.up_proj") == (
        [(activation, "bf16"), (weight, "int4"), (activation, "bf16")],
        "bf16",
    )
    read, compute = formats(action, "logits")
    assert (read[1], compute) == (("cache", "int8"), "bf16")  # one kernel needs no widened copies
    assert {t[1] for t in formats(action, "action_in_proj")[0]} == {"fp32"}  # stays so in the reference


def test_a_bundle_is_traced_as_it_is_stored() -> None:
    for bundle, stored in ((ASSETS / "egg.gguf", {"fp32"}), (tiny_bundle(), {"fp32", "bf16"})):
        found = PublishedProgram.load(bundle).components()
        assert {
            t.dtype for c in found for o in c.operators for t in o.tensors if t.kind == "weight"
        } == stored
    narrow = PublishedProgram.load(ASSETS / "egg.gguf", dtypes="bf16").components()
    assert "bf16" in {t.dtype for c in narrow for o in c.operators for t in o.tensors}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "pi7"}, "expected one of smolvla, pi0, pi0.5, .*, or a policy as for"),
        ({"source": "pi0", "dtypes": "int7"}, "expected one of fp32, .*, got 'int7'"),
        ({"source": "pi0", "dtypes": {"eyes": "int8"}}, "dtype: expected components of vision, .*, got eyes"),
        ({"source": "pi0", "engine": "warp"}, "engine: expected one of eager, plan, got 'warp'"),
    ],
)
def test_bad_requests_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(SinewError, match=message):
        PublishedProgram.load(**arguments)


def test_sizes_and_traffic_are_checked(pi0: PublishedProgram) -> None:
    with pytest.raises(SinewError, match="cameras: expected 1 to 64, got 0"):
        TracedRequest(cameras=0)
    with pytest.raises(SinewError, match="traffic: expected one of fused, unfused, weights, got 'magic'"):
        pi0.components("magic")  # type: ignore[arg-type]


def test_precision_texts() -> None:
    assert Precision.parse("int8") == Precision("int8", "bf16", "bf16")
    assert Precision.parse("int4/int8") == Precision("int4", "int8", "bf16")
    assert Precision.parse("fp16//int8") == Precision("fp16", "fp16", "int8")

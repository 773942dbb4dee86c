"""VLA-Perf's numbers (arXiv 2602.18397), computed: tables 1 to 11, sections 4.5, 4.6, 4.8, figures 5 to 9.

``PAPER`` of layers.py and ``as_published`` below are the assumptions under which they come out; the defects among
them, and what each correction changes, are in ``published.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sinew_perf import events
from sinew_perf.hardware import Hardware, Network, hardware, networks
from sinew_perf.operators import Component
from sinew_perf.roofline import StageTiming, seconds, timing
from sinew_perf.scenarios import Payload, asynchronous_hz, dual_system_hz, synchronous_s

from research.vla_perf.layers import PAPER, Accounting, Net, decode, parallel_decode, prefill
from research.vla_perf.realtime import MEASURED_MS

GIB = 2**30
SIGLIP = Net("SigLIP-So", 27, 1152, 16, 16, 72, 4304, gated=False)
GIANT = Net("SigLIP-Giant", 40, 1536, 16, 16, 96, 6144, gated=False)
GEMMA = Net("Gemma-2B", 18, 2048, 8, 1, 256, 16384)
ACT_M = Net("Act-M", 18, 1024, 8, 1, 256, 4096)
LLAMA_7B = Net("Llama2-7B", 32, 4096, 32, 32, 128, 11008)
LLAMA_13B = Net("Llama2-13B", 40, 5120, 40, 40, 128, 13824)
LLAMA_70B = Net("Llama2-70B", 80, 8192, 64, 8, 128, 28672)
PATCHES = 256  # tokens per camera
LANGUAGE = 32  # tokens of the instruction
STEPS, CHUNK, CAMERAS, DOF = 10, 50, 3, 14
VOCABULARY = 257_152  # PaliGemma's


def expert_of(language: Net) -> Net:
    """Half the hidden size and a quarter of the MLP, the rest alike: table 5's action experts."""
    return replace(language, name="action", hidden=language.hidden // 2, ffn=language.ffn // 4)


@dataclass(frozen=True, slots=True)
class StudyFamily:
    """A vision tower, a language model and an action expert, in the manner of pi0."""

    name: str
    vision: Net
    language: Net
    action: Net

    def components(
        self,
        how: Accounting,
        *,
        cameras: int = CAMERAS,
        prompt: int = LANGUAGE,
        chunk: int = CHUNK,
        steps: int = STEPS,
    ) -> list[Component]:
        context = cameras * PATCHES + prompt
        return [
            prefill(self.vision, cameras, PATCHES, how, "vision"),
            prefill(self.language, 1, context, how, "prefix"),
            parallel_decode(self.action, chunk + how.state_token, context, how, steps),
        ]

    @property
    def nets(self) -> tuple[Net, Net, Net]:
        return self.vision, self.language, self.action

    @property
    def parameters(self) -> int:
        return sum(net.parameters for net in self.nets)


PI0 = StudyFamily("pi0", SIGLIP, GEMMA, ACT_M)
SCALED = (
    PI0,
    StudyFamily("L", GIANT, LLAMA_7B, expert_of(LLAMA_7B)),
    StudyFamily("XL", GIANT, LLAMA_13B, expert_of(LLAMA_13B)),
    StudyFamily("XXL", GIANT, LLAMA_70B, expert_of(LLAMA_70B)),
)
# One picture of 384 x 384 at ten to one up, one action of eight degrees of freedom down.
PAYLOAD = Payload(up=384 * 384 * 3 // 10, down=8 * 4)
KV_BYTES = GEMMA.kv_bytes(CAMERAS * PATCHES + LANGUAGE)


def as_published(machine: Hardware) -> Hardware:
    """GB/s taken as GiB/s, and an unlimited on-chip memory of 18,000 GiB/s in every machine. The RTX 5090, which the
    paper does not print, has 209 TFLOP/s in the released table, not the data sheet's 209.5."""
    binary = machine.bandwidth / 1e9 * GIB
    peak = machine.peak | {"bf16": 209e12} if machine.name == "rtx5090" else machine.peak
    return replace(machine, peak=peak, bandwidth=binary, on_chip_bandwidth=18_000 * GIB)


# ----------------------------------------------------------------------------- tables


Value = (
    float | str | None
)  # a word of table 4, a tick of table 2; None where the model does not fit the machine


class Study:
    """The tables under one set of assumptions. put_right: names of ``defects.py``'s that this study does not have."""

    def __init__(
        self,
        how: Accounting = PAPER,
        machine: Callable[[Hardware], Hardware] = as_published,
        put_right: Collection[str] = (),
        payload: Payload = PAYLOAD,
    ):
        self.how, self.put_right, self.payload = how, frozenset(put_right), payload
        self.machines = {name: machine(entry) for name, entry in hardware().items()}
        self.links = networks()
        if "measured-thor" in self.put_right:
            self.machines["thor"] = replace(self.machines["thor-measured"], title="Jetson Thor, measured")

    def numbers(self) -> dict[tuple[str, str], Value]:
        """(where, quantity) -> value."""
        tables = (
            *(self.table1, self.table2, self.table3, self.table4, self.table5, self.table6, self.table7),
            *(self.table8, self.table9, self.table10, self.table11),
        )
        rest = (self.section45, self.section46, self.section48)
        return {(where, what): value for table in (*tables, *rest) for where, what, value in table()}

    def e2e(self, machine: str, family: StudyFamily = PI0, **shape: int) -> float:
        return seconds(family.components(self.how, **shape), self.machines[machine])

    def stages(self, machine: str, **shape: int) -> list[StageTiming]:
        return [timing(part, self.machines[machine]) for part in PI0.components(self.how, **shape)]

    def table1(self) -> Iterator[tuple[str, str, float]]:
        for where, machine, title in (("T1", "rtx4090", "4090"), ("T1+", "rtx5090", "5090")):
            for cameras in (1, 2, 3):
                s = self.e2e(machine, cameras=cameras, prompt=0, chunk=63)
                yield where, f"{title} {cameras} cam ms", 1e3 * s
                if machine == "rtx4090":
                    real = MEASURED_MS[cameras]
                    yield where, f"{title} {cameras} cam real ms", real
                    yield where, f"{title} {cameras} cam accuracy %", 100 * 1e3 * s / real

    def table2(self) -> Iterator[tuple[str, str, str]]:
        """Where which machine is considered: the places of figure 8."""
        for machine, place in PLACES:
            yield "T2", f"{dict(MACHINES)[machine]} {place}", "\u2713"

    def table3(self) -> Iterator[tuple[str, str, float]]:
        for machine, title in MACHINES:
            stages = self.stages(machine)
            for stage, name in zip(stages, PARTS, strict=True):
                yield "T3", f"{title} {name} ms", 1e3 * stage.seconds
            total = sum(stage.seconds for stage in stages)
            yield "T3", f"{title} E2E ms", 1e3 * total
            yield "T3", f"{title} E2E Hz", 1 / total

    def intensities(self) -> dict[str, float]:
        """Table 4's operational intensities of pi0's three parts."""
        rows = (CAMERAS * PATCHES, CAMERAS * PATCHES + LANGUAGE, CHUNK + self.how.state_token)
        parts = zip(PARTS, PI0.components(self.how), PI0.nets, rows, strict=True)
        return {name: intensity(part, net, tokens) for name, part, net, tokens in parts}

    def balance(self, machine: str) -> float:
        """FLOP per byte of the data sheet, which is where the paper's own table has decimal gigabytes."""
        return hardware()[self.machines[machine].name].balance

    def table4(self) -> Iterator[tuple[str, str, float | str]]:
        found = self.intensities()
        for name, value in found.items():
            yield "T4", f"{name} OI", value
        for machine, title in MACHINES:
            yield "T4", f"{title} balance OI", self.balance(machine)
            for name, value in found.items():
                yield "T4", f"{title} {name} bound", "Compute" if value > self.balance(machine) else "Memory"

    def table5(self) -> Iterator[tuple[str, str, float | None]]:
        for family in SCALED:
            yield "T5", f"{family.name} total params B", family.parameters / 1e9
            for net, name in zip(family.nets, PARTS, strict=True):
                yield "T5", f"{family.name} {name} params B", net.parameters / 1e9
            context = CAMERAS * PATCHES + LANGUAGE
            need = (2 * family.parameters + family.language.kv_bytes(context)) / GIB
            for machine, title in (("thor", "Thor"), ("rtx4090", "RTX4090"), ("b100", "B100")):
                fits = need <= self.machines[machine].memory_gib
                yield "T5", f"{family.name} {title} Hz", 1 / self.e2e(machine, family) if fits else None

    def table6(self) -> Iterator[tuple[str, str, float | None]]:
        twice = 1 + self.how.second_qkv
        weights = 2 * sum(net.product_weights for net in PI0.nets)
        weights += 2 * (twice - 1) * ACT_M.layers * ACT_M.hidden * ACT_M.qkv
        table = 2 * VOCABULARY * GEMMA.hidden / GIB if "token-table" in self.put_right else 0.0
        for n in (1, 10, 100, 1000, 10_000):
            context = n * CAMERAS * PATCHES + LANGUAGE
            cache = GEMMA.kv_bytes(context) / GIB
            total = weights / GIB + cache + table
            yield "T6", f"n={n} total GiB", total
            yield "T6", f"n={n} KV GiB", cache
            for machine, title in (("thor", "Thor"), ("rtx4090", "RTX4090"), ("b100", "B100")):
                fits = total <= self.machines[machine].memory_gib
                yield "T6", f"n={n} {title} ms", 1e3 * self.long_context(machine, n) if fits else None
                yield "T6", f"n={n} {title} Hz", 1 / self.long_context(machine, n) if fits else None

    def long_context(self, machine: str, observations: int) -> float:
        """Seconds with the keys and values of ``observations`` - 1 earlier ones kept."""
        new, kept = CAMERAS * PATCHES, (observations - 1) * CAMERAS * PATCHES + LANGUAGE
        parts = PI0.components(self.how)
        if observations > 1:
            parts[1] = parallel_decode(GEMMA, new, kept, self.how, stage="prefix")
        chunk = CHUNK + self.how.state_token
        parts[2] = parallel_decode(ACT_M, chunk, kept + new, self.how, STEPS)
        return seconds(parts, self.machines[machine])

    def section45(self) -> Iterator[tuple[str, str, float]]:
        """B100: more steps, longer chunks."""
        base, steps, chunk = (self.stages("b100", **s) for s in ({}, {"steps": 50}, {"chunk": 250}))
        total = [sum(stage.seconds for stage in stages) for stages in (base, steps, chunk)]
        action = [stages[2].seconds for stages in (base, steps, chunk)]
        yield "4.5", "steps 10->50 E2E x", total[1] / total[0]
        yield "4.5", "steps 10->50 action x", action[1] / action[0]
        yield "4.5", "chunk 50->250 action +%", 100 * (action[2] / action[0] - 1)
        yield "4.5", "chunk 50->250 E2E +%", 100 * (total[2] / total[0] - 1)

    def decoding(self, kind: str, chunk: int, dof: int = DOF) -> float:
        """Seconds on a B100 for ``chunk`` actions of ``dof`` numbers by figure 7's four ways."""
        machine = self.machines["b100"]
        vision, language, _ = PI0.components(self.how)
        context, tokens = CAMERAS * PATCHES + LANGUAGE, dof * chunk
        denoised = chunk if "one-token-per-action" in self.put_right else tokens
        each = range(1, tokens + 1)
        grown = [(n, 1) for n in each] if "growing-suffix" in self.put_right else [(tokens, tokens)]
        action: dict[str, Callable[[], list[Component]]] = {
            "diffusion": lambda: [PI0.components(self.how, chunk=chunk)[2]],
            "diffusion-large": lambda: [parallel_decode(GEMMA, denoised, context, self.how, STEPS)],
            "parallel": lambda: [parallel_decode(GEMMA, tokens, context, self.how)],
            "autoregressive": lambda: [decode(GEMMA, context, n, self.how, times) for n, times in grown],
        }
        return seconds([vision, language, *action[kind]()], machine)

    def section46(self) -> Iterator[tuple[str, str, float]]:
        slow, fast = self.decoding("autoregressive", CHUNK), self.decoding("diffusion", CHUNK)
        yield "4.6", "AR chunk 50 ms", 1e3 * slow
        yield "4.6", "diffusion chunk 50 ms", 1e3 * fast
        yield "4.6", "AR / diffusion x", slow / fast
        context = CAMERAS * PATCHES + LANGUAGE
        for chunk in (10, 50):
            part = parallel_decode(GEMMA, DOF * chunk, context, self.how)
            yield "4.6", f"parallel decode OI chunk {chunk}", intensity(part, GEMMA, DOF * chunk)
        yield "4.6", "VLM/action size ratio", GEMMA.parameters / ACT_M.parameters

    def table7(self) -> Iterator[tuple[str, str, float]]:
        for link in self.links.values():
            for name, rate in (("up", link.upload), ("down", link.download)):
                unit, of = ("Gbps", 1e9) if rate >= 1e9 else ("Mbps", 1e6)
                yield "T7", f"{link.title} {name} {unit}", rate / of
            yield "T7", f"{link.title} base ms", link.base_ms

    def over(self, machine: str, links: Iterable[str]) -> float:
        """Seconds from an observation to its actions, computed by ``machine`` behind these links."""
        return synchronous_s(self.e2e(machine), self.payload, [self.links[name] for name in links])

    def asynchronous(self, links: Iterable[str], machine: str = "b100") -> float:
        """Chunks per second with requests in flight at once."""
        return asynchronous_hz(self.e2e(machine), self.payload, [self.links[name] for name in links])

    def table8(self) -> Iterator[tuple[str, str, float]]:
        for title, links in _ROUTES:
            latency, rate = self.over("b100", links), self.asynchronous(links)
            yield "T8", f"{title} latency ms", 1e3 * latency
            yield "T8", f"{title} sync Hz", 1 / latency
            yield "T8", f"{title} async Hz", rate
            yield "T8", f"{title} speedup x", rate * latency

    def section48(self) -> Iterator[tuple[str, str, float]]:
        for title, name in (("Ethernet 10G", "ethernet-10g"), ("WiFi 7", "wifi7"), ("5G", "5g")):
            yield "4.8", f"KV download {title} ms", 1e3 * kv_download_s(self.links[name])

    def collaboration(self, link: str) -> float:
        """Seconds with the language model on a B100 and the action expert on a Thor; vision left out, as printed,
        unless that is put right."""
        server, device = self.stages("b100"), self.stages("thor")
        network = self.links[link]
        up = network.base_ms / 1e3 + network.up_s(self.payload.up)
        vision = server[0].seconds if "vision-in-split" in self.put_right else 0.0
        return up + vision + server[1].seconds + kv_download_s(network) + device[2].seconds

    def table9(self) -> Iterator[tuple[str, str, float]]:
        for title, machine, links in (
            ("Thor", "thor", ()),
            ("Ethernet 10G", "b100", ("ethernet-10g",)),
            ("WiFi 7", "b100", ("wifi7",)),
            ("5G", "b100", ("5g",)),
        ):
            vision, language, action = (stage.seconds for stage in self.stages(machine))
            route = [self.links[name] for name in links]
            network_s = synchronous_s(0.0, self.payload, route) if route else 0.0
            fast = network_s + vision + action
            whole = fast + language
            yield "T9", f"{title} S1 ms", 1e3 * fast
            yield "T9", f"{title} S2 ms", 1e3 * language
            yield "T9", f"{title} sync Hz", 1 / whole
            for cap in (5, 10):
                rate = dual_system_hz(fast, language, cap, 1 / whole)
                if "network-not-machine" in self.put_right:
                    played = events.dual_system(vision + action, language, cap, network_s=network_s)
                    rate = played.fast_hz
                yield "T9", f"{title} cap{cap} Hz", rate
                yield "T9", f"{title} cap{cap} x", rate * whole

    def table10(self) -> Iterator[tuple[str, str, float]]:
        """What the machines are described with, as their data sheets have it."""
        for machine, title in MACHINES:
            sheet = hardware()[machine]
            for dtype, unit in (("fp32", "FP32 TFLOP/s"), ("bf16", "BF16 TFLOP/s"), ("int8", "INT8 TOP/s")):
                yield "T10", f"{title} {unit}", sheet.peak[dtype] / 1e12
            yield "T10", f"{title} memory GB", sheet.memory_gib
            yield "T10", f"{title} bandwidth GB/s", sheet.bandwidth / 1e9

    def table11(self) -> Iterator[tuple[str, str, float]]:
        for name, net, unit, of in zip(PARTS, PI0.nets, "MBM", (1e6, 1e9, 1e6), strict=True):
            yield "T11", f"{name} layers", net.layers
            yield "T11", f"{name} hidden", net.hidden
            yield "T11", f"{name} intermediate", net.ffn
            yield "T11", f"{name} query heads", net.heads
            yield "T11", f"{name} key heads", net.kv_heads
            yield "T11", f"{name} params {unit}", net.parameters / of

    # ------------------------------------------------------------------------- figures

    def figures(self) -> dict[str, list[dict[str, Any]]]:
        """The data behind figures 5 to 9; its drawn values are not printed, so only shapes can be compared."""
        grid = [
            self._action_row(steps=steps, chunk=chunk)
            for chunk in (5, 10, 25, 50, 100, 250)
            for steps in (1, 2, 5, 10, 20, 50)
        ]
        kinds = ("diffusion", "diffusion-large", "parallel", "autoregressive")
        decoding = [
            {"kind": k, "chunk": n, "dof": DOF, "ms": 1e3 * self.decoding(k, n)}
            for k in kinds
            for n in (1, 5, 10, 50)
        ]
        single = [
            {"kind": k, "chunk": 1, "dof": n, "ms": 1e3 * self.decoding(k, 1, n)}
            for k in kinds
            for n in (7, 14, 28, 42)
        ]
        server = self.stages("b100")
        seen = server[0] if "vision-in-split" in self.put_right else None
        parts = (seen, server[1], self.stages("thor")[2])
        device = self._place(f"{self.machines['thor'].title} alone", self.e2e("thor"), *self.stages("thor"))
        split = [device]
        for link in EDGE:
            title = self.links[link].title
            split.append(self._place(f"server, {title}", self.over("b100", [link]), *server))
            split.append(self._place(f"split over {title}", self.collaboration(link), *parts))
        return {
            "figure 5": self.sizes(),
            "figure 6": grid,
            "figure 7": [*decoding, *single],
            "figure 8": self.placements(),
            "figure 9": split,
        }

    def sizes(self) -> list[dict[str, Any]]:
        """Return figure 5's rows: milliseconds of each part of each size."""
        return [
            {
                "machine": m,
                "family": f.name,
                "part": t.name,
                "params_b": n.parameters / 1e9,
                "ms": 1e3 * t.seconds,
            }
            for m in ("thor", "rtx4090", "b100")
            for f in SCALED
            for n, t in zip(
                f.nets, (timing(c, self.machines[m]) for c in f.components(self.how)), strict=True
            )
        ]

    def placements(self) -> list[dict[str, Any]]:
        """Return figure 8's rows: where a policy may run, the device first."""
        placement: list[dict[str, Any]] = []
        for machine, place in PLACES:
            for links in ROUTES_TO[place]:
                seconds_ = self.over(machine, links) if links else self.e2e(machine)
                title = " + ".join(self.links[name].title for name in links) or place
                where = f"{self.machines[machine].title}, {title}"
                placement.append(self._place(where, seconds_, *self.stages(machine)))
        return placement

    @staticmethod
    def _place(where: str, seconds: float, *stages: StageTiming | None) -> dict[str, Any]:
        """Return a row of figure 8 or 9, with what of its milliseconds each stage takes; the rest is the network."""
        names = ("vision", "language", "action")
        taken = {
            name: 0.0 if stage is None else 1e3 * stage.seconds
            for name, stage in zip(names, stages, strict=True)
        }
        network = max(0.0, 1e3 * seconds - sum(taken.values()))
        return {"where": where, "ms": 1e3 * seconds, "parts_ms": {"network": network, **taken}}

    def _action_row(self, steps: int = STEPS, chunk: int = CHUNK) -> dict[str, float]:
        stages = self.stages("b100", steps=steps, chunk=chunk)
        part = PI0.components(self.how, chunk=chunk)[2]
        return {
            "steps": steps,
            "chunk": chunk,
            "action_ms": 1e3 * stages[2].seconds,
            "ms": 1e3 * sum(stage.seconds for stage in stages),
            "oi": intensity(part, ACT_M, chunk + self.how.state_token),
        }


MACHINES = (
    ("thor", "Thor"),
    ("rtx4090", "RTX4090"),
    ("a100", "A100"),
    ("h100", "H100"),
    ("b100", "B100"),
)
PARTS = ("vision", "VLM", "action")
# Where which machine is considered, table 2; and over which links one gets there, table 7.
PLACES = (
    ("thor", "on device"),
    ("rtx4090", "edge server"),
    ("b100", "edge server"),
    ("b100", "cloud server"),
)
EDGE = ("ethernet-10g", "ethernet-1g", "wifi7", "wifi6", "5g", "4g")
CLOUD = ("fast-cloud", "slow-cloud")
ROUTES_TO: dict[str, tuple[tuple[str, ...], ...]] = {
    "on device": ((),),
    "edge server": tuple((link,) for link in EDGE),
    "cloud server": tuple((link, cloud) for cloud in CLOUD for link in EDGE),
}
_ROUTES = (
    ("Ethernet 10G", ("ethernet-10g",)),
    ("Ethernet 1G", ("ethernet-1g",)),
    ("WiFi 7", ("wifi7",)),
    ("5G", ("5g",)),
    ("4G", ("4g",)),
    ("Wired+Fast cloud", ("ethernet-10g", "fast-cloud")),
    ("4G+Slow cloud", ("4g", "slow-cloud")),
)


def kv_download_s(network: Network) -> float:
    return network.base_ms / 1e3 + network.down_s(KV_BYTES)


def intensity(part: Component, net: Net, tokens: int) -> float:
    """Table 4's operational intensity of one layer: MFLOP per MiB, with one tensor of embeddings counted along."""
    flops = sum(operator.flops for operator in part.operators)
    moved = sum(tensor.bytes for operator in part.operators for tensor in operator.tensors)
    return flops / (moved + 2 * tokens * net.hidden) * 2**20 / 1e6

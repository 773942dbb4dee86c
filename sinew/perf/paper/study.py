"""VLA-Perf's numbers (arXiv 2602.18397), computed: tables 1, 3, 4, 5, 6, 8, 9, 11, sections 4.5, 4.6, 4.8.

``PAPER`` of layers.py and ``as_published`` below are the assumptions under which they come out; the defects among
them, and what each correction changes, are in ``published.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sinew.perf.hardware import Hardware, Network, hardware, networks
from sinew.perf.operators import Component
from sinew.perf.paper.layers import PAPER, Accounting, Net, decode, parallel_decode, prefill
from sinew.perf.roofline import StageTiming, seconds, timing
from sinew.perf.scenarios import Payload, asynchronous_hz, dual_system_hz, synchronous_s

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


class Study:
    """The tables under one set of assumptions."""

    def __init__(self, how: Accounting = PAPER, machine: Callable[[Hardware], Hardware] = as_published):
        self.how = how
        self.machines = {name: machine(entry) for name, entry in hardware().items()}
        self.links = networks()

    def numbers(self) -> dict[tuple[str, str], float | None]:
        """(where, quantity) -> value; None where the model does not fit the machine."""
        tables = (self.table1, self.table3, self.table4, self.table5, self.table6, self.table8, self.table9)
        rest = (self.table11, self.section45, self.section46, self.section48)
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

    def table3(self) -> Iterator[tuple[str, str, float]]:
        for machine, title in MACHINES:
            stages = self.stages(machine)
            for stage, name in zip(stages, ("vision", "VLM", "action"), strict=True):
                yield "T3", f"{title} {name} ms", 1e3 * stage.seconds
            total = sum(stage.seconds for stage in stages)
            yield "T3", f"{title} E2E ms", 1e3 * total
            yield "T3", f"{title} E2E Hz", 1 / total

    def table4(self) -> Iterator[tuple[str, str, float]]:
        rows = (CAMERAS * PATCHES, CAMERAS * PATCHES + LANGUAGE, CHUNK + self.how.state_token)
        parts = PI0.components(self.how)
        for part, net, tokens, name in zip(parts, PI0.nets, rows, ("vision", "VLM", "action"), strict=True):
            yield "T4", f"{name} OI", intensity(part, net, tokens)
        for machine, title in MACHINES:
            yield "T4", f"{title} balance OI", hardware()[machine].balance

    def table5(self) -> Iterator[tuple[str, str, float | None]]:
        for family in SCALED:
            yield "T5", f"{family.name} total params B", family.parameters / 1e9
            for net, name in zip(family.nets, ("vision", "VLM", "action"), strict=True):
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
        for n in (1, 10, 100, 1000, 10_000):
            context = n * CAMERAS * PATCHES + LANGUAGE
            cache = GEMMA.kv_bytes(context) / GIB
            total = weights / GIB + cache
            yield "T6", f"n={n} total GiB", total
            yield "T6", f"n={n} KV GiB", cache
            for machine, title in (("thor", "Thor"), ("rtx4090", "RTX4090"), ("b100", "B100")):
                fits = total <= self.machines[machine].memory_gib
                yield "T6", f"n={n} {title} ms", 1e3 * self.long_context(machine, n) if fits else None

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
        action = {
            "diffusion": lambda: PI0.components(self.how, chunk=chunk)[2],
            "diffusion-large": lambda: parallel_decode(GEMMA, tokens, context, self.how, STEPS),
            "parallel": lambda: parallel_decode(GEMMA, tokens, context, self.how),
            "autoregressive": lambda: decode(GEMMA, context, tokens, self.how, tokens),
        }
        return seconds([vision, language, action[kind]()], machine)

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

    def table8(self) -> Iterator[tuple[str, str, float]]:
        compute = self.e2e("b100")
        for title, links in _ROUTES:
            route = [self.links[name] for name in links]
            latency = synchronous_s(compute, PAYLOAD, route)
            rate = asynchronous_hz(compute, PAYLOAD, route)
            yield "T8", f"{title} latency ms", 1e3 * latency
            yield "T8", f"{title} sync Hz", 1 / latency
            yield "T8", f"{title} async Hz", rate
            yield "T8", f"{title} speedup x", rate * latency

    def section48(self) -> Iterator[tuple[str, str, float]]:
        for title, name in (("Ethernet 10G", "ethernet-10g"), ("WiFi 7", "wifi7"), ("5G", "5g")):
            yield "4.8", f"KV download {title} ms", 1e3 * kv_download_s(self.links[name])

    def collaboration(self, link: str) -> float:
        """Seconds with the language model on a B100 and the action expert on a Thor; vision left out, as printed."""
        server, device = self.stages("b100"), self.stages("thor")
        network = self.links[link]
        up = network.base_ms / 1e3 + network.up_s(PAYLOAD.up)
        return up + server[1].seconds + kv_download_s(network) + device[2].seconds

    def table9(self) -> Iterator[tuple[str, str, float]]:
        for title, machine, links in (
            ("Thor", "thor", ()),
            ("Ethernet 10G", "b100", ("ethernet-10g",)),
            ("WiFi 7", "b100", ("wifi7",)),
            ("5G", "b100", ("5g",)),
        ):
            vision, language, action = (stage.seconds for stage in self.stages(machine))
            route = [self.links[name] for name in links]
            fast = synchronous_s(vision + action, PAYLOAD, route) if route else vision + action
            whole = fast + language
            yield "T9", f"{title} S1 ms", 1e3 * fast
            yield "T9", f"{title} S2 ms", 1e3 * language
            yield "T9", f"{title} sync Hz", 1 / whole
            for cap in (5, 10):
                rate = dual_system_hz(fast, language, cap, 1 / whole)
                yield "T9", f"{title} cap{cap} Hz", rate
                yield "T9", f"{title} cap{cap} x", rate * whole

    def table11(self) -> Iterator[tuple[str, str, float]]:
        yield "T11", "vision params M", SIGLIP.parameters / 1e6
        yield "T11", "VLM params B", GEMMA.parameters / 1e9
        yield "T11", "action params M", ACT_M.parameters / 1e6

    # ------------------------------------------------------------------------- figures

    def figures(self) -> dict[str, list[dict[str, Any]]]:
        """The data behind figures 5 to 9; its drawn values are not printed, so only shapes can be compared."""
        scaled = [
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
        steps = [self._action_row(steps=n) for n in (1, 2, 5, 10, 20, 50)]
        chunks = [self._action_row(chunk=n) for n in (5, 10, 25, 50, 100, 250)]
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
        placement: list[dict[str, Any]] = [
            self._place("Thor on device", self.e2e("thor"), *self.stages("thor"))
        ]
        for machine in ("rtx4090", "b100"):
            for title, links in _ROUTES:
                route = [self.links[name] for name in links]
                s = synchronous_s(self.e2e(machine), PAYLOAD, route)
                where = f"{self.machines[machine].title}, {title}"
                placement.append(self._place(where, s, *self.stages(machine)))
        parts = (None, self.stages("b100")[1], self.stages("thor")[2])
        split = [
            self._place(f"split over {self.links[link].title}", self.collaboration(link), *parts)
            for link in ("ethernet-10g", "wifi7", "5g")
        ]
        return {
            "figure 5": scaled,
            "figure 6": [*steps, *chunks],
            "figure 7": [*decoding, *single],
            "figure 8": placement,
            "figure 9": split,
        }

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

"""Transformers written down by hand, as VLA-Perf does: sizes in, operators out.

Served models are traced instead (``program.py``); this is for the paper's numbers, for models that nobody has
built, and to hold the trace against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sinew_perf.operators import Component, Operator, Residency, Tensor

HBM, ON_CHIP = Residency.HBM, Residency.ON_CHIP
kept = lru_cache(1 << 12)  # a study asks for the same parts in every table


@dataclass(frozen=True, slots=True)
class Net:
    """layers, hidden size, heads, key heads, head size, MLP width; gated: two products into the MLP instead of one."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up(self) -> int:
        return 2 * self.ffn if self.gated else self.ffn

    @property
    def product_weights(self) -> int:
        """Weights of all products."""
        d = self.hidden
        return self.layers * (d * self.qkv + self.heads * self.head_dim * d + d * self.up + self.ffn * d)

    @property
    def parameters(self) -> int:
        """As the paper counts: the output projection as d x d, and four vectors per layer."""
        d = self.hidden
        return self.layers * (d * self.qkv + d * d + d * (self.ffn + self.up) + 4 * d)

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of ``tokens``, two bytes per number."""
        return self.layers * 2 * tokens * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Accounting:
    """The conventions of a count: what is counted, and where tensors lie.

    second_qkv: the action expert projects its queries, keys and values twice, once per attention (no published
        model does). block_on_chip: what goes between the products of an action block never leaves the chip.
    scores: attention's scores are moved at all; flash attention keeps them in registers. state_token: the action
        expert has one token more than the chunk has actions. one_attention: context and own tokens are attended to
        in one pass. dtype: of all data.
    """

    second_qkv: bool = False
    block_on_chip: bool = False
    scores: bool = False
    state_token: bool = True
    one_attention: bool = True
    dtype: str = "bf16"


PAPER = Accounting(True, True, True, False, False)
CORRECTED = Accounting()


@kept
def prefill(net: Net, batch: int, tokens: int, how: Accounting, stage: str = "") -> Component:
    """All tokens at once, each seeing all: vision towers (batch = cameras) and language prefixes."""
    make = _Maker(net, batch, tokens, how, stage, HBM, HBM)
    return make.component([make.qkv(), *make.attention(tokens), make.out(), *make.mlp()])


@kept
def parallel_decode(
    net: Net, tokens: int, context: int, how: Accounting, repeats: int = 1, stage: str = "head"
) -> Component:
    """A block of tokens that sees ``context`` cached ones and itself; an action expert repeats it per solver step."""
    inside = ON_CHIP if how.block_on_chip else HBM
    make = _Maker(net, 1, tokens, how, stage, inside, HBM)
    return make.component(_block(make, tokens, context, how, own=tokens), repeats)


@kept
def decode(net: Net, context: int, generated: int, how: Accounting, repeats: int) -> Component:
    """One token after another. The paper takes the final number of generated tokens for every one."""
    inside = ON_CHIP if how.block_on_chip else HBM
    make = _Maker(net, 1, 1, how, "head", inside, inside)
    return make.component(_block(make, 1, context, how, own=generated), repeats)


def _block(make: _Maker, tokens: int, context: int, how: Accounting, own: int) -> list[Operator]:
    if how.one_attention:
        return [make.qkv(), *make.attention(context + own), make.out(), *make.mlp()]
    again = [make.qkv()] if how.second_qkv and tokens > 1 else []
    return [
        make.qkv(), *make.attention(context), *again, *make.attention(own), make.out(), *make.mlp()
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Maker:
    """Operators of one layer. inside: where the attention block's activations lie; mlp_io: those of the MLP."""

    net: Net
    batch: int
    tokens: int
    how: Accounting
    stage: str
    inside: Residency
    mlp_io: Residency

    def component(self, layer: list[Operator], repeats: int = 1) -> Component:
        return Component(self.stage or self.net.name, tuple(layer), repeats)

    def product(self, name: str, inputs: int, outputs: int, where: Residency) -> Operator:
        rows = self.batch * self.tokens
        return self._operator(
            name,
            2 * rows * inputs * outputs,
            (rows * inputs, where, "activation"),
            (inputs * outputs, HBM, "weight"),
            (rows * outputs, where, "activation"),
        )

    def qkv(self) -> Operator:
        return self.product("qkv", self.net.hidden, self.net.qkv, self.inside)

    def out(self) -> Operator:
        return self.product("out", self.net.heads * self.net.head_dim, self.net.hidden, self.inside)

    def mlp(self) -> list[Operator]:
        net = self.net
        return [
            self.product("up", net.hidden, net.up, self.mlp_io),
            self.product("down", net.ffn, net.hidden, self.mlp_io),
        ]

    def attention(self, keys: int) -> list[Operator]:
        """Every query against ``keys`` keys: scores, then the weighted sum of the values."""
        net, B, S = self.net, self.batch, self.tokens
        flops = 2 * B * net.heads * S * keys * net.head_dim
        queries = (B * net.heads * S * net.head_dim, self.inside, "activation")
        cache = (B * net.kv_heads * keys * net.head_dim, HBM, "cache")
        scores = [(B * net.heads * S * keys, ON_CHIP, "scores")] if self.how.scores else []
        return [
            self._operator("scores", flops, queries, cache, *scores),
            self._operator("values", flops, *scores, cache, queries),
        ]

    def _operator(self, name: str, flops: int, *tensors: tuple[int, Residency, str]) -> Operator:
        dtype = self.how.dtype
        made = tuple(Tensor(elements, dtype, where, kind) for elements, where, kind in tensors)
        return Operator(name, flops, made, dtype, count=self.net.layers, stage=self.stage)

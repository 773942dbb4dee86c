"""Every way to store a matrix has the same three verbs, which agree with its widened weights: one table, stores x what
is promised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.bundle.quant import FORMATS, quantize
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.cuda.lowbit.weights import WeightOnly, split
from sinew.layers.linear import Embedding, Linear, hold, not_linear
from sinew.layers.stores import half, lowbit, rows
from sinew.layers.stores.codes import Bf16Panels, Codes, Ternary, apart, codes, together
from sinew.layers.stores.half import HALF
from sinew.layers.stores.low_rank import Factored, LowRank
from sinew.layers.stores.lowbit import BF16_PANELS, TINY, lay_out, reference, reference_all
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.rows import Rows
from sinew.layers.stores.store import Store, Tensors

ROWS, WIDTH = 16, 64
IDS = torch.tensor([[3, 0], [11, 3]])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A store over its tensors; the dtype of what it gives, and what reports call the precision of its weight."""

    store: Store
    held: Tensors | Factored
    dtype: torch.dtype
    kind: str
    precision: str | None

    @property
    def wide(self) -> Tensor:
        """W, float32 [ROWS, WIDTH], as what is given holds it."""
        return self.store.widened(self.held)

    def bound(self, x: Tensor) -> Tensor:
        """How far a product for x [..., WIDTH] may be from that with the widened weights."""
        if isinstance(
            self.store, Codes
        ):  # each activation moves by half a step of int8 at most, of bfloat16 by less
            return self.wide.abs().sum(1) * x.abs().amax(-1, keepdim=True) / 254 * 1.001
        sizes = self.wide.abs()
        if isinstance(self.held, Factored):  # which are multiplied one after the other
            sizes = self.held.weight.float().abs() + self.held.lora_b.abs() @ self.held.lora_a.abs()
        return (
            4 * torch.finfo(self.dtype).eps * (x.abs() @ sizes.T + 1)
        )  # sums in another order, rounded often


def floats(dtype: torch.dtype) -> Tensors:
    return Tensors(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype))


def packed(name: str) -> Tensors:
    weight, scale = quantize(floats(torch.float32).weight.numpy(), name)
    return Tensors(torch.from_numpy(weight.copy()), None if scale is None else torch.from_numpy(scale))


def coded(name: str) -> Case:
    held = packed(name)
    scales = 0 if held.scale is None else len(held.scale)
    return Case(codes(name, WIDTH, scales), held, torch.float32, name, name)


def weight_only(name: str, dtype: torch.dtype) -> Case:
    """Codes and scales apart, as engine cuda holds them. A product does not round its input to integers."""
    codes_, scales = split(*packed(name), codes(name, WIDTH))
    return Case(WeightOnly(name, WIDTH, dtype), Tensors(codes_, scales), dtype, name, name)


def adapted(case: Case) -> Case:
    """The weight of ``case`` with factors of an adapter beside it."""
    random, rank = torch.Generator().manual_seed(5), 3
    down, up = torch.randn(rank, WIDTH, generator=random), torch.randn(ROWS, rank, generator=random)
    held = Factored(case.held.weight, case.held.scale, down, up)
    kind = f"{case.kind} with an adapter"
    return Case(LowRank(case.store, rank, WIDTH), held, case.dtype, kind, case.precision)


def given(case: Case, dtype: torch.dtype) -> Case:
    """The table of ``case`` whose rows are given in ``dtype``."""
    return Case(Rows(case.store, dtype, CPU), case.held, dtype, case.kind, None)


FLOAT32, BFLOAT16 = (
    Case(PLAIN, floats(dtype), dtype, "plain", word)
    for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
)
CASES = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    **{
        f"half {word}": Case(HALF, floats(dtype), torch.float32, "half", f"fp32 ({word} weights)")
        for dtype, word in zip(half.DTYPES, ("bf16", "fp16"), strict=True)
    },
    **{name: coded(name) for name in FORMATS},
    "bfloat16 in panels": Case(
        Bf16Panels("bf16", WIDTH),
        Tensors(lay_out(floats(torch.bfloat16).weight)),
        torch.float32,
        "bf16",
        "bf16",
    ),
    **{f"{name}, weight-only": weight_only(name, torch.float32) for name in ("int8", "q8_0", "q4_0")},
    "q4_0, weight-only, bfloat16": weight_only("q4_0", torch.bfloat16),
    "rows of bfloat16": given(BFLOAT16, torch.float32),
    "rows of float32": given(FLOAT32, torch.bfloat16),
    **{f"rows of {name}": given(coded(name), torch.float32) for name in FORMATS},
    "float32 and an adapter": adapted(FLOAT32),
    "bfloat16 and an adapter": adapted(BFLOAT16),
    "half and an adapter": adapted(
        Case(HALF, floats(torch.bfloat16), torch.float32, "half", "fp32 (bf16 weights)")
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Blocks are small, so that there are several."""
    monkeypatch.setattr(half, "BLOCK", 5 * WIDTH)
    monkeypatch.setattr(half, "ROWS", 2)
    monkeypatch.setattr(rows, "BLOCK", 5)
    found = CASES[request.param]
    if isinstance(found.store, Bf16Panels) and BF16_PANELS not in extension().panels:
        monkeypatch.setattr(lowbit, "_on_cpu", [reference_all])
    return found


def inputs() -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))


def layer_of(case: Case, kind: Callable[..., Linear | Embedding]) -> Linear | Embedding:
    """A layer as a bundle's tensors make it: without memory, then assigned."""
    with torch.device("meta"):
        layer = kind(WIDTH, ROWS, bias=False) if kind is Linear else kind(ROWS, WIDTH)
    hold(layer, case.store)
    state = {name: tensor for name, tensor in case.held._asdict().items() if tensor is not None}
    assert set(layer.state_dict()) == set(state)  # the names that a bundle gives them
    if case.store.coded:
        assert {name: t.shape for name, t in layer.state_dict().items()} == {
            n: t.shape for n, t in state.items()
        }
    layer.load_state_dict(state, strict=True, assign=True)
    assert layer.weight.data_ptr() == case.held.weight.data_ptr()
    return layer.requires_grad_(False)


def test_a_product_is_that_of_the_widened_weights(case: Case) -> None:
    x, bias = inputs(), torch.linspace(-1, 1, ROWS)
    for plus in (None, bias):
        made = case.store.product(case.held, x, plus)
        assert made.dtype == case.dtype == case.store.dtype(case.held)
        wanted = F.linear(
            x.to(case.dtype), case.wide.to(case.dtype), None if plus is None else plus.to(case.dtype)
        )
        assert made.shape == wanted.shape
        assert ((made - wanted).abs() <= case.bound(x)).all()


def test_rows_are_those_of_the_widened_weights(case: Case) -> None:
    wanted = case.wide.to(case.dtype)
    made = case.store.take(case.held, IDS)
    assert made.dtype == case.dtype
    few = case.store.take(case.held, (3, 0))
    if isinstance(case.store, LowRank):  # a row alone is another product of matrices
        torch.testing.assert_close(made, wanted[IDS])
        torch.testing.assert_close(few, wanted[[3, 0]])
        return
    assert torch.equal(made, wanted[IDS])
    assert torch.equal(few, wanted[[3, 0]])


def test_widened_weights_are_those_that_were_stored(case: Case) -> None:
    """Floats are widened exactly; a code is off by half a step, or by what is cut at the ends of 4 and 2 bits."""
    exact = floats(torch.float32).weight
    assert case.wide.dtype == torch.float32
    if not case.store.coded:
        lying = case.held.weight.to(case.dtype).float()
        if isinstance(case.held, Factored):
            lying = lying + case.held.lora_b @ case.held.lora_a
        assert torch.equal(case.wide, lying)
        return
    step = {"int8": 127, "q8_0": 127, "q4_0": 8, "ternary": 0.7, "bf16": 256}[case.kind]
    assert (case.wide - exact).abs().max() <= exact.abs().max() / step


def test_a_store_says_what_it_is(case: Case) -> None:
    assert case.store.kind == case.kind
    assert case.store.size(case.held) == (ROWS, WIDTH)
    word = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
        case.held.weight.dtype, "uint8"
    )
    assert case.store.precision("weight", word) == case.precision
    assert case.store.coded != case.held.weight.dtype.is_floating_point
    assert copy.deepcopy(case.store) == case.store


def test_a_layer_computes_what_its_store_does(case: Case) -> None:
    x = inputs()
    if isinstance(case.store, Rows):
        table = layer_of(case, Embedding)
        assert torch.equal(table(IDS), case.store.take(case.held, IDS))
        assert torch.equal(table.rows((3, 0)), case.store.take(case.held, (3, 0)))
        assert torch.equal(table.logits(x), case.store.product(case.held, x))
        with pytest.raises(TypeError, match="row indices must be int64 or int32"):
            table(IDS.float())
        layer: nn.Module = table
        example, made = IDS, table(IDS)
    else:
        layer = layer_of(case, Linear)
        example, made = x, layer(x)
        assert torch.equal(made, case.store.product(case.held, x))
        alone = not isinstance(case.store, LowRank)
        assert (not_linear(layer) is None) == case.store.joins == (alone and not case.store.coded)
    assert layer.dtype == made.dtype
    assert torch.equal(copy.deepcopy(layer)(example), made)
    small = copy.deepcopy(layer).to("meta")(
        example.to("meta")
    )  # shapes alone, as memory and time are predicted
    assert (small.shape, small.dtype, small.device.type) == (made.shape, made.dtype, "meta")
    program = torch.export.export(layer, (example,)).module()
    assert torch.equal(program(example), made)


def test_the_product_of_codes_is_the_references() -> None:
    x = inputs().reshape(-1, WIDTH)
    for name in FORMATS:
        case = coded(name)
        smallest = 1e-5 if name == "ternary" else TINY
        assert torch.equal(case.store.product(case.held, x), reference(x, *case.held, None, name, smallest))
        assert isinstance(case.store, Ternary) == (name == "ternary")


def test_layers_of_one_format_share_the_rounding_of_their_input() -> None:
    x = inputs()
    eight, four, wide = (layer_of(case, Linear) for case in (coded("q8_0"), coded("q4_0"), FLOAT32))
    assert apart((eight, eight)) is None
    assert all(torch.equal(made, eight(x)) for made in together((eight, eight), x))
    assert apart((eight, four)) == "several formats"
    assert apart((eight, wide)) == apart((eight, nn.Identity())) == "weights in floats"


def test_no_class_is_exchanged_for_storage() -> None:
    package = Path(__file__).resolve().parents[2] / "sinew"
    exchanging = {path for path in package.rglob("*.py") if "__class__ =" in path.read_text()}
    assert {path.relative_to(package).as_posix() for path in exchanging} <= {
        "engine/plan/rewrite.py",
        "core/called.py",
    }

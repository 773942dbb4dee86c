"""Results on the meta device that are made from a call of the same shapes: the operator's own, or the operator runs."""

from __future__ import annotations

import pytest
import torch
from sinew_perf import meta

aten = torch.ops.aten


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


CALLS = {
    "broadcast": (aten.add.Tensor, lambda: (empty(3, 1, 5), empty(4, 1))),
    "strides of the operand": (aten.gelu.default, lambda: (empty(3, 4).t(),)),
    "promotion": (aten.mul.Tensor, lambda: (empty(2, 3, dtype=torch.bfloat16), empty(2, 3))),
    "a number": (aten.mul.Tensor, lambda: (empty(2, 3, dtype=torch.int64), 1)),
    "a float": (aten.mul.Tensor, lambda: (empty(2, 3, dtype=torch.int64), 1.0)),
    "a bool": (aten.mul.Tensor, lambda: (empty(2, 3, dtype=torch.int64), True)),
    "several tensors": (aten.cat.default, lambda: ([empty(2, 3), empty(2, 5)], 1)),
    "several results": (aten.native_layer_norm.default, lambda: (empty(2, 8), [8], None, None, 1e-5)),
    "a product": (aten.addmm.default, lambda: (empty(4), empty(2, 3), empty(3, 4))),
    "a look-up": (aten.embedding.default, lambda: (empty(9, 4), empty(2, dtype=torch.int64))),
    "a view": (aten.t.default, lambda: (empty(2, 3),)),
    "a view that does not say so": (aten._unsafe_view.default, lambda: (empty(2, 3), [3, 2])),
}


@pytest.fixture
def calls(monkeypatch):
    """The operators that ran, and nothing known before."""
    monkeypatch.setattr(meta, "_layouts", {})
    ran = []

    class Counted:
        def __init__(self, func):
            self.func, self._schema = func, func._schema

        def __call__(self, *args, **kwargs):
            ran.append(self.func)
            return self.func(*args, **kwargs)

        def __hash__(self):
            return hash(self.func)

        def __eq__(self, other):
            return self.func == other.func

    with torch.no_grad():
        yield lambda func, *args, **kwargs: meta.run(Counted(func), args, kwargs), ran


def layouts(out):
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (out if type(out) is tuple else (out,))
    ]


@pytest.mark.parametrize("name", CALLS)
def test_the_second_result_is_the_operators(calls, name):
    run, ran = calls
    func, operands = CALLS[name]
    first, second, again = (run(func, *operands()) for _ in range(3))
    assert layouts(first) == layouts(second) == layouts(again) == layouts(func(*operands()))
    assert len(ran) == (3 if "view" in name else 1)
    if "view" not in name:
        a, b = (out[0] if type(out) is tuple else out for out in (second, again))
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata


def test_operands_that_differ_are_told_apart(calls):
    run, _ = calls
    func = aten.mul.Tensor
    x = empty(2, 3, dtype=torch.int64)
    assert [run(func, x, value).dtype for value in (1, 1.0, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]
    assert run(aten.gelu.default, empty(3, 4)).stride() != run(aten.gelu.default, empty(4, 3).t()).stride()
    assert run(aten.sum.dim_IntList, empty(2, 3), [0]).shape == (3,)
    assert run(aten.sum.dim_IntList, empty(2, 3), [1]).shape == (2,)
    assert run(aten.sum.dim_IntList, empty(2, 3), [1], True).shape == (2, 1)


def test_what_has_values_or_is_written_runs(calls):
    run, ran = calls
    x = torch.ones(2)
    assert run(aten.add.Tensor, x, x).tolist() == run(aten.add.Tensor, x, x).tolist() == [2, 2]
    y = empty(2)
    assert run(aten.add_.Tensor, y, y) is y
    assert run(aten.add_.Tensor, y, y) is y
    zero = empty()  # promotes as a number would
    for _ in range(2):
        assert run(aten.mul.Tensor, empty(2, dtype=torch.bfloat16), zero).dtype == torch.bfloat16
    assert len(ran) == 6

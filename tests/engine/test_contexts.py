"""Contexts as bytes and back. What a head makes of them, by family: tests/engine/test_batches.py."""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.core import SinewError
from sinew.engine.contexts import FORMS, pack, unpack
from sinew.engine.fingerprint import WHOLE, fingerprint

CPU = torch.device("cpu")


class Made(NamedTuple):
    keys: list[torch.Tensor]
    mask: torch.Tensor
    spare: torch.Tensor | None
    last: torch.Tensor


def made() -> Made:
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2)]
    return Made(keys, torch.tensor([[True, False]]), None, torch.randn(1, 4, generator=generator))


def test_forms_keep_what_they_promise():
    context = made()
    sizes = {}
    for form in FORMS:
        data = pack(context, form)
        back = unpack(data, context, CPU)
        sizes[form] = len(data)
        assert isinstance(back, Made)
        assert torch.equal(back.mask, context.mask)
        assert back.spare is None
        for ours, theirs in ((back.keys[0], context.keys[0]), (back.last, context.last)):
            largest = theirs.abs().amax(-1, keepdim=True)
            bound = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 0.5 / 127 + 1e-6}[form] * largest
            assert bool(((ours - theirs).abs() <= bound).all())
    assert sizes["int8"] < sizes["bf16"] < sizes["fp32"]
    zeros = Made(
        [torch.zeros(1, 2, 0, 8)], torch.zeros(0, dtype=torch.bool), torch.tensor(0.0), torch.zeros(2, 3)
    )
    for form in FORMS:
        back = unpack(pack(zeros, form), zeros, CPU)
        assert [leaf.shape for leaf in (back.keys[0], back.spare, back.last)] == [(1, 2, 0, 8), (), (2, 3)]
        assert not back.last.any()


def test_what_is_no_context_is_refused():
    context = made()
    data = pack(context, "int8")
    other = context._replace(keys=context.keys[:1])
    strange = msgpack.packb([[["fp32"], [1, 2, 3, 8]], *[None] * 4])
    for bytes_, template, words in (
        (
            len(strange).to_bytes(4, "little") + strange,
            context,
            "expected a form \\(such as fp32\\) and a shape",
        ),
        (data[:-1], context, "bytes"),
        (data + b"x", context, "bytes"),
        (b"", context, "do not begin with a list of tensors"),
        (data, other, "expected 4 tensors for this model, got 5"),
        (data, context._replace(spare=context.mask), "tensor 3: expected torch.bool"),
        (data, context._replace(last=context.mask), r"expected torch.bool \[1, 2\].*, got int8"),
        (pack(context._replace(last=context.last * float("inf")), "fp32"), context, "finite"),
    ):
        with pytest.raises(SinewError, match=words):
            unpack(bytes_, template, CPU)
    with pytest.raises(SinewError, match="expected only tensors, got an object of type str"):
        pack([context.mask, "text"], "fp32")


def test_sizes_are_those_of_the_model_or_of_a_shorter_prompt():
    """Broadcasting takes many other sizes, and gives other actions without a word."""

    def of(tokens: int) -> Made:
        keys = [torch.randn(1, 2, tokens, 8), torch.randn(1, 2, 3 + tokens, 8)]
        return Made(keys, torch.ones(1, tokens, dtype=torch.bool), None, torch.randn(1, 4))

    template, longer = of(6), of(7)
    for tokens in (6, 5, 1):
        back = unpack(pack(of(tokens), "fp32"), template, CPU, longer)
        assert back.keys[1].shape == (1, 2, 3 + tokens, 8)
    refused = 0
    right = of(4)
    for number, leaf in enumerate([*right.keys, right.mask, right.last]):
        for axis, size in enumerate(leaf.shape):
            for other in {0, 1, 2, size - 1, size + 1, 2 * size} - {size}:
                changed = leaf.new_zeros([*leaf.shape[:axis], other, *leaf.shape[axis + 1 :]])
                leaves = [*right.keys, right.mask, right.last]
                leaves[number] = changed
                with pytest.raises(SinewError, match=r"context: tensor \d: expected torch"):
                    unpack(pack(Made(leaves[:2], leaves[2], None, leaves[3]), "fp32"), template, CPU, longer)
                refused += 1
    assert refused > 40
    with pytest.raises(SinewError, match="context: tensor 0"):  # a longer prompt than the model takes
        unpack(pack(of(8), "fp32"), template, CPU, longer)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bytes_of_any_kind_are_a_context_or_refused(data):
    context = made()
    whole = bytearray(pack(context, data.draw(st.sampled_from(FORMS))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(whole) - 1, 80)))
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for given_bytes in (bytes(whole), bytes(whole[:cut])):
        try:
            back = unpack(given_bytes, context, CPU)
        except SinewError:
            continue
        assert all(torch.isfinite(leaf).all() for leaf in (*back.keys, back.last))


def test_headers_that_ask_for_memory_are_refused():
    context = made()
    for shape in ([1, 2, 3, 1 << 40], [1 << 20] * 4, [1, 2, 3, -8], [True] * 4, "abcd", [0.5] * 4):
        heads = [["fp32", shape]] * 2 + [["bool", [1, 2]], None, ["fp32", [1, 4]]]
        head = msgpack.packb(heads)
        with pytest.raises(SinewError):
            unpack(len(head).to_bytes(4, "little") + head, context, CPU)


def test_files_are_told_apart(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(3 << 20))
    before = fingerprint(file)
    assert fingerprint(file) == before
    file.write_bytes(bytes((3 << 20) - 1) + b"x")
    assert fingerprint(file) != before
    file.write_bytes(b"")
    assert fingerprint(file) != before
    with file.open("wb") as large:  # of which samples are read
        large.truncate(WHOLE + 1)
        before = fingerprint(file)
        large.seek(WHOLE)
        large.write(b"x")
    assert fingerprint(file) != before

"""A module tree of its own over the same weights, as ``copy.deepcopy`` would give it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from sinew.engine.clone import clone_model, copy_modules
from tests.engine.stand_ins import KINDS, make


def test_a_clone_is_what_a_deep_copy_is_over_the_same_weights():
    for kind in KINDS:
        model = make(kind)
        made = clone_model(model)
        wanted = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
        pairs = zip(made.named_modules(), wanted.named_modules(), strict=True)
        for (name, ours), (other, theirs) in pairs:
            assert (name, type(ours)) == (other, type(theirs))
            assert {k: type(v) for k, v in vars(ours).items()} == {
                k: type(v) for k, v in vars(theirs).items()
            }
        assert all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
        assert not {id(each) for each in made.modules()} & {id(each) for each in model.modules()}


def test_a_class_is_copied_in_its_own_way():
    class Own(nn.Module):
        def __deepcopy__(self, _memo: Any) -> Own:
            made = Own()
            made.copied = True
            return made

    model = nn.Sequential(nn.Linear(2, 2), Own())
    assert copy_modules(model, {})[1].copied
    with torch.device("meta"):
        other = nn.ModuleList([nn.Linear(2, 2), nn.Identity()])
    assert len(copy_modules(other, {})) == 2

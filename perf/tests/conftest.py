"""What the tests of a roofline ask for ends with each; traces of models without memory are made once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sinew.cli import terminal
from torch import nn

from sinew_perf import program
from sinew_perf.trace import ProgramTrace


@pytest.fixture(autouse=True)
def in_words_again() -> Iterator[None]:
    """Have the next test print words: some of these call a verb's function and say ``--json`` themselves."""
    yield
    terminal.take_json([])


@pytest.fixture(autouse=True, scope="session")
def traced_once() -> Iterator[None]:
    """Have a program on meta traced once, a second or two each: sizes, types and plan are all that it depends on."""
    trace, kept = program.trace, dict[Any, ProgramTrace]()

    def once(model: Any, shapes: Any, plan: Any = None) -> ProgramTrace:
        runs = model if plan is None else plan.model
        if any(parameter.device.type != "meta" for parameter in runs.parameters()):
            return trace(model, shapes, plan)
        key = (
            repr(runs),
            repr(runs.config),
            shapes,
            None if plan is None else plan.outcomes,
            _signature(runs),
        )
        if key not in kept:
            kept[key] = trace(model, shapes, plan)
        return kept[key]

    program.trace = once
    yield
    program.trace = trace


def _signature(model: nn.Module) -> tuple[Any, ...]:
    return tuple((name, each.shape, each.dtype) for name, each in model.state_dict().items())

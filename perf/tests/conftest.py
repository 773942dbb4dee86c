"""Fixtures for all tests of sinew-perf, which reset the ``--json`` mode after each test and cache traces."""

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
    """Switch the output back to text after each test.

    Some tests call the function of a verb directly, with ``--json``.
    """
    yield
    terminal.take_json([])


@pytest.fixture(autouse=True, scope="session")
def traced_once() -> Iterator[None]:
    """Cache the traces of models on the meta device, because each takes one or two seconds.

    The trace of such a model depends only on its sizes, its dtypes and its plan.
    """
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

"""Errors cross process boundaries: workers of `sinew bench --ladder`, `sinew eval` and others send them by pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib import import_module
from inspect import signature

import pytest
from sinew_client.errors import ObservationError, ServerError, SinewError
from sinew_client.untrusted.words import UntrustedError

MODULES = (
    "sinew.core.extras",
    "sinew.convert.sources.identity",
    "sinew.serve.request",
    "sinew_client.control.loop",
)

KNOWN = {"package": "sinew-eval"}  # constructor parameters that accept only some values


def errors(base: type[Exception]) -> Iterator[type[Exception]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("sinew"):
            yield kind
        yield from errors(kind)


def test_every_error_survives_pickle() -> None:
    for name in MODULES:
        import_module(name)
    kinds = {*errors(SinewError), *errors(UntrustedError), UntrustedError}
    assert {ObservationError, ServerError} < kinds
    for kind in kinds:
        parameters = [*signature(kind.__init__).parameters.values()][1:]
        names = [
            each.name
            for each in parameters
            if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        ]
        error = kind(*(KNOWN.get(name, name) for name in names))
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_a_rejected_observation_is_not_a_crash_of_the_worker() -> None:
    error = pickle.loads(pickle.dumps(ObservationError("state", "6 numbers", "5")))
    with pytest.raises(ObservationError, match="^state: expected 6 numbers, got 5$"):
        raise error

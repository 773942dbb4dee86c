"""Text of clients is cut before it is formatted, and no client can cause an unlimited number of tracebacks.

``str(value)[:40]`` writes the whole value and then cuts it. A value of 60 MiB of bytes takes seconds, with the
interpreter locked, while robots wait. ``sinew_client.untrusted.shown`` writes no more than it returns.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sinew_client.untrusted import shown

from sinew.core import ObservationError
from sinew.serve.wires import http
from tests.serve.puppet import SPEC

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "packages" / "sinew-client" / "src" / "sinew_client"
ROOMS = [ROOT / "sinew" / "serve", ROOT / "sinew" / "stream"]
FILES = [
    *(path for room in ROOMS for path in sorted(room.rglob("*.py"))),
    *sorted(CLIENT.glob("*.py")),
    ROOT / "eval" / "sinew_eval" / "foreign" / "model_server.py",
    ROOT / "eval" / "sinew_eval" / "farm" / "hosts.py",
]
OUR_OWN = ("error", "self.outcome")  # exceptions, whose text is bounded where they are raised
PERCENT = re.compile(r"%[.0-9]*r")
ENDS_A_THREAD = ("serve/supervise.py",)  # which restarts each thread a few times


def formatted_before_cut(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that write a whole value and cut the text afterwards."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            call = node.value
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in ("str", "repr")
                and call.args
                and ast.unparse(call.args[0]) not in OUR_OWN
            ):
                yield node.lineno
        elif isinstance(node, ast.FormattedValue) and node.conversion != -1 and node.format_spec is not None:
            if ast.unparse(node.value) not in OUR_OWN:
                yield node.lineno  # f"{value!r:.80}"
        elif isinstance(node, ast.Call):
            texts = [each for each in node.keywords if each.arg == "default"]
            if any(ast.unparse(each.value) in ("str", "repr") for each in texts):
                yield node.lineno  # json.dumps(value, default=str)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PERCENT.search(node.value):
            yield node.lineno


def tracebacks(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that write a traceback without a limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            unlimited = node.func.attr in ("exception", "print_exc", "format_exc") and node.args
            if unlimited or any(each.arg == "exc_info" for each in node.keywords):
                yield node.lineno


@pytest.mark.parametrize("rule", [formatted_before_cut, tracebacks])
def test_rules_of_text(rule) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if not str(path).endswith(ENDS_A_THREAD)
        for line in rule(ast.parse(path.read_text()))
    ]
    assert not found
    for bad in ("str(x)[:3]", "f'{x!r:.80}'", "json.dumps(x, default=str)", "log('%.200r', x)"):
        assert list(formatted_before_cut(ast.parse(bad))) == [1], bad
    for bad in ("logger.exception('x')", "logger.error('x', exc_info=True)"):
        assert list(tracebacks(ast.parse(bad))) == [1], bad


def test_what_is_shown_is_written_in_no_time() -> None:
    large = [bytes(64 << 20), {"a": "x" * (64 << 20)}, list(range(1 << 20))]
    begun = time.process_time()
    assert all(len(shown(each)) <= 200 for each in large)
    assert time.process_time() - begun < 1.0  # repr takes about a second for each


@pytest.mark.parametrize("content", [{"__numpy__": "AAAA", "dtype": "|u1", "shape": [3]}])
def test_an_array_in_place_of_an_observation_is_refused(content: dict) -> None:
    """It was an AssertionError: status 500 and a traceback."""
    body = json.dumps(content).encode()
    message = http.read(body, http.JSON)
    with pytest.raises(ObservationError, match="expected an object with the keys of an observation"):
        http.observation(message, SPEC)
    with pytest.raises(ObservationError, match="expected an object with the keys of an observation"):
        http.act_observation(http.read_act(body), SPEC)

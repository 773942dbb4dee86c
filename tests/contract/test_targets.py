"""The text with which a person names a policy: one table of texts, and what opens each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sinew_client import ClientError, connect
from sinew_client.target import ADDRESS, EXPERT, LOCAL, MODEL_SERVER, Target, addresses_of

from sinew.core import SinewError


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("tcp://robot:5555", ADDRESS, "tcp://robot:5555"),
        ("tcp://a:1,tcp://b:2", ADDRESS, "tcp://a:1,tcp://b:2"),
        (["tcp://a:1", "tcp://b:2"], ADDRESS, "tcp://a:1,tcp://b:2"),
        ("ipc:///run/sinew.sock", ADDRESS, "ipc:///run/sinew.sock"),
        ("http://robot:8000", ADDRESS, "http://robot:8000"),
        ("vla-eval://robot:8000", MODEL_SERVER, "robot:8000"),
        ("expert", EXPERT, ""),
        ("expert:sinew/Pen-v0", EXPERT, "sinew/Pen-v0"),
        ("experts.gguf", LOCAL, "experts.gguf"),
        ("blocks", LOCAL, "blocks"),
        ("hf://lerobot/smolvla_base", LOCAL, "hf://lerobot/smolvla_base"),
        ("lerobot/smolvla_base", LOCAL, "lerobot/smolvla_base"),
        (Path("a") / "b.gguf", LOCAL, str(Path("a") / "b.gguf")),
    ],
    ids=str,
)
def test_a_text_has_one_kind(text: object, kind: str, place: str) -> None:
    target = Target.parse(text)
    assert (target.kind, target.place) == (kind, place)
    assert bool(addresses_of(text)) == (kind == ADDRESS)
    assert target.remote == (kind in (ADDRESS, MODEL_SERVER))
    assert target.addresses == (place.split(",") if kind == ADDRESS else [])


def test_lists_are_of_addresses() -> None:
    for wrong in ([], ["blocks"], ["tcp://a:1", "blocks"]):
        with pytest.raises(ClientError, match="policy: expected a list of addresses"):
            Target.parse(wrong)
        assert not addresses_of(wrong)
    assert not addresses_of(3)


def test_an_expert_is_opened_by_its_environment() -> None:
    pytest.importorskip("sinew_eval.sim")
    with connect("expert:sinew/Pen-v0") as expert:
        assert expert.spec.chunk_size > 0
    with pytest.raises(SinewError, match="expert: name an environment as expert:ENV"):
        connect("expert")


def test_each_kind_is_opened_or_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="only `sinew eval` supports model servers"):
        connect("vla-eval://127.0.0.1:9")
    with pytest.raises(SinewError, match="absent.gguf"):
        connect(tmp_path / "absent.gguf")


def test_the_client_alone_opens_addresses_and_says_what_the_rest_needs() -> None:
    """A robot has no package sinew: an import hook hides it and its entry points."""
    program = """
import sys
from importlib import metadata
sys.modules["sinew"] = None
metadata.entry_points = lambda: {}
import sinew_client
for text in ("blocks", "expert:sinew/Pen-v0"):
    try:
        sinew_client.connect(text)
    except sinew_client.ClientError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "blocks: expected tcp://HOST:PORT" in done.stdout
    own, expert = done.stdout.splitlines()
    assert own.endswith("install the package sinew-vla")
    assert expert.endswith("install the package sinew-vla-eval")

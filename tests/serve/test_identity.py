"""Which bundle a server runs shows everywhere: after an update it is another, after a rollback the first again."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

from sinew_client import Client
from sinew_eval.episodes.policies import identity

import sinew
from sinew.bundle import Bundle
from sinew.bundle.schema import KEY_HEADER
from sinew.bundle.writer import rewrite
from sinew.policy import open_bundle
from tests.serve.test_server import START_S, serving

HEX = re.compile(r"[0-9a-f]{64}")


def updated(source: Path, out: Path) -> Path:
    """Write the same policy with a note more: another bundle, as after a further training."""
    old = Bundle(source)
    provenance = replace(old.manifest.provenance, notes=("trained for longer",))
    rewrite(old, replace(old.manifest, provenance=provenance), out)
    return out


def test_an_update_and_a_rollback_show_in_each_place(smolvla_bundle, tmp_path, monkeypatch):
    first = tmp_path / "v1.gguf"
    first.write_bytes(smolvla_bundle().read_bytes())
    os.utime(first, (1_700_000_000, 1_700_000_000))
    second = updated(first, tmp_path / "v2.gguf")
    (tmp_path / "key").write_text("secret-of-this-test\n")
    monkeypatch.setenv("SINEW_API_KEY", "secret-of-this-test")
    flags = ("--wire", "native:0", "--wire", "http:0", "--api-key-file", tmp_path / "key", "--threads", 1)
    with serving(tmp_path, first, *flags, "--no-prepare") as server:
        native, web = (word for word in server.line.split() if "://" in word)

        def ask(path: str, body: dict | None = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            headers = {"X-API-Key": "secret-of-this-test"}
            request = urllib.request.Request(web + path, data, headers, method="PUT" if data else "GET")
            with urllib.request.urlopen(request, timeout=START_S) as reply:
                return reply.read().decode()

        def places() -> list[str]:
            """Return the hash by metadata, health, the list of policies, metrics and reports."""
            identity.cache_clear()
            metrics = re.search(
                r'^sinew_policy_info\{.*policy="default".*\} 1\.0$', ask("/metrics"), re.MULTILINE
            )
            assert metrics is not None
            with Client(native, timeout=START_S, api_key="secret-of-this-test") as client:
                described = client.metadata()["server"]["identity"]
                assert described["version"].startswith("sinew ")
                return [
                    described["hash"],
                    client.health()["identity"]["hash"],
                    json.loads(ask("/v1/policies"))["policies"]["default"]["identity"]["hash"],
                    *HEX.findall(metrics.group()),
                    *HEX.findall(identity(native)["id"]),
                ]

        hashes = [Bundle(each).file.metadata[KEY_HEADER] for each in (first, second)]
        assert hashes[0] != hashes[1]
        assert places() == [hashes[0]] * 5
        for source, expected in ((second, hashes[1]), (first, hashes[0])):
            told = json.loads(ask("/v1/policies/default", {"source": str(source)}))["identity"]
            assert (told["hash"], told["source"]) == (expected, source.name)
            assert places() == [expected] * 5
        assert told["date"] == "2023-11-14T22:13:20+00:00"
        assert server.stop() == 0


def test_a_source_is_stated_as_typed_and_no_folder_of_this_machine(smolvla_bundle, tmp_path, monkeypatch):
    bundle = smolvla_bundle()
    monkeypatch.chdir(bundle.parent)
    for typed in (bundle, bundle.name):
        with sinew.load(typed, engine="eager") as policy:
            assert policy.identity["source"] == bundle.name
    with sinew.load("blocks", engine="eager") as policy:
        assert policy.identity["source"] == "blocks"
        assert policy.identity["hash"] == open_bundle("blocks").file.metadata[KEY_HEADER]


def test_a_bundle_without_hashes_has_an_identity_of_its_bytes(smolvla_bundle, tmp_path):
    from sinew.assemble import identity as identity_of

    copies = [Bundle(smolvla_bundle()) for _ in range(2)]
    for each in copies:
        each.hashes = None  # as in bundles written before 2026-11-21
    assert HEX.fullmatch(identity_of(copies[0])["hash"])
    assert identity_of(copies[0]) == identity_of(copies[1])


def test_inspect_prints_the_hash_that_a_server_states(smolvla_bundle):
    from sinew.bundle.facts import words

    bundle = Bundle(smolvla_bundle())
    assert bundle.file.metadata[KEY_HEADER] in words(bundle)["hashes"]

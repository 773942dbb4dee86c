"""Hostile text in every field of the dashboard and of the pages of results, in a real browser.

The text may become text and nothing else: no element, no attribute, no script, no request. A listener of the test
counts what a page asks for, and the page itself is asked for what is in it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ClientError
from sinew_eval.evidence import leaderboard, run_page
from sinew_eval.trials import report as trials

from sinew.cli import main
from sinew.core import ActionChunk, CameraSpec, Observation, ObservationError, VectorSpec
from sinew.serve.transport.listen import Listen
from tests.hostile.decoders import REPORT
from tests.serve import browser
from tests.serve.puppet import FRAME, SPEC, WAIT_S, Puppet, desk

pytestmark = pytest.mark.skipif(browser.find() is None, reason="needs Chromium or Chrome on the path")

MARKS = (
    "</script></style></title></textarea></pre><img evil src=ADDRESS/img onerror=window.evil=1>",
    "\"'><svg evil onload=window.evil=1><style evil>*{background:url(ADDRESS/css)}</style><script evil>evil=1</script>",
    "\" evil onmouseover=\"window.evil=1\" ' evil autofocus onfocus='window.evil=1' style='background:url(ADDRESS/a)' ",
    "javascript:window.evil=1//${window.evil=1}{{evil}}<!--><iframe evil src=ADDRESS/f><a evil href=javascript:evil>",
    "<base evil href=ADDRESS/><link evil rel=stylesheet href=ADDRESS/l><meta http-equiv=refresh content=0;url=ADDRESS>",
)
# What a page has that only the text can have brought.
FOUND = """(() => {
  const site = 'ADDRESS', all = [...document.querySelectorAll('*')];
  const named = (e) => [...e.attributes].map((a) => a.name.toLowerCase());
  const away = (e) => ['src', 'href', 'srcset', 'action', 'data', 'poster', 'style', 'xlink:href', 'content']
    .some((n) => ['javascript:', 'evil=1', site].some((bad) => (e.getAttribute(n) ?? '').toLowerCase().includes(bad)));
  return JSON.stringify([
    ...all.filter((e) => named(e).some((n) => n.startsWith('on') || n === 'evil') || away(e)).map((e) => e.outerHTML),
    ...all.filter((e) => ['IFRAME', 'OBJECT', 'EMBED', 'BASE'].includes(e.tagName)).map((e) => e.outerHTML),
    ...(window.evil === undefined ? [] : ['a script ran']),
    ...performance.getEntriesByType('resource').map((e) => e.name).filter((n) => n.startsWith(site)),
  ].map((text) => text.slice(0, 200)));
})()"""


@pytest.fixture
def away() -> Iterator[tuple[str, list[str]]]:
    """The address of another site, and what was asked of it."""
    asked: list[str] = []

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_words: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def check(page: browser.Page, address: str, asked: list[str]) -> None:
    assert json.loads(page.evaluate(FOUND.replace("ADDRESS", address))) == []
    assert asked == []
    assert not [error for error in page.errors if "evil" in error and "Content Security" not in error]


def test_the_check_finds_what_a_page_must_not_have(away: tuple[str, list[str]], tmp_path: Path) -> None:
    """Each text, written into a page as it is."""
    address, asked = away
    for number, text in enumerate(MARKS):
        path = tmp_path / f"{number}.html"
        body = text.replace("ADDRESS", address).replace("<meta", "<b")
        path.write_text(f'<html><body><a href="{body}">{body}</a></body></html>')
        with browser.browsing(path.as_uri(), tmp_path / f"profile-{number}") as page:
            page.wait("document.readyState === 'complete' && document.URL.startsWith('file:')")
            assert json.loads(page.evaluate(FOUND.replace("ADDRESS", address))), text
    assert asked


# ----------------------------------------------------------------------------- the dashboard


class Hostile(Puppet):
    """A policy whose names and answers are hostile texts."""

    def __init__(self, texts: Sequence[str]):
        super().__init__()
        self.texts = texts
        first, second, third, fourth, fifth = texts
        self.spec = replace(
            SPEC,
            architecture=fourth,
            name=fifth,
            embodiment=third,
            cameras=(CameraSpec(first, 48, 64),),
            state=VectorSpec(2, (second, third), (fourth, fifth)),
            action=VectorSpec(2, (first, second), (third, fourth)),
        )

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        if observation.session == "refuse":
            raise ObservationError(*self.texts[:3])
        actions = np.zeros((3, 2), np.float32)
        return ActionChunk(
            actions, session=observation.session, warnings=tuple(self.texts), text=self.texts[0]
        )


def test_the_dashboard_shows_hostile_text_as_text(away: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = away
    texts = [text.replace("ADDRESS", address) for text in MARKS]
    listen = Listen(dashboard=True)
    with desk(("native", "web"), policy=Hostile(texts), listen=listen) as at, contextlib.ExitStack() as stack:
        names = ("engine", "engine_reason", "device", "dtype", "version", "hardware", "bundle", "precision")
        server = {name: texts[number % len(texts)] for number, name in enumerate(names)}
        at.service.policies.get().metadata["server"] = server
        url = at.web.replace("ws://", "http://") + "/"
        page = stack.enter_context(browser.browsing(url, tmp_path / "profile"))
        page.wait("document.getElementById('status').className === 'good'")
        robot = stack.enter_context(Client(at.native, timeout=WAIT_S))
        for _ in range(2):
            page.wait("document.getElementById('status').className === 'good'")
            for number, text in enumerate(texts):
                seen = {"images": {texts[0]: FRAME}, "state": np.zeros(2), "prompt": text}
                for more in (
                    {"session": text[:100]},
                    {"session": "refuse"},
                    {"adapter": text, "session": "other"},
                ):
                    with contextlib.suppress(ClientError):
                        robot.infer({**seen, **more})
                counts = {text[:160]: 3}
                robot.report(
                    replace(
                        REPORT, run=number, name=text[:160], reason=text[:160], held=counts, clipped=counts
                    )
                )
            page.wait("document.getElementById('robots').textContent.includes('2 of 3 won')")
            page.wait("document.getElementById('sessions').textContent.includes('evil')")
            check(page, address, asked)
            page.size(390, 844)
            page.reload()


# ----------------------------------------------------------------------------- pages of results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = ["eval", "expert", "--env", "sinew/Pen-v0", "--episodes", "2", "--workers", "1", "--replan", "4"]
    assert main([*words, "--out", str(folder)]) == 0
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each leaf of a record."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))
    else:
        yield path


def spoil(record: dict[str, Any], text: str, write: Callable[[dict[str, Any]], str]) -> int:
    """Put ``text`` into each leaf with which a page can still be written, and into names; return into how many."""
    count = 0
    for path in [*places(record)]:
        inside: Any = record
        for step in path[:-1]:
            inside = inside[step]
        before, inside[path[-1]] = inside[path[-1]], text
        try:
            write(record)
            count += 1
        except Exception:  # noqa: BLE001 - the page needs something else there
            inside[path[-1]] = before
    return count


def show(markup: str, away: tuple[str, list[str]], folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(markup)
    with browser.browsing(path.as_uri(), folder / "profile") as page:
        page.wait("document.readyState === 'complete' && document.body.textContent.includes('evil')")
        check(page, *away)


def test_a_page_of_results_shows_hostile_text_as_text(
    run: Path, away: tuple[str, list[str]], tmp_path: Path
) -> None:
    text = "".join(MARKS).replace("ADDRESS", away[0])
    record = json.loads((run / "report.json").read_text())
    assert spoil(record, text, lambda found: run_page.write_page(found, [])) > 20
    for entry in record["variants"]:
        entry["by_task"] = {text: next(iter(entry["by_task"].values()))} if entry.get("by_task") else {}
    show(run_page.write_page(record, []), away, tmp_path)


def test_a_leaderboard_shows_hostile_text_as_text(
    run: Path, away: tuple[str, list[str]], tmp_path: Path
) -> None:
    text, paths = "".join(MARKS).replace("ADDRESS", away[0]), leaderboard.named_reports([run])
    record = {"boards": leaderboard.boards([run]), "date": "2026-01-01", "sinew": "1.0"}
    assert spoil(record, text, lambda found: leaderboard.markup(found, paths)) > 10
    show(leaderboard.markup(record, paths), away, tmp_path)


def test_a_page_of_trials_shows_hostile_text_as_text(away: tuple[str, list[str]], tmp_path: Path) -> None:
    """Also in what a person types: the instruction, the note of a trial, and why one was discarded."""
    words = ["trials", "pen", "--compare", "replan=4", "--robot", "pen", "--replan", "8", "--scenes", "1"]
    assert main([*words, "--out", str(tmp_path / "trials")]) == 0
    text = "".join(MARKS).replace("ADDRESS", away[0])
    record = json.loads((tmp_path / "trials" / "report.json").read_text())
    record["plan"]["discarded"] = [{"trial": "001", "seed": 5000, "label": "pen", "note": "the cup fell"}]
    record["plan"]["interrupted"] = ["002"]
    assert spoil(record, text, lambda found: trials.markup(found, [])) > 20
    for names in (record["plan"]["discarded"][0], record["outcomes"][0][0]):
        assert names["note"] == text
    show(trials.markup(record, []), away, tmp_path)

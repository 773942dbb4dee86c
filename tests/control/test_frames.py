"""Whether frames travel raw or as JPEG: chosen by what the network was seen to do, and said."""

from __future__ import annotations

import numpy as np
import pytest
from sinew_client import ClientError, RequestTimeout, schema
from sinew_client.control import Frames, Servers
from sinew_client.control.frames import GAIN, LOOKS, QUALITY, SLOW_MS

from tests.contract.test_clients import Server

FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
OBSERVATION = {"images": {"front": FRAME}, "state": [0.5], "prompt": "go"}


def after(frames: Frames, milliseconds: float, count: int = LOOKS) -> int | None:
    for _ in range(count):
        frames.took(milliseconds)
    return frames.quality


def test_a_fast_network_gets_every_pixel() -> None:
    frames = Frames("auto")
    assert after(frames, SLOW_MS, 100) is None
    assert frames.text == "raw: 50 ms on the network, JPEG is considered above 50 ms"


def test_raw_frames_stay_raw_and_a_slow_network_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    frames = Frames()
    assert frames.text == "raw: fewer than 5 answers yet"
    for milliseconds in (10.0, SLOW_MS):
        assert after(frames, milliseconds) is None
        assert frames.text == f"raw: {milliseconds:.0f} ms on the network, JPEG is considered above 50 ms"
    assert after(frames, 180.0, 100) is None
    said = "raw: 180 ms on the network; `auto` would try JPEG, which changes actions a little"
    assert frames.text == said
    assert caplog.messages == [f"frames: {said}"]


def test_one_slow_answer_changes_nothing() -> None:
    frames = Frames("auto")
    after(frames, 10.0)
    assert after(frames, 2000.0, LOOKS // 2) is None


def test_jpeg_stays_where_it_helped_and_goes_where_it_did_not() -> None:
    for share, quality in ((GAIN - 0.01, QUALITY), (GAIN, None)):
        frames = Frames("auto")
        assert after(frames, 200.0) == QUALITY
        assert frames.text == f"JPEG {QUALITY}: raw frames took 200 ms on the network"
        assert after(frames, 200.0 * share) == quality
        assert after(frames, 9000.0, 100) == quality  # for good
        assert "raw frames took 200" in frames.text
        assert frames.text.startswith("raw: JPEG was no faster" if quality is None else "JPEG 90: 158 ms")


def test_a_quality_is_asked_for_where_pillow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for quality in (1, 95):
        frames = Frames(str(quality))
        assert (frames.quality, frames.text) == (quality, f"JPEG {quality}: chosen by the user")

    def missing() -> None:
        raise ClientError("expected Pillow")

    monkeypatch.setattr("sinew_client.control.frames.need_pillow", missing)
    assert Frames("raw").quality is None
    for wanted in ("auto", "90"):
        with pytest.raises(ClientError, match="expected Pillow"):
            Frames(wanted)


@pytest.mark.parametrize("wanted", ["jpeg", "0", "96", "", "9.5"])
def test_other_words_are_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match=r"frames: expected raw, auto or a JPEG quality from 1 to 95, got"):
        Frames(wanted)


def test_what_is_chosen_is_what_is_sent() -> None:
    """Over a real connection: raw until the network was slow five times, an unanswered request among them."""
    seen: list[int] = []

    class Watching(Server):
        def _answer(self, request):  # type: ignore[no-untyped-def]
            seen.extend(image.encoding for image in request.images)  # who answers is asked before
            return super()._answer(request)

    server = Watching()
    try:
        frames = Frames("auto")
        servers = Servers(server.address, frames=frames)
        call = servers()
        call(OBSERVATION, 30.0)
        after(frames, 100.0, LOOKS - 1)
        server.does = "keep"
        with pytest.raises(RequestTimeout):
            call(OBSERVATION, 0.2)
        call.close()
        assert frames.quality == QUALITY
        server.does = "answer"
        again = servers()  # the next connection of the same run
        again(OBSERVATION, 30.0)
        again.close()
    finally:
        server.close()
    encodings = schema.Image.Encoding
    assert seen == [encodings.Value("RGB_U8"), encodings.Value("JPEG")]

"""The text of a stream: one token per prefix, held against a plain forward over the whole sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sinew_client.control import Stopped
from sinew_client.control.robots import Dry
from sinew_client.streams import decode_window
from torch import Tensor

from sinew.bundle import Bundle, write_bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.core import ConvertError, ObservationError
from sinew.engine.example import Inputs
from sinew.layers.linear import Embedding
from sinew.layers.norm import GemmaRMSNorm
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.rows import Rows
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.policy import Policy, load
from sinew.processing import ModelInputs
from sinew.stream import LocalLink, Session, StreamSettings
from sinew.stream.session import StateSample
from sinew.stream.text import TextDecoder
from tests.serve.puppet import until
from tests.serve.test_streams import Asker, serving, take

CASES = ("smolvla-2cam", "pi0-2cam", pytest.param("pi05-2cam", marks=pytest.mark.slow))
HEADS = {
    "smolvla": "model.vlm_with_expert.vlm.lm_head.weight",
    "pi0": "model.paligemma_with_expert.paligemma.lm_head.weight",
}
COUNT = 6


@pytest.fixture(scope="module")
def kept(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a golden checkpoint with its language head: ``kept("pi0-2cam") -> path``."""
    directory = tmp_path_factory.mktemp("heads")

    def make(case: str) -> Path:
        out = directory / f"{case}.gguf"
        if not out.exists():
            _convert(golden / case, golden / case / "checkpoint", out)
        return out

    return make


def _convert(home: Path, checkpoint: Path, out: Path, control_hz: float = 30, **settings: str) -> Path:
    more: dict[str, Any] = (
        {"vlm": home / "vlm"} if home.name.startswith("smolvla") else {"arch": home / "arch.json"}
    )
    return convert(
        checkpoint,
        out,
        name=home.name,
        control_hz=control_hz,
        settings=settings or {"lm_head": "true"},
        **more,
    )


@pytest.fixture(scope="module")
def loaded(kept: Callable[[str], Path]) -> Callable[[str, str], Policy]:
    """Opens a bundle with its language head once: ``loaded("pi0-2cam", "plan") -> policy``."""
    return cache(lambda case, engine: load(kept(case), engine=engine, threads=1))


def observation(policy: Policy, seed: int = 0, prompt: str = "pick up the cube") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = {c.name: rng.integers(0, 256, (32, 32, 3), np.uint8) for c in policy.spec.cameras}
    return {
        "images": images,
        "state": np.zeros(policy.spec.state.dim, np.float32),
        "prompt": prompt,
        "seed": 0,
    }


def streaming(policy: Policy, count: int = COUNT, prompt: str = "pick up the cube") -> Session:
    return Session(policy, StreamSettings(30.0, "none", seed=0, text_tokens=count), prompt, clock=lambda: 0.0)


def passes(stream: Session, seen: dict[str, Any], count: int, first: int = 0) -> None:
    """Push a frame and read it, so many times."""
    for k in range(first, first + count):
        stream.push_sample(StateSample(seen["state"], k / 30))
        stream.push_frame(seen["images"], k / 30)
        assert stream.read()


# ------------------------------------------------------------------------- the oracle


@torch.no_grad()
def next_token(policy: Policy, seen: dict[str, Any], text: Sequence[int]) -> int:
    """Return the token behind ``text``, by a plain forward over views, instruction and text, without padding, state,
    cache or a mask of blocks: whoever stands before the text sees all that does, a token of it what is not after it."""
    model: Any = policy.engine.model
    h, _ = forward(policy, policy.prepare(seen).inputs, text)
    table = model.language.embed_tokens.weight
    head = table if model.config.lm_head == "tied" else model.lm_head.weight
    return int((head @ norm(model.language.norm, h[-1])).argmax())


def forward(
    policy: Policy, inputs: ModelInputs, text: Sequence[int]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the last layer's output, [L, C], of views, instruction and ``text`` in one pass, and each layer's keys and
    values, [L, Hkv, D]."""
    model: Any = policy.engine.model
    batch = Inputs.of(inputs.batched(), policy.engine.device)
    x, valid, opens = model.embed_prefix(model.embed_images(batch.pixels), *batch[1:])
    rows = [row for row, ok, state in zip(x[0], valid[0], opens[0], strict=True) if ok and not state]
    before, table = len(rows), model.language.embed_tokens.weight
    h = torch.stack([*rows, *(table[token] * table.shape[1] ** 0.5 for token in text)])  # [L, C]
    may_see = torch.tensor([[j < before or j <= i for j in range(len(h))] for i in range(before)])
    may_see[:, before:] = False
    may_see = torch.cat([may_see, torch.ones(len(text), len(h), dtype=torch.bool).tril(before)])
    config, cache = model.config.language, []
    for layer in model.language.layers:
        n, a = norm(layer.input_norm, h), layer.attn
        q, k, v = (
            F.linear(n, p.weight).unflatten(1, (-1, config.head_dim)) for p in (a.q_proj, a.k_proj, a.v_proj)
        )
        group = config.num_heads // config.num_kv_heads
        q, k = rotated(q, config.rope_theta), rotated(k, config.rope_theta)
        cache.append((k, v))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        heads = (each.transpose(0, 1)[None] for each in (q, k, v))  # [1, H, L, D]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=may_see)[0].transpose(0, 1).flatten(1)
        h = h + F.linear(attended, a.o_proj.weight)
        n, mlp = norm(layer.post_norm, h), layer.mlp
        gate = F.linear(n, mlp.gate_proj.weight)
        gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
        h = h + F.linear(gate * F.linear(n, mlp.up_proj.weight), mlp.down_proj.weight)
    return h, cache


def norm(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight + 1 if isinstance(layer, GemmaRMSNorm) else layer.weight
    return weight * x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt()


def rotated(x: Tensor, theta: float) -> Tensor:  # [L, H, D]
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_plain_forward(loaded: Callable[[str, str], Policy], case: str) -> None:
    eager = loaded(case, "eager")
    seen, other = observation(eager), observation(eager, 1)
    expected: list[int] = []
    for k in range(COUNT - 1):  # the frame changes in the middle of the text
        expected.append(next_token(eager, seen if k < 2 else other, expected))
    assert len(set(expected)) > 1
    assert eager.processor.prompter.recipe.eos_token_id not in expected
    for engine in ("eager", "plan"):
        policy = loaded(case, engine)
        stream = streaming(policy)
        passes(stream, seen, 2)
        passes(stream, other, COUNT - 3, first=2)
        speech = stream._speech
        assert speech is not None
        assert speech.tokens == expected, engine
        window = stream.run()
        assert window is not None
        assert window.text.running == policy.processor.prompter.words(expected)
        assert window.text.said == ""


@pytest.mark.parametrize("engine", ["eager", "plan"])
@pytest.mark.parametrize("case", CASES)
def test_a_text_does_not_change_the_actions(
    loaded: Callable[[str, str], Policy], case: str, engine: str
) -> None:
    policy = loaded(case, engine)
    prepared = policy.prepare(observation(policy))
    inputs, noise = prepared.inputs.batched(), prepared.noise[None]
    (silent,) = policy.engine.solve(policy.engine.read(inputs), noise, 2)
    for text in ([], [5, 6, 7]):
        context, _ = policy.engine.read_text(inputs, text)
        (spoken,) = policy.engine.solve(context, noise, 2)
        np.testing.assert_allclose(spoken, silent, rtol=1e-5, atol=1e-5)
    chunk = policy.infer({**observation(policy), "solver_steps": 2}).actions
    np.testing.assert_allclose(policy.processor.finish(silent, prepared.state), chunk, rtol=1e-4, atol=1e-4)


def test_texts_end_and_follow_each_other() -> None:
    speech = TextDecoder(3, lambda ids: " ".join(map(str, ids)), end=9)
    assert speech.begin("go") == []
    assert (speech.add(9).running, speech.text.said) == ("", "")  # nothing was said
    for token, running, said in ((4, "4", ""), (5, "4 5", ""), (9, "", "4 5"), (6, "6", "4 5")):
        speech.begin("go")
        assert (speech.add(token).running, speech.text.said) == (running, said)
    assert speech.begin("stop") == []  # the text was about another instruction
    for token in (1, 2, 3):
        speech.add(token)
    assert (speech.text.running, speech.text.said, speech.begin("stop")) == ("", "1 2 3", [])


def test_a_new_instruction_begins_another_text(loaded: Callable[[str, str], Policy]) -> None:
    policy = loaded("smolvla-2cam", "eager")
    stream, seen = streaming(policy), observation(policy)
    passes(stream, seen, 3)
    stream.say("open the drawer")
    assert stream.read()  # of the same frame
    other = observation(policy, prompt="open the drawer")
    assert stream._speech is not None
    assert stream._speech.tokens == [next_token(policy, other, [])]


def test_a_table_that_stays_as_stored_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    table = Embedding(1030, 8)
    table.weight.requires_grad_(False)
    h = torch.randn(2, 8)
    expected = table.weight.bfloat16().float() @ h.T
    table.bfloat16()
    table.store = Rows(PLAIN, torch.float32, torch.device("cpu"))
    np.testing.assert_allclose(table.logits(h), expected.T, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- what is stored, what is refused


def test_what_a_bundle_keeps(
    kept: Callable[[str], Path],
    smolvla_bundle: Callable[[str], Path],
    pi_bundle: Callable[[str], Path],
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(path: Path) -> str:
        assert main(["inspect", str(path)]) == 0
        out = capsys.readouterr().out
        return next(line for line in out.splitlines() if line.startswith("language head"))

    assert "0.2 MB, for subtasks, answers and the text of streams" in told(kept("smolvla-2cam"))
    assert "not stored" in told(smolvla_bundle("smolvla-2cam"))
    assert kept("smolvla-2cam").stat().st_size - smolvla_bundle("smolvla-2cam").stat().st_size > 512 * 96 * 4
    # pi's head is its token table where the file says so; this fixture's is one of its own.
    folder = tmp_path / "checkpoint"
    folder.symlink_to(golden / "pi0-2cam" / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    table = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    own = not torch.equal(weights[table], weights[HEADS["pi0"]])
    assert ("MB, for subtasks" in told(kept("pi0-2cam"))) == own
    tied = changed(golden / "pi0-2cam", tmp_path / "tied", {HEADS["pi0"]: weights[table]})
    out = _convert(golden / "pi0-2cam", tied, tmp_path / "tied.gguf")
    assert "it adds no bytes" in told(out)
    assert abs(out.stat().st_size - pi_bundle("pi0-2cam").stat().st_size) < 4096
    policy = load(out, engine="eager", threads=1)
    stream, seen = streaming(policy), observation(policy)
    passes(stream, seen, 2)
    first = next_token(policy, seen, [])
    assert stream._speech is not None
    assert stream._speech.tokens == [first, next_token(policy, seen, [first])]
    # A table of low-bit rows is a head all the same.
    bundle, small = Bundle(out), tmp_path / "small.gguf"
    recipe = {"vision": "fp32", "language": "int8", "head": "fp32"}
    write_bundle(small, lambda: bundle.manifest, lowbit_sources(bundle, plan_formats(bundle, recipe)))
    h = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wide, stored = (
            load(small, engine=name, threads=1).engine.model.logits(h) for name in ("eager", "cpu")
        )
    np.testing.assert_allclose(stored, wide, rtol=1e-4, atol=1e-4)


def changed(home: Path, folder: Path, weights: dict[str, Tensor | None]) -> Path:
    """Return a copy of a golden checkpoint with other weights; None takes one away."""
    folder.mkdir()
    for file in (home / "checkpoint").iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).symlink_to(file)
    found = load_file(home / "checkpoint" / "model.safetensors") | weights
    save_file({name: each for name, each in found.items() if each is not None}, folder / "model.safetensors")
    return folder


def test_a_checkpoint_without_a_head_is_refused(golden: Path, tmp_path: Path) -> None:
    home = golden / "smolvla-2cam"
    folder = changed(home, tmp_path / "headless", {HEADS["smolvla"]: None})
    with pytest.raises(ConvertError, match=r"--set lm_head=true: expected model\.vlm.*lm_head"):
        _convert(home, folder, tmp_path / "out.gguf")
    groot = golden / "groot-n17"
    with pytest.raises(ConvertError, match="--set lm_head: expected a setting of"):
        convert(groot / "checkpoint", tmp_path / "out.gguf", vlm=groot / "vlm", settings={"lm_head": "true"})


def test_a_bundle_without_a_head_is_refused(
    smolvla_bundle: Callable[[str], Path],
) -> None:
    policy = load(smolvla_bundle("smolvla-2cam"), engine="eager", threads=1)
    object.__setattr__(policy.spec, "control_hz", 30.0)
    with pytest.raises(
        ObservationError, match="^text_tokens: expected 0, or a bundle with its language head"
    ):
        streaming(policy)
    with pytest.raises(ObservationError, match="^text_tokens: expected 0 to 256 tokens, got 257"):
        streaming(policy, 257)
    assert StreamSettings(30.0, text_tokens=256).text_tokens == 256


# ------------------------------------------------------------------------- the ends of a stream


def test_a_stream_of_the_wire_says_its_text(loaded: Callable[[str, str], Policy]) -> None:
    from sinew_client import schema

    policy = loaded("smolvla-2cam", "eager")
    seen = observation(policy)
    with serving(policy) as made:
        asker = Asker()
        (image, *_), names = seen["images"].values(), list(seen["images"])
        request = schema.PredictRequest(
            kind=4, rate=30.0, time=0.0, raw_state=seen["state"].tolist(), prompt="go", rtc="none",
            text_tokens=2, camera_names=names,
        )  # fmt: skip
        for _ in names:
            request.images.add(encoding=1, height=32, width=32, data=image.tobytes())

        def heard() -> str:
            request.time += 1 / 30
            request.frame_time = request.time
            take(made.streams, asker, request)
            return decode_window(asker.sent[-1]).said if asker.sent else ""

        first = next_token(policy, seen | {"images": dict.fromkeys(names, image), "prompt": "go"}, [])
        word = policy.processor.prompter.words([first])
        # A robot that asks seldom, as on a busy machine, may miss the window of a word.
        until(lambda: heard() and word in {decode_window(each).text for each in asker.sent}, "the word")
        for each in list(asker.under_way):
            each.abandon()


def test_a_link_in_this_process_says_its_text(loaded: Callable[[str, str], Policy]) -> None:
    policy = loaded("smolvla-2cam", "eager")
    link, seen = LocalLink(streaming(policy, 2)), observation(policy)
    ticks = iter(range(10**9))

    def said() -> bool:
        link.send(seen["state"], next(ticks) / 30, images=seen["images"])
        return any(window.said for window in link.windows())

    try:
        until(said, "a text")
    finally:
        link.close()


def test_the_verb_says_its_text(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 50 seconds: by one of two a busy machine was out of rows before it had the next, and for ever."""

    def enough(_robot: Dry, _row: np.ndarray) -> None:
        raise Stopped("a first command is enough")

    monkeypatch.setattr(Dry, "act", enough)
    home = golden / "smolvla-2cam"
    slow = _convert(home, home / "checkpoint", tmp_path / "slow.gguf", control_hz=1)
    asked = [
        "run",
        str(slow),
        "--stream",
        "--engine",
        "eager",
        "--prompt",
        "go",
        "--set",
        "rtc=none",
        "--hz",
        "5",
    ]
    assert main([*asked, "--seconds", "600", "--set", "stale=60", "--set", "text_tokens=1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["text"]) <= {"running", "said"}
    assert told["errors"] == 0

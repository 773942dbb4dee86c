"""What a language head says of one observation: against a plain forward of the whole sequence for each token, without a
cache, and against LeRobot's own greedy tokens; then the actions behind it, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from sinew.bundle import Bundle, write_bundle
from sinew.capabilities import Capabilities
from sinew.cli import main
from sinew.convert import convert
from sinew.core import BundleError, CancelledError, ConvertError, ObservationError, SinewError
from sinew.core.fields import problems
from sinew.engine.backend import BACKENDS
from sinew.engine.capability import Capability
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.watch import Watch
from sinew.families.pi.model import PI05, PI05Config
from sinew.layers.decoder import DecoderConfig
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.models.expert import Prefix
from sinew.policy import Policy, load
from sinew.processing import Processor
from sinew.processing.prompt import Prompter
from sinew.steps.prompt.base import PromptRecipe, TextRecipe
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.text import Text
from sinew.stream.split import read_context
from tests.convert.openpi_layout import write_checkpoint
from tests.golden import Golden
from tests.models.stages import fast_observation
from tests.models.test_pi0_fast_parity import sentence
from tests.stream.test_text import forward, norm, observation

MOST = 6
ENGINES = ("eager", "plan")
SETTINGS = {"smolvla-2cam": {"question_prompt": "Question: {prompt}\nAnswer: "}}
FRAMES = 2  # cameras of each case


@pytest.fixture(scope="module")
def kept(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a golden checkpoint with its head and what that is asked with: ``kept("pi05-2cam") -> path``."""
    directory = tmp_path_factory.mktemp("heads")

    @cache
    def make(case: str) -> Path:
        home = golden / case
        more: dict[str, Any] = (
            {"vlm": home / "vlm"} if case.startswith("smolvla") else {"arch": home / "arch.json"}
        )
        settings = {"lm_head": "true", **SETTINGS.get(case, {})}
        return convert(
            home / "checkpoint",
            directory / f"{case}.gguf",
            name=case,
            control_hz=30,
            settings=settings,
            **more,
        )

    return make


@pytest.fixture(scope="module")
def loaded(kept: Callable[[str], Path]) -> Callable[[str, str], Policy]:
    """Opens a bundle with its language head once: ``loaded("pi05-2cam", "plan") -> policy``."""
    return cache(lambda case, engine: load(kept(case), engine=engine, threads=1))


@pytest.fixture(scope="module")
def policy(loaded: Callable[[str, str], Policy]) -> Policy:
    return loaded("pi05-2cam", "eager")


# ------------------------------------------------------------------------- the oracle


@torch.no_grad()
def spoken(policy: Policy, seen: dict[str, Any], count: int = MOST) -> list[int]:
    """Return the greedy text, each token by a forward of everything before it."""
    model: Any = policy.engine.model
    table = model.language.embed_tokens.weight
    head = table if model.config.lm_head == "tied" else model.lm_head.weight
    inputs, text = policy.prepare(seen).inputs, list[int]()
    while len(text) < count:
        h, _ = forward(policy, inputs, text)
        text.append(int((head @ norm(model.language.norm, h[-1])).argmax()))
    return text


@torch.no_grad()
def acted(policy: Policy, seen: dict[str, Any], behind: list[int]) -> np.ndarray:
    """Return the actions, [H, D] in world units, of prompt and ``behind`` read in one pass, by Euler's steps."""
    model: Any = policy.engine.model
    prepared = policy.prepare(seen)
    _, kv = forward(policy, prepared.inputs, behind)
    length = len(kv[0][0])
    prefix = Prefix(
        tuple((k[None], v[None]) for k, v in kv),
        torch.ones(1, length, dtype=torch.bool),
        torch.tensor([length]),
    )
    x: Tensor = torch.from_numpy(prepared.noise[None])
    for step in range(prepared.steps):
        t = torch.tensor([1 - step / prepared.steps])
        x = x - model.velocity(x, t, prefix) / prepared.steps
    return policy.processor.finish(x[0].numpy(), prepared.state)


# ------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["pi05-2cam", "pi0-2cam", "smolvla-2cam"])
def test_an_answer_is_the_greedy_text_of_a_plain_forward(
    loaded: Callable[[str, str], Policy], case: str, engine: str
) -> None:
    policy, eager = loaded(case, engine), loaded(case, "eager")
    for seed, question in enumerate(("what is in the gripper?", "is the drawer open?")):
        seen = observation(eager, seed, prompt="")
        expected = spoken(eager, {**seen, "question": question})
        prepared = policy.prepare({**seen, "question": question, "text_tokens": MOST})
        assert prepared.words is not None
        assert (prepared.words.most, prepared.words.behind) == (MOST, None)
        context, said = policy.engine.say_text(prepared.inputs.batched(), MOST, behind=None)
        assert context is None
        assert said == expected
        assert policy.ask(seen, question, MOST) == policy.processor.prompter.words(expected)
    assert len(set(expected)) > 1


def test_an_answer_depends_on_frames_and_question(policy: Policy) -> None:
    texts = {
        tuple(spoken(policy, {**observation(policy, seed, prompt=""), "question": question}))
        for seed in (0, 1)
        for question in ("what is in the gripper?", "is the drawer open?")
    }
    assert len(texts) > 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_subtask_and_the_actions_behind_it(loaded: Callable[[str, str], Policy], engine: str) -> None:
    """The text is that of a plain forward, and the actions are those of one pass over prompt, text and what is
    written behind it."""
    policy, eager = loaded("pi05-2cam", engine), loaded("pi05-2cam", "eager")
    seen = {**observation(policy), "subtask": True, "text_tokens": MOST, "solver_steps": 3}
    expected = spoken(eager, seen)
    cue = policy.processor.prompter.tokenizer.encode(";\nAction: ", add_special_tokens=False).ids
    chunk = policy.infer(seen)
    assert chunk.text == policy.processor.prompter.words(expected)
    np.testing.assert_allclose(chunk.actions, acted(eager, seen, [*expected, *cue]), rtol=1e-4, atol=1e-4)
    assert policy.subtask(observation(policy), MOST) == chunk.text
    # What was said matters, and so does what stands behind it.
    for other in (cue, expected, [*expected[::-1], *cue]):
        assert np.abs(chunk.actions - acted(eager, seen, other)).max() > 1e-2
    assert chunk.timing.text_ms > 0
    assert chunk.timing.vision_ms + chunk.timing.prefix_ms + chunk.timing.text_ms < chunk.timing.total_ms
    assert policy.infer({**seen, "subtask": False, "text_tokens": None}).timing.text_ms == 0


def test_actions_behind_a_subtask_continue_a_running_chunk(policy: Policy) -> None:
    seen = {**observation(policy), "subtask": True, "text_tokens": MOST}
    free = policy.infer(seen)
    previous = free.actions + 1
    for rtc in policy.capabilities.guidance:
        held = policy.infer({**seen, "previous": previous, "delay": 2, "rtc": rtc})
        assert held.text == free.text
        assert np.abs(held.actions[:2] - previous[:2]).max() < np.abs(free.actions[:2] - previous[:2]).max()
    assert policy.capabilities.guidance


def test_a_bundle_of_few_bits_says_words_too(kept: Callable[[str], Path], tmp_path: Path) -> None:
    """On the engine that computes on the weights as they are stored, as on those that widen them. It rounds activations
    and attention, after which the second word of random weights may be another."""
    bundle, small = Bundle(kept("pi05-2cam")), tmp_path / "small.gguf"
    recipe = {"vision": "fp32", "language": "int8", "head": "fp32"}
    write_bundle(small, lambda: bundle.manifest, lowbit_sources(bundle, plan_formats(bundle, recipe)))
    eager, plan, cpu = (load(small, engine=engine, threads=1) for engine in ("eager", "plan", "cpu"))
    for engine, most in ((plan, MOST), (cpu, 1)):
        seen = {**observation(eager), "subtask": True, "text_tokens": most}
        wide, chunk = eager.infer(seen), engine.infer(seen)
        assert wide.text
        assert chunk.text == wide.text
        assert np.abs(chunk.actions - wide.actions).max() <= 1e-2 * np.abs(wide.actions).max()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefix_is_read_once(
    loaded: Callable[[str, str], Policy], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames go through the tower once, the prompt through the language model once; each token is a row more, and so is
    what follows the text: none of it is read twice."""
    policy = loaded("pi05-2cam", engine)
    model, embedded, rows = policy.engine.model, list[int](), list[int]()
    embed = model.embed_images
    monkeypatch.setattr(model, "embed_images", lambda pixels: embedded.append(len(pixels)) or embed(pixels))
    last = model.language.layers[-1].mlp
    hook = last.register_forward_pre_hook(lambda _module, given: rows.append(given[0].shape[1]))
    try:
        prepared = policy.prepare({**observation(policy), "subtask": True, "text_tokens": MOST})
        policy.run(prepared)
    finally:
        hook.remove()
    assert prepared.words is not None
    assert prepared.words.behind is not None
    tokens, views = len(prepared.inputs.tokens), model.grid_of(*prepared.inputs.pixels.shape[-2:])
    prefix = FRAMES * views[0] * views[1] + tokens
    assert embedded == [1]
    assert rows == [prefix, *[1] * (MOST - 1), 1 + len(prepared.words.behind)]


def test_the_kept_keys_and_values_are_those_of_the_prompt_alone(policy: Policy) -> None:
    """Bit by bit: what the head reads of views and instruction is what it reads where nothing is said."""
    prepared = policy.prepare({**observation(policy), "subtask": True})
    inputs = prepared.inputs.batched()
    alone = policy.engine.read(inputs)
    context, said = policy.engine.say_text(inputs, MOST, behind=(5, 6))
    for (keys, values), (longer_keys, longer_values) in zip(alone.kv, context.kv, strict=True):
        rows = keys.shape[1]
        assert longer_keys.shape[1] == rows + len(said) + 2
        assert torch.equal(keys, longer_keys[:, :rows])
        assert torch.equal(values, longer_values[:, :rows])


def test_a_text_ends_with_its_end_token(policy: Policy) -> None:
    seen = {**observation(policy), "subtask": True, "solver_steps": 3}
    expected = spoken(policy, seen)
    inputs = policy.prepare(seen).inputs.batched()
    for count in range(MOST):
        if (end := expected[count]) in expected[:count]:
            continue
        context, said = policy.engine.say_text(inputs, MOST, end, behind=(5,))
        assert said == expected[:count]
        whole, _ = policy.engine.say_text(inputs, count, behind=(5,)) if count else (None, [])
        if (
            whole is not None
        ):  # the end is in no context; in one pass or in two the rows are rounded otherwise
            for pair, other in zip(context.kv, whole.kv, strict=True):
                for found, wanted in zip(pair, other, strict=True):
                    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    context, said = policy.engine.say_text(inputs, MOST, expected[0], behind=())
    assert said == []
    assert context.kv[0][0].shape == policy.engine.read(inputs).kv[0][0].shape


def test_the_bundle_says_what_ends_a_text(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {**observation(policy), "subtask": True, "text_tokens": MOST}
    expected = spoken(policy, seen)
    end = next(token for token in expected if token != expected[0])
    count = expected.index(end)
    prompt = replace(policy.manifest.processing.prompt, eos_token_id=end)
    changed = replace(policy.manifest, processing=replace(policy.manifest.processing, prompt=prompt))
    monkeypatch.setattr(policy, "manifest", changed)
    chunk = policy.infer(seen)
    assert chunk.text == policy.processor.prompter.words(expected[:count])
    cue = list(policy.processor.prompter.behind)
    wanted = acted(policy, seen, [*expected[:count], *cue])
    np.testing.assert_allclose(chunk.actions, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", range(4))
def test_greedy_tokens_are_lerobots(golden: Path, case_bundle: Callable[[str], Path], number: int) -> None:
    """LeRobot 0.6.1's PaliGemma decoding behind a bidirectional prefix, as the fixture of pi0-FAST has it: as pi0.5's
    language model the same weights say the same tokens."""
    g = Golden(golden / "pi0fast-2cam")
    fast = load(case_bundle("pi0fast-2cam"), "cpu", "float32", "eager", allow_missing_cameras=True)
    source: Any = fast.engine.model
    language = source.config.language
    expert = DecoderConfig(
        24, 32, language.num_layers, 2, language.num_kv_heads, language.head_dim, 1e-6, 1e4, "gemma_rms"
    )
    if expert.num_heads % expert.num_kv_heads:
        expert = replace(expert, num_heads=language.num_kv_heads)
    config = PI05Config(
        vision=source.config.vision, language=language, expert=expert, vocab_size=source.config.vocab_size,
        chunk_size=4, max_state_dim=8, max_action_dim=8, min_period=4e-3, max_period=4.0, lm_head="own",
    )  # fmt: skip
    model = PI05(config)
    for name in ("vision", "connector", "language", "lm_head"):
        setattr(model, name, getattr(source, name))
    inputs = fast.prepare(fast_observation(g, number)).inputs
    start = [*inputs.tokens, source.config.start_token]  # upstream's, behind the prompt
    inputs = replace(inputs, tokens=np.array(start), token_mask=np.ones(len(start), bool))
    wanted = sentence(g, number)
    end = source.config.end_token
    engine = EagerEngine(model, torch.device("cpu"))
    _, said = engine.say_text(inputs.batched(), source.config.max_tokens, end, behind=None)
    assert said == [token for token in wanted if token != end]
    assert len(said) > 5


# ------------------------------------------------------------------------- it can be ended


@pytest.mark.parametrize("engine", ENGINES)
def test_a_text_is_cancelled_between_two_tokens(
    loaded: Callable[[str, str], Policy], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, cancel, calls = loaded("pi05-2cam", engine), threading.Event(), list[int]()
    model = policy.engine.model
    go_on = model.continue_text

    def continued(said: Any, tokens: Tensor) -> Any:
        calls.append(tokens.shape[1])
        if len(calls) == 2:
            cancel.set()
        return go_on(said, tokens)

    monkeypatch.setattr(model, "continue_text", continued)
    with pytest.raises(CancelledError):
        policy.ask(observation(policy), "what is there?", 200, cancel=cancel)
    assert calls == [1, 1]
    watch, seen = Watch(), observation(policy)
    policy.engine.say_text(
        policy.prepare({**seen, "subtask": True}).inputs.batched(), 3, behind=None, watch=watch
    )
    assert len(watch._laps["text"]) == 3


# ------------------------------------------------------------------------- what is refused


def bad() -> list[Any]:
    asked = {"question": "what is there?"}
    return [
        pytest.param(changes, why, id=name)
        for name, changes, why in (
            ("empty", {"question": "  \n"}, "question: expected a question.* got an empty string"),
            ("number", {"question": 3}, "question: expected a string, got int"),
            ("long", {"question": "what " * 500}, "question: expected 1 to [0-9]+ tokens, got [0-9]+"),
            ("endless", {"question": "w" * 70_000}, "question: expected at most 65536 characters, got 70000"),
            (
                "half a character",
                {"question": "what is \ud800?"},
                "question: expected text that can be encoded as UTF-8",
            ),
            (
                "both",
                {**asked, "subtask": True},
                "question: expected only one of question and subtask, got both",
            ),
            (
                "tokens",
                {**asked, "tokens": np.array([5, 6]), "prompt": ""},
                "tokens: expected none together with question",
            ),
            (
                "no tokens",
                {**asked, "text_tokens": 0},
                "text_tokens: expected an integer from 1 to 256, got 0",
            ),
            ("many tokens", {**asked, "text_tokens": 257}, "text_tokens: expected an integer from 1 to 256"),
            (
                "noise",
                {**asked, "noise": np.zeros((50, 32), np.float32)},
                "noise: expected no value if only text is requested",
            ),
            (
                "steps",
                {"subtask": True, "text_only": True, "solver_steps": 2},
                "solver_steps: expected no value if only text is requested",
            ),
            ("subtask", {"subtask": 1}, "subtask: expected true or false, got int"),
            (
                "of nothing",
                {"text_only": True},
                "text_only: expected a subtask or a question together with it",
            ),
            (
                "length of nothing",
                {"text_tokens": 5},
                "text_tokens: expected a subtask or a question together with it",
            ),
            (
                "no prompt",
                {"subtask": True, "prompt": " "},
                "prompt: expected an instruction from which a subtask",
            ),
        )
    ]


@pytest.mark.parametrize(("changes", "why"), bad())
def test_what_cannot_be_asked_is_refused(policy: Policy, changes: dict[str, Any], why: str) -> None:
    for refuse in (policy.check, policy.infer):
        with pytest.raises(ObservationError, match=f"^{why}"):
            refuse({**observation(policy), **changes})


@pytest.mark.parametrize("question", ["", "  ", 5, b"why?"])
def test_a_question_is_a_text(policy: Policy, question: Any) -> None:
    with pytest.raises(ObservationError, match="^question: expected a non-empty text"):
        policy.ask(observation(policy), question)


def test_who_has_no_head_says_how_to_get_one(
    policy: Policy, pi_bundle: Callable[[str], Path], loaded: Callable[[str, str], Policy]
) -> None:
    bare = load(pi_bundle("pi0-2cam"), engine="eager", threads=1)
    with pytest.raises(ObservationError, match=r"^question: expected nothing, or a bundle with a language head"
                       r".*sinew convert --set lm_head=true\), got pi0-2cam, which has no language head"):  # fmt: skip
        bare.ask(observation(bare), "what is there?")
    with pytest.raises(
        ObservationError, match="^subtask: expected nothing, or a bundle with a language head"
    ):
        bare.infer({**observation(bare), "subtask": True})
    assert bare.capabilities.texts == ()
    pi0 = loaded("pi0-2cam", "eager")
    assert pi0.capabilities.texts == ("question",)
    with pytest.raises(
        ObservationError,
        match="^subtask: expected nothing, because this bundle has no prompt for it .*subtask_prompt=",
    ):
        pi0.subtask(observation(pi0))


def test_engines_that_cannot_say_words_are_refused_by_name(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = BACKENDS["onnx"].lacking(Capability.SPEAK)
    assert lacking is not None
    facts = replace(policy.facts, refusals={Capability.SPEAK: lacking})
    monkeypatch.setattr(policy, "capabilities", Capabilities.of(policy.manifest, facts, "onnx"))
    with pytest.raises(
        ObservationError,
        match="^question: expected nothing, or engine cpu, plan or eager, which generates text, got engine onnx",
    ):
        policy.ask(observation(policy), "what is there?")
    assert policy.describe()["says"] == []


def test_words_are_said_for_one_alone(policy: Policy) -> None:
    asked = policy.prepare({**observation(policy), "subtask": True})
    assert policy.batch_key(asked) is None
    with pytest.raises(SinewError, match="^a batch: expected observations with the same batch_key"):
        policy.run_batch([asked, asked])
    with pytest.raises(SinewError, match="^context: a request for text needs the whole policy"):
        read_context(policy, asked, "fp32")


# ------------------------------------------------------------------------- what a bundle says


def test_the_prompts_are_data_of_the_bundle(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = golden / "pi05-2cam"
    settings = {
        "lm_head": "true",
        "subtask_prompt": "Task: {prompt}. Subtask: ",
        "subtask_action": ", State: ",
        "question_prompt": "Question: {prompt}\nAnswer: ",
    }
    made = convert(home / "checkpoint", tmp_path / "own.gguf", arch=home / "arch.json", settings=settings)
    processor, state = Processor(Bundle(made).manifest), np.zeros(7, np.float32)
    prompter = processor.prompter
    found = prompter.recipe.text
    assert found is not None
    assert prompter.text("go_on", state, "subtask") == "Task: go on. Subtask: "
    assert prompter.text("why?", state, "question") == "Question: why?\nAnswer: "
    assert prompter.words(prompter.behind) == ", State: "
    assert main(["inspect", str(made)]) == 0
    out = capsys.readouterr().out
    assert '"Task: {prompt}. Subtask: "' in " ".join(out.split())
    for asked, why in (
        ({"subtask_prompt": "{prompt}"}, "--set subtask_prompt requires --set lm_head=true"),
        (
            {"lm_head": "true", "question_prompt": "why"},
            "text.question: expected a placeholder for the question",
        ),
    ):
        with pytest.raises((ConvertError, BundleError), match=why):
            convert(home / "checkpoint", tmp_path / "no.gguf", arch=home / "arch.json", settings=asked)
    home = golden / "pi0-2cam"
    asked = {"lm_head": "true", "subtask_prompt": "{prompt}, {state}"}
    with pytest.raises(ConvertError, match="--set subtask_prompt: expected no {state}"):
        convert(home / "checkpoint", tmp_path / "no.gguf", arch=home / "arch.json", settings=asked)


def test_the_prompts_of_pi05_are_the_fields(policy: Policy) -> None:
    prompter = policy.processor.prompter
    found = prompter.recipe.text
    assert found is not None
    state = np.array([-1.0, 0.0, 0.5, 1.0, -2.0, 0.25, 0.0], np.float32)
    wanted = "Task: put it there, State: 0 128 192 255 -1 160 128;\nSubtask: "
    assert prompter.text(" put_it there\n", state, "subtask") == wanted
    assert found.action == ";\nAction: "
    assert prompter.text("why?", state, "question") == "answer en why?\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TextRecipe(most=0), "most: expected 1 to 256, got 0"),
        (TextRecipe(subtask=(Text("go"),)), "subtask: expected a placeholder for the instruction"),
        (
            TextRecipe(question=(Instruction(), *[Instruction()] * 4)),
            "question: expected {prompt} at most 4 times",
        ),
        (
            TextRecipe(question=(Instruction(), Image("<image>", 5, 3))),
            "question: a prompt of the language head cannot contain tokens of views",
        ),
    ],
)
def test_a_strange_recipe_is_refused(text: TextRecipe, why: str) -> None:
    assert any(why in problem for problem in problems(PromptRecipe(8, 100, 0, text=text)))


@pytest.mark.parametrize(
    ("action", "changes", "why"),
    [
        ("; go " * 200, {}, "expected 1 to 200 tokens, got"),
        ("; go", {"vocab_size": 20}, r"expected token ids in \[0, 20\), got"),
    ],
)
def test_what_is_written_behind_a_subtask_is_of_the_vocabulary(
    policy: Policy, action: str, changes: dict[str, int], why: str
) -> None:
    manifest = policy.manifest
    found = manifest.processing.prompt.text
    assert found is not None
    prompt = replace(manifest.processing.prompt, text=replace(found, action=action), **changes)
    with pytest.raises(BundleError, match=rf"^sinew\.processing\.prompt\.text\.action: .*{why}"):
        Prompter(manifest.tokenizer, prompt)


@pytest.mark.parametrize(
    ("name", "says"), [("pi05_droid", True), ("pi05_libero", False), ("pi0_droid", False)]
)
def test_openpis_checkpoints_keep_them_too(golden: Path, tmp_path: Path, name: str, says: bool) -> None:
    """A pi0.5 whose prompts have no state has no prompt of a subtask, as the one that is known has the state in it."""
    path, arch, _ = write_checkpoint(golden, tmp_path, name)
    made = convert(path, tmp_path / "made.gguf", openpi_config=name, arch=arch, settings={"lm_head": "true"})
    found = Bundle(made).manifest.processing.prompt.text
    assert found is not None
    assert (bool(found.subtask), bool(found.question)) == (says, True)
    policy = load(made, engine="eager", threads=1)
    images = {c.name: np.zeros((32, 32, 3), np.uint8) for c in policy.spec.cameras}
    seen = {"images": images, "state": np.zeros(policy.spec.state.dim, np.float32), "prompt": "go", "seed": 0}
    assert policy.ask(seen, "what is there?", 3) == policy.processor.prompter.words(
        spoken(policy, {**seen, "prompt": "", "question": "what is there?"}, 3)
    )


def test_the_verb_says_words(
    kept: Callable[[str], Path], tmp_path: Path, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = []
    for camera in policy.spec.cameras:
        file = tmp_path / f"{camera.name}.png"
        PIL.Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save(file)
        pictures += ["--image", f"{camera.name}={file}"]
    state = ["--state", ",".join("0" * 7), "--engine", "eager", "--json"]
    asked = ["infer", str(kept("pi05-2cam")), *pictures, *state]
    for more, rows in ((["--prompt", "go", "--subtask"], 50), (["--question", "what is there?"], 0)):
        assert main([*asked, *more]) == 0
        printed = capsys.readouterr().out
        told = json.loads(printed.splitlines()[-1])
        assert len(told["actions"]) == rows
        assert told["text"]
        assert told["timing"]["text_ms"] > 0
    assert main([*asked, "--prompt", "go"]) == 0
    assert "text" not in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_advantage_is_refused_beside_words(golden: Path, tmp_path: Path) -> None:
    """The prompt of words has no place for one: neither that of the request nor the usual one is dropped in silence."""
    home = golden / "pi05-2cam"
    settings = {"lm_head": "true", "advantage": "good,bad", "usual_advantage": "good"}
    path = convert(home / "checkpoint", tmp_path / "o.gguf", settings=settings, arch=home / "arch.json")
    policy = load(path, engine="eager", threads=1, allow_missing_cameras=True)
    seen = {**vars(policy.dummy_observation()), "subtask": True}
    for fields, message in (
        (
            {},
            r"advantage: expected an empty text together with subtask, .* the usual advantage \(good\), got none",
        ),
        (
            {"advantage": "bad"},
            "advantage: expected none together with subtask, because that prompt contains no advantage",
        ),
        ({"advantage": "bad", "guidance_scale": 2.0}, "guidance_scale: expected none together with subtask"),
    ):
        for act in (policy.check, policy.prepare):
            with pytest.raises(ObservationError, match=f"^{message}"):
                act({**seen, **fields})
    assert policy.infer({**seen, "advantage": ""}).actions.shape == (
        policy.spec.chunk_size,
        policy.spec.action.dim,
    )
    assert isinstance(policy.subtask({**seen, "subtask": False}), str)  # words alone

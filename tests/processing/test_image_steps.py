"""Image steps and channel groups as a recipe's data; prompts with the fields that chat templates and OpenVLA need."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sinew.bundle.schema import PromptRecipe
from sinew.core import BundleError, ObservationError
from sinew.processing.image import check_frame, empty_frame, prepare_frame
from sinew.processing.prompt import MAX_CHARACTERS, Prompter
from sinew.steps.image.base import CameraScale, ImageRecipe
from sinew.steps.image.centre_crop import CentreCrop
from sinew.steps.image.crop import Crop
from sinew.steps.image.jpeg import Jpeg, jpeg_round_trip
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.image.resample import resize_antialias, resize_area
from sinew.steps.image.resize import Resize
from sinew.steps.image.short_side import ShortSide
from sinew.steps.image.tensorflow import centre_crop, resize_lanczos3, to_uint8
from sinew.steps.prompt.base import HeldTokens, PromptStep, TextRecipe
from sinew.steps.prompt.drop import Drop
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.last import Last
from sinew.steps.prompt.lower import Lower
from sinew.steps.prompt.state import State
from sinew.steps.prompt.template import sentence

SIZE = (24, 20)
RESIZE = Resize(*SIZE, other_sizes=True)
CROP = CentreCrop(*SIZE, area=0.9)
OPENVLA = ImageRecipe(
    *SIZE,
    mean=(0.48, 0.45, 0.4, 0.5, 0.5, 0.5),
    std=(0.23, 0.22, 0.21, 0.5, 0.5, 0.5),
    steps=(Jpeg(other_sizes=True), RESIZE, CROP),
)


@pytest.fixture
def frame():
    return np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)


def test_steps_run_in_order(frame):
    expected = centre_crop(to_uint8(resize_lanczos3(jpeg_round_trip(frame), *SIZE)), 0.9, *SIZE)
    found = prepare_frame(frame, OPENVLA)
    unit = expected.astype(np.float32).transpose(2, 0, 1) / np.float32(255)
    mean, std = (np.asarray(x, np.float32)[:, None, None] for x in (OPENVLA.mean, OPENVLA.std))
    np.testing.assert_array_equal(found, (np.concatenate([unit, unit]) - mean) / std)


def test_frames_of_the_right_size_skip_what_is_for_others(frame):
    fits = frame[: SIZE[0], : SIZE[1]]
    only_crop = replace(OPENVLA, steps=(CROP,))
    np.testing.assert_array_equal(prepare_frame(fits, OPENVLA), prepare_frame(fits, only_crop))


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("area", resize_area),
        ("bilinear", lambda x, *size: resize_antialias(x, *size, "bilinear")),
        ("bicubic", lambda x, *size: resize_antialias(x, *size, "bicubic")),
    ],
)
def test_methods(frame, method, function):
    recipe = ImageRecipe(*SIZE, steps=(replace(RESIZE, method=method),))
    plain = ImageRecipe(*SIZE)
    np.testing.assert_array_equal(prepare_frame(frame, recipe), prepare_frame(function(frame, *SIZE), plain))


def test_float_frames_become_the_bytes_they_came_from(frame):
    floats = frame.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(prepare_frame(floats, OPENVLA), prepare_frame(frame, OPENVLA))


def test_steps_take_any_size(frame):
    check_frame(frame, "images.top", OPENVLA)
    with pytest.raises(ObservationError, match="exactly 24 x 20"):
        check_frame(frame, "images.top", replace(OPENVLA, steps=()))
    with pytest.raises(ObservationError, match="becomes 24 x 20, got 40 x 50, which becomes 40 x 50$"):
        check_frame(frame, "images.top", replace(OPENVLA, steps=(Jpeg(),)))


@pytest.mark.parametrize("count", range(2, 16))
def test_a_recipe_has_three_numbers_for_each_of_one_to_four_groups(count):
    said = "mean, std: expected three numbers for each of 1 to 4 groups, got"
    whole = list(ImageRecipe(4, 6, (), (0.5,) * count, (0.5,) * count).problems())
    assert whole == ([] if count in (3, 6, 9, 12) else [f"{said} {count}, {count}"])
    assert list(ImageRecipe(4, 6, (), (0.5,) * 3, (0.5,) * count).problems()) == (
        [] if count == 3 else [f"{said} 3, {count}"]
    )


@pytest.mark.parametrize(
    ("steps", "problems"),
    [
        ((), []),
        ((Jpeg(), Resize(4, 6)), []),
        ((Resize(4, 6), Jpeg()), []),
        ((Resize(8, 8), ShortSide(4)), []),  # whose end follows from the frame
        ((Letterbox(4, 6), Resize(4, 6, "area_float")), []),
        ((Resize(4, 8), Jpeg()), ["steps: expected steps that end in 4x6, got 4x8"]),
        (
            (Jpeg(), Resize(4, 6, "area_float")),
            ["steps: expected steps for uint8 frames or steps for float frames, got both"],
        ),
    ],
)
def test_steps_of_a_recipe_go_together(steps, problems):
    assert list(ImageRecipe(4, 6, steps).problems()) == problems


def test_each_camera_may_have_statistics_of_its_own():
    recipe = ImageRecipe(4, 6)
    assert (recipe.mean, recipe.std, recipe.channels) == ((0.5,) * 3, (0.5,) * 3, 3)
    assert recipe.of_camera(1) is recipe
    assert str(recipe) == "4x6 as they come, (x - 0.5) / 0.5"
    groups = ImageRecipe(4, 6, (RESIZE,), (0.5, 0.4, 0.3, 0.25, 0.2, 0.1), (0.5, 0.5, 0.5, 2.0, 1.0, 1.0))
    assert str(groups) == f"{RESIZE} (other sizes), (x - 0.5) / 0.5, (x - 0.25) / 2"
    scales = tuple(CameraScale((each,) * 3, (each + 1,) * 3) for each in (0.25, 0.75))
    assert replace(recipe, cameras=scales).of_camera(1) == ImageRecipe(4, 6, (), (0.75,) * 3, (1.75,) * 3)
    assert str(replace(recipe, cameras=scales)).endswith(", statistics of each camera")
    assert ImageRecipe(8, 8, (Crop(4, 6),)).size_after(8, 8) == (4, 6)
    assert ImageRecipe(8, 8, (Resize(4, 6, other_sizes=True),)).size_after(8, 8) == (8, 8)


@pytest.mark.parametrize(
    ("height", "width", "inner", "corner", "centre"),
    [
        (40, 50, (16, 20), (8, 0), (4, 0)),
        (50, 30, (24, 14), (0, 6), (0, 3)),
        (24, 20, (24, 20), (0, 0), (0, 0)),
        (8192, 1, (24, 1), (0, 19), (0, 9)),  # a pixel at least
        (1, 8192, (1, 20), (23, 0), (11, 0)),
    ],
)
def test_a_picture_lies_between_its_bars(height, width, inner, corner, centre):
    box = Letterbox(24, 20, pad_value=(0.25, 0.5, 0.75))
    assert box.resized(height, width) == inner
    for step, place in (
        (box, corner),
        (replace(box, pad="center"), centre),
        (replace(box, interpolation="pil_bilinear"), centre),
    ):
        assert step.corner(inner) == place
        made = step.forward(np.full((height, width, 3), 255, np.uint8))
        bars = np.broadcast_to(np.asarray(step.bars, np.float32), (24, 20, 3)).astype(made.dtype)
        bars[place[0] : place[0] + inner[0], place[1] : place[1] + inner[1]] = made.max()
        np.testing.assert_array_equal(made, bars)
    assert (Letterbox(24, 20).bars, str(box)[-15:]) == ((0.0,) * 3, "= 0.25/0.5/0.75")
    assert replace(box, interpolation="pil_bilinear").bars == (0.0,) * 3


def test_an_empty_frame_is_black_in_every_group():
    black = empty_frame(OPENVLA)
    assert black.shape == (6, *SIZE)
    expected = -np.asarray(OPENVLA.mean, np.float32) / np.asarray(OPENVLA.std, np.float32)
    np.testing.assert_array_equal(black, np.broadcast_to(expected[:, None, None], black.shape))


TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [
 {"id": 3, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
  "special": true}],
 "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
 "model": {"type": "WordLevel", "vocab": {"up": 0, "down": 1, "?": 2, "<image>": 3, "go": 4}, "unk_token": "?"}}"""


def ids(prompt: str, *steps: PromptStep) -> list[int]:
    recipe = PromptRecipe(8, 5, 2, steps)
    return Prompter(TOKENIZER, recipe).encode(prompt, np.zeros(1)).tolist()


def test_prompt_fields():
    said = Instruction()
    assert ids("UP", said) == [2]
    assert ids("UP", Lower(), said) == [0]
    assert ids("up", said, Last(1)) == [0, 1]
    assert ids("up down", said, Last(1)) == [0, 1]
    assert ids("up", *sentence("go <image> {prompt}")) == [4, 3, 0]
    assert ids("up", *sentence("go <image> {prompt}"), Drop((3,))) == [4, 0]


def test_a_prompt_with_the_state_is_written_anew_for_each_state():
    """One without is not: an episode has one instruction."""
    counts = TOKENIZER.replace('"up"', '"0"').replace('"down"', '"1"')
    prompter = Prompter(counts, PromptRecipe(8, 5, 2, (*sentence("go "), State(1, 2))))
    assert [prompter.encode("x", np.float32([state])).tolist() for state in (-0.5, 0.5)] == [[4, 0], [4, 1]]
    plain = Prompter(counts, PromptRecipe(8, 5, 2, sentence("go {prompt}")))
    assert [plain.encode("0", np.float32([state])).tolist() for state in (-0.5, 0.5)] == [[4, 0], [4, 0]]
    assert plain._ids.cache_info().misses == plain._text.cache_info().misses == 1


def test_prompts_that_cannot_be_are_refused_by_name():
    words = TextRecipe(sentence("go {prompt}"), "down", sentence("? {prompt}"))
    asked = Prompter(TOKENIZER, PromptRecipe(3, 5, 2, text=words))
    state = np.zeros(1)
    for encode, said, tokens in (
        (asked.encode, "up up down", [0, 0, 1]),
        (partial(asked.encode_asked, "subtask"), "up", [4, 0]),
        (partial(asked.encode_asked, "question"), "up", [2, 0]),
    ):
        assert encode(said, state).tolist() == tokens
        assert encode(said, state).dtype == np.int64
    assert (asked.behind, asked.words([0, 4])) == ((1,), "up go")
    silent = Prompter(TOKENIZER, PromptRecipe(3, 5, 2))
    assert silent.behind == ()
    told = Prompter(TOKENIZER, PromptRecipe(3, 5, 2, sentence("go {prompt}"), text=words), may_be_empty=True)
    assert told.encode(" ", state).tolist() == [4]
    for encode, said, message in (
        (asked.encode, 1, "prompt: expected a string, got int"),
        (
            asked.encode,
            " ",
            "prompt: expected an instruction, such as 'pick up the red cube' (this policy has no",
        ),
        (
            partial(asked.encode_asked, "subtask"),
            "",
            "prompt: expected an instruction from which a subtask is generated, got an empty string",
        ),
        (
            partial(told.encode_asked, "question"),
            "",
            "question: expected a question, such as 'what is in the gripper?', got an empty str",
        ),
        (asked.encode, "up up up up", "prompt: expected 1 to 3 tokens, got 4"),
        (asked.encode, "\ud800", "prompt: expected text that can be encoded as UTF-8, got lone surrogates"),
        (
            asked.encode,
            "x" * (MAX_CHARACTERS + 1),
            f"prompt: expected at most {MAX_CHARACTERS} characters, got 65537",
        ),
        (
            partial(silent.encode_asked, "subtask"),
            "up",
            "subtask: expected nothing, because this bundle has no prompt",
        ),
        (
            partial(silent.encode_asked, "question"),
            "up",
            "question: expected nothing, because this bundle has no prompt",
        ),
    ):
        with pytest.raises(ObservationError) as error:
            encode(said, state)
        assert str(error.value).startswith(message)
    subtask = partial(asked.encode_asked, "subtask")
    for encode, hint in ((asked.encode, " allows it)"), (subtask, "got an empty string")):
        with pytest.raises(ObservationError) as error:
            encode("", state)
        assert str(error.value).endswith(hint)  # no other text may be empty
    assert asked.encode("x" * MAX_CHARACTERS, state).tolist() == [2]
    with pytest.raises(BundleError, match=r"prompt.text.action: text.action: expected 1 to 3 tokens, got 4$"):
        Prompter(TOKENIZER, PromptRecipe(3, 5, 2, text=replace(words, action="up up up up")))


def test_tokens_of_a_client_are_checked_and_padded():
    prompter = Prompter(TOKENIZER, PromptRecipe(3, 5, 2, padding="max_length"))
    assert prompter.check_tokens([4, 0, 4]).tolist() == [4, 0, 4]
    for tokens, message in (
        ([[1]], "tokens: expected a vector of integers, got int64 [1, 1]"),
        ([1.0], "tokens: expected a vector of integers, got float64 [1]"),
        ([], "tokens: expected "),
        ([1] * 4, "tokens: expected 1 to 3 tokens, got 4"),
        ([0, -1], "tokens: expected token ids in [0, 5), got -1 to 0"),
        ([5, 4], "tokens: expected token ids in [0, 5), got 4 to 5"),
    ):
        with pytest.raises(ObservationError) as error:
            prompter.check_tokens(tokens)
        assert str(error.value).startswith(message)
    held = (HeldTokens("views", 3, 2),)
    assert prompter.check_tokens([3, 0, 3], required=held).tolist() == [3, 0, 3]
    with pytest.raises(ObservationError, match=r"^tokens: expected 2 views \(3\), got 1$"):
        prompter.check_tokens([3, 0], required=held)
    recipe = PromptRecipe(
        3,
        5,
        2,
        (Image("go ", 1, 4), *sentence("{prompt}")),
        text=TextRecipe(sentence("{prompt}"), "", sentence("{prompt}")),
    )
    viewed, state = Prompter(TOKENIZER, recipe), np.zeros(1)
    assert viewed.encode("up", state).tolist() == [4, 0]
    with pytest.raises(ObservationError, match=r"^prompt: expected 1 image tokens \(4\), got 2$"):
        viewed.encode("go", state)  # an instruction that spells the mark of a view
    assert viewed.encode_asked("question", "up", state).tolist() == [0]
    padded, mask = prompter.pad(np.array([4, 0]))
    assert (padded.tolist(), mask.tolist()) == ([4, 0, 2], [True, True, False])
    padded, mask = Prompter(TOKENIZER, PromptRecipe(3, 5, 2)).pad(np.array([4, 0]))
    assert (padded.tolist(), mask.tolist()) == ([4, 0], [True, True])

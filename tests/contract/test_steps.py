"""Every step is one class that applies itself, says its size, its inverse, its rules and its words, and travels in a
bundle: one table, steps x what is promised. Digests are of the numpy that format 2's functions ran."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest, Normalization
from sinew.bundle.writer import rewrite
from sinew.cli import main
from sinew.core import BundleError, ObservationError, VectorSpec
from sinew.core.fields import Tagged, from_json, problems, to_json
from sinew.engine.cuda.kernels.resize_tables import ResizeTables as Tables
from sinew.processing import Processor
from sinew.processing.image import apply_image_steps
from sinew.processing.prompt import Prompter
from sinew.steps import registry
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.centre_crop import CentreCrop
from sinew.steps.image.corner import Corner
from sinew.steps.image.crop import Crop
from sinew.steps.image.grid import Grid
from sinew.steps.image.jpeg import Jpeg
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.image.long_side import LongSide
from sinew.steps.image.methods import Method
from sinew.steps.image.resize import Resize
from sinew.steps.image.scales import Scales
from sinew.steps.image.short_side import ShortSide
from sinew.steps.image.square import Square
from sinew.steps.prompt.advantage import Advantage
from sinew.steps.prompt.as_list import AsList
from sinew.steps.prompt.base import PromptStep, PromptText
from sinew.steps.prompt.clean import Clean
from sinew.steps.prompt.drop import Drop
from sinew.steps.prompt.fill import Fill
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.last import Last
from sinew.steps.prompt.lower import Lower
from sinew.steps.prompt.marker import Marker
from sinew.steps.prompt.only_for import OnlyFor
from sinew.steps.prompt.state import State
from sinew.steps.prompt.state_tokens import StateTokens
from sinew.steps.prompt.strip import Strip
from sinew.steps.prompt.suffix import Suffix
from sinew.steps.prompt.task import TaskPrompt
from sinew.steps.prompt.text import Text
from sinew.steps.prompt.without import Without
from sinew.steps.prompt.words_only import InstructionPrompt
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import VectorStep, apply_steps, turn_back
from sinew.steps.vector.bounds import ValueBounds
from sinew.steps.vector.compose_pose import ComposePose
from sinew.steps.vector.linear_to_angle import LinearToAngle
from sinew.steps.vector.one_of import OneOf
from sinew.steps.vector.reach import Reach
from sinew.steps.vector.threshold import Threshold

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "sinew" / "assets" / "egg.gguf"
FRAME = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
UNIT = FRAME.astype(np.float32) / np.float32(255)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# ----------------------------------------------------------------------------- frames


@dataclass(frozen=True)
class Frame:
    """digest: of what was made of FRAME before the step was a class; None for Pillow's, which is its version's.

    refused: changes that the rules refuse, and how. on_host: why no device computes it, "" where one does.
    """

    step: ImageStep
    digest: str | None
    size: tuple[int, int]
    words: str
    refused: Mapping[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    on_host: str = "in numpy only"


SIDES = {
    "no height": ({"height": 0}, "height: expected 1 to 8192, got 0"),
    "width": ({"width": 8193}, "width: expected 1 to 8192, got 8193"),
}
RESIZES: dict[Method, str | None] = {
    "lanczos3": "a1f77caf6ef5e0f5",
    "area": "7792b2c534de8005",
    "bilinear": "b470300691ca4f75",
    "bicubic": "54ebfc0db0a99047",
    "pil_bicubic": None,
    "bilinear_cut": "d9725a8f18c0d752",
    "bilinear_round": "efc330decbbcefe6",
    "bicubic_round": "258f480082ed80c2",
    "cv_bilinear": "dc972d732ad16fc6",
    "area_float": "06bb71f600a84d2a",
    "bicubic_float": "c6fb02687ce2d78e",
}
IMAGES = {
    **{
        f"resize {method}": Frame(Resize(24, 20, method), made, (24, 20), f"{method} to 24x20", SIDES)
        for method, made in RESIZES.items()
    },
    "centre_crop": Frame(
        CentreCrop(24, 20, 0.9),
        "e74b1919712f59b8",
        (24, 20),
        "middle 90% to 24x20",
        {
            **SIDES,
            "all": ({"area": 1.5}, "area: expected a part of the frame, above 0 and at most 1, got 1.5"),
        },
    ),
    "jpeg": Frame(
        Jpeg(80),
        "2aefc98496a74172",
        (40, 50),
        "JPEG 80",
        {"quality": ({"quality": 101}, "quality: expected 1 to 100, got 101")},
    ),
    "square": Frame(Square(), "3c4f1d27cb9daa3d", (50, 50), "black bars to a square"),  # it has no numbers
    "short_side": Frame(
        ShortSide(32, "area"),
        "e340be062ae93fe2",
        (32, 40),
        "area to a short side of 32",
        {"edge": ({"edge": 0}, "edge: expected 1 to 8192, got 0")},
    ),
    "short_side of floats": Frame(
        ShortSide(32, "area_float"), "37b7362cc6706e36", (32, 40), "area_float to a short side of 32"
    ),
    "long_side": Frame(
        LongSide(32, "bicubic"),
        "a7fb19f375b63bea",
        (25, 32),
        "bicubic to a long side of 32",
        {"edge": ({"edge": 0}, "edge: expected 1 to 8192, got 0")},
    ),
    "crop": Frame(
        Crop(fraction=0.9),
        "3710d4b0b7f7d660",
        (36, 45),
        "middle 90% of both sides",
        {
            "more": (
                {"fraction": 1.5},
                "fraction: expected a part of both sides, above 0 and at most 1, got 1.5",
            ),
            "nothing": ({"fraction": 0.0}, "height: expected 1 to 8192, got 0"),
        },
    ),
    "crop rounded": Frame(
        Crop(fraction=0.97, rounded=True), "a715bc15cfa20b8f", (38, 48), "middle 97% of both sides"
    ),
    "crop of sides": Frame(Crop(24, 99), "af88b20d0a0f011a", (24, 50), "middle 24x99"),
    "grid": Frame(
        Grid(8, 100, 900, "bicubic"),
        "b9497b5e1e5e800e",
        (24, 32),
        "bicubic to multiples of 8",
        {
            "unit": ({"unit": 0}, "unit: expected 1 to 8192, got 0"),
            "order": ({"min_pixels": 901}, "min_pixels: expected 1 to 900, got 901"),
            "none": ({"min_pixels": 0}, "min_pixels: expected 1 to 900, got 0"),
        },
    ),
    "grid that grows": Frame(
        Grid(8, 5000, 9000, "bicubic"), "a402898d7d1a5df2", (64, 80), "bicubic to multiples of 8"
    ),
    "grid of floats": Frame(
        Grid(8, 100, 9000, "bicubic_float"), "7b6037dd66b2556f", (40, 48), "bicubic_float to multiples of 8"
    ),
    "letterbox": Frame(
        Letterbox(24, 20),
        "de07049365062229",
        (24, 20),
        "letterbox to 24x20, bilinear, bars top_left = 0",
        {
            **SIDES,
            "bars": ({"pad_value": float("nan")}, "pad_value: expected a finite number, got nan"),
        },
        "",
    ),
    "letterbox centred": Frame(
        Letterbox(24, 40, pad="center", pad_value=-1.0),
        "65f7c719bf6898ea",
        (24, 40),
        "letterbox to 24x40, bilinear, bars center = -1",
        on_host="",
    ),
    "letterbox by Pillow": Frame(
        Letterbox(24, 20, "pil_bilinear"),
        None,
        (24, 20),
        "letterbox to 24x20, pil_bilinear, bars center = 0",
        on_host="",
    ),
    "corner": Frame(
        Corner(48, 60, 40, 50),
        "681c8faa0d765350",
        (48, 60),
        "40x50 in the corner of 48x60",
        {
            "no height": ({"height": 0}, "height: expected 1 to 8192, got 0"),
            "too high": ({"own_height": 49}, "own_height: expected 1 to 48, got 49"),
            "too wide": ({"own_width": 61}, "own_width: expected 1 to 60, got 61"),
        },
    ),
    "scales": Frame(
        Scales((24, 10)),
        None,
        (34, 24),
        "pil_bicubic to 24x24 and 10x10",
        {
            "none": ({"sides": ()}, "sides: expected one or more, got none"),
            "no side": ({"sides": (24, 0)}, "sides[1]: expected 1 to 8192, got 0"),
        },
    ),
}


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Frame:
    return IMAGES[request.param]


def test_a_frame_is_what_it_was(image: Frame) -> None:
    step = image.step
    made = step.forward(step.taken(FRAME))
    assert made.shape == (*image.size, 3)
    assert np.array_equal(step.forward(step.taken(UNIT)), made)  # floats are the bytes that they came from
    if step.kind == "letterbox" and image.digest is not None:  # its pixels were written down normalised
        made = apply_image_steps(FRAME, ImageRecipe(*image.size, (step,))).transpose(2, 0, 1)
        made = (made - np.float32(0.5)) / np.float32(0.5)
    if image.digest is not None:
        assert digest(made) == image.digest
    else:
        assert np.array_equal(made, by_pillow(step))


def by_pillow(step: ImageStep) -> np.ndarray:
    from PIL import Image as Pillow

    picture = Pillow.fromarray(FRAME)
    if isinstance(step, Scales):
        made = np.zeros((34, 24, 3), np.uint8)
        made[:24] = np.asarray(picture.resize((24, 24), Pillow.Resampling.BICUBIC))
        made[24:, :10] = np.asarray(picture.resize((10, 10), Pillow.Resampling.BICUBIC))
        return made
    if isinstance(step, Resize):
        return np.asarray(picture.resize((20, 24), Pillow.Resampling.BICUBIC))
    black = np.zeros((24, 20, 3), np.uint8)
    black[4:20] = np.asarray(picture.resize((20, 16), Pillow.Resampling.BILINEAR))
    return black


def test_a_size_is_that_of_what_is_made(image: Frame) -> None:
    step = image.step
    for height, width in ((40, 50), (50, 40), (33, 33), (64, 17)):
        frame = np.zeros((height, width, 3), np.uint8)
        assert step.forward(step.taken(frame)).shape[:2] == step.size(height, width)
        if step.fixed is not None:
            assert step.size(height, width) == step.fixed
        if step.keeps_size:
            assert step.size(height, width) == (height, width)


def test_a_device_takes_it_or_it_says_why_not(image: Frame) -> None:
    assert image.on_host in image.step.on_host
    why = Tables.why_not(ImageRecipe(*image.size, (image.step,)))
    assert (why == "") == (image.on_host == "")
    assert why == "" or why.startswith(f"{image.step}: ")


# ----------------------------------------------------------------------------- vectors

ROWS = np.random.default_rng(0).uniform(-1, 1, (4, 10))
STATE = np.random.default_rng(1).uniform(-1, 1, 10)
POSE = tuple(range(9))


@dataclass(frozen=True)
class Vector:
    """digest: of what was made of ROWS. turns_back: "" for a step with an inverse, else why it has none."""

    step: VectorStep
    digest: str
    words: str
    turns_back: str = ""
    monotone: bool = True
    refused: Mapping[str, tuple[dict[str, Any], str]] = field(default_factory=dict)


ONE_LESS = "state_dims: expected 2 indices, one for each of dims, got 1"
NO_POSE = "expected 6 or 9 indices of a pose, the same number for state and action, got"
VECTORS = {
    "affine": Vector(
        Affine((1, 3), -2.5, 0.25),
        "4c89434b1c8e5656",
        "x * -2.5 + 0.25 of 1, 3",
        refused={"inf": ({"scale": float("inf")}, "scale: expected a finite number, got inf")},
    ),
    "affine by zero": Vector(
        Affine((1,), 0.0, 0.25), "", "x * 0 + 0.25 of 1", "a scale of zero removes the value"
    ),
    "linear_to_angle": Vector(
        LinearToAngle((2,), 0.036, 0.022),
        "01e7f3bec39390b0",
        "opening to angle of 2 (arm 0.036 m, horn 0.022 m)",
        "two openings have the same angle",
        refused={
            "nan": ({"arm": float("nan")}, "arm: expected a finite number, got nan"),
            "none": ({"horn": 0.0}, "horn: expected a length above 0, got 0"),
        },
    ),
    "add_state": Vector(
        AddState((0, 4)),
        "48857b84e07995d8",
        "0, 4 + state 0, 4",
        refused={"fewer": ({"state_dims": (1,)}, ONE_LESS)},
    ),
    "add_state of others": Vector(AddState((0, 4), (3, 5)), "8746957a34c0f651", "0, 4 + state 3, 5"),
    "compose_pose": Vector(
        ComposePose(POSE, tuple(range(1, 10))),
        "646381420112d29b",
        "pose 0-8 in the frame of state 1-9",
        "Sinew does not convert poses back to another reference pose",
        False,
        {
            "seven": ({"dims": tuple(range(7)), "state_dims": ()}, f"dims: {NO_POSE} 7"),
            "other": ({"state_dims": tuple(range(6))}, f"state_dims: {NO_POSE} 6"),
        },
    ),
    "compose_pose of vectors": Vector(
        ComposePose(tuple(range(6))),
        "5eff5934f8f01160",
        "pose 0-5 in the frame of state 0-5",
        "Sinew does not convert poses back to another reference pose",
        False,
    ),
    "threshold": Vector(
        Threshold((7,), 0.5, 1.0, -1.0),
        "c363fe3652b22d54",
        "-1 where 7 > 0.5, else 1",
        "all values on one side of the threshold become one value",
        False,
        {"inf": ({"above": float("inf")}, "above: expected a finite number, got inf")},
    ),
    "reach": Vector(
        Reach((2, 5), 4.0),  # within which all of ROWS lie
        digest(ROWS),
        "2, 5 within 4",
        monotone=False,
        refused={
            "none": ({"radius": 0.0}, "radius: expected a distance above 0, got 0"),
            "nan": ({"radius": float("nan")}, "radius: expected a finite number, got nan"),
        },
    ),
    "one_of": Vector(
        OneOf((3,), tuple(sorted({*ROWS[:, 3].tolist(), -0.5, 0.5})), words=tuple("abcdef")),
        digest(ROWS),
        f"3 one of {', '.join(f'{v:g} {w}' for v, w in zip(sorted({*ROWS[:, 3], -0.5, 0.5}), 'abcdef', strict=True))}",
        monotone=False,
        refused={
            "none": ({"values": (), "words": ()}, "values: expected one or more different values"),
            "words": ({"words": ("a",)}, "words: expected 6 meanings, one for each value, got 1"),
        },
    ),
    "bounds": Vector(
        ValueBounds((2, 5)),  # within which all of ROWS lie
        digest(ROWS),
        "2, 5 from -1 to 1",
        refused={"order": ({"low": 2.0}, "low: expected at most high, 1, got 2")},
    ),
}


@pytest.fixture(params=VECTORS)
def vector(request: pytest.FixtureRequest) -> Vector:
    return VECTORS[request.param]


def test_a_vector_is_what_it_was(vector: Vector) -> None:
    before = ROWS.copy()
    made = apply_steps(ROWS, (vector.step,), STATE)
    if vector.digest:  # of a scale of zero there was none
        assert digest(made) == vector.digest
    others = [i for i in range(10) if i not in vector.step.dims]
    assert np.array_equal(made[:, others], before[:, others])
    assert np.array_equal(ROWS, before)
    assert np.array_equal(apply_steps(ROWS[0], (vector.step,), STATE), made[0])


def test_a_vector_is_turned_back_or_it_is_said_why_not(vector: Vector) -> None:
    assert vector.step.no_inverse == vector.turns_back
    if vector.turns_back:
        return
    made = apply_steps(ROWS, (vector.step,), STATE)
    np.testing.assert_allclose(turn_back(made, (vector.step,), STATE), ROWS, rtol=0, atol=1e-15)


def test_the_ends_of_a_range_stay_ends_where_a_step_says_so(vector: Vector) -> None:
    """Limits of actions follow from the ends of their ranges."""
    assert vector.step.monotone == vector.monotone
    if vector.step.kind == "linear_to_angle":
        low, high = np.full((1, 10), 0.03), np.full((1, 10), 0.05)
    else:
        low, high = np.full((1, 10), -0.5), np.full((1, 10), 0.5)
    ends = [apply_steps(end, (vector.step,), STATE) for end in (low, high)]
    if vector.monotone:
        inside = apply_steps(low + (high - low) * np.linspace(0, 1, 9)[:, None], (vector.step,), STATE)
        assert (inside >= np.minimum(*ends) - 1e-12).all()
        assert (inside <= np.maximum(*ends) + 1e-12).all()


def test_what_a_step_reads_is_of_the_state(vector: Vector) -> None:
    step = vector.step
    assert bool(step.reads) == (step.kind in ("add_state", "compose_pose"))
    if step.reads:
        with pytest.raises(AssertionError, match="need the state"):
            apply_steps(ROWS, (step,))
    else:
        assert np.array_equal(apply_steps(ROWS, (step,)), apply_steps(ROWS, (step,), STATE))


def test_a_place_beyond_reach_comes_nearer_straight() -> None:
    made = apply_steps(np.array([[3.0, 7.0, -4.0], [0.3, 7.0, 0.4]]), (Reach((0, 2), 2.5),))
    np.testing.assert_allclose(made, [[1.5, 7.0, -2.0], [0.3, 7.0, 0.4]], rtol=0, atol=1e-15)


def test_a_choice_that_is_none_is_named() -> None:
    step = OneOf((1,), (4.0, 7.0), ("pose", "language"))
    with pytest.raises(ObservationError, match=r"state\[1\]: expected one of 4 pose, 7 language, got 5"):
        apply_steps(np.array([0.0, 5.0]), (step,))
    assert step.choices == (4.0, 7.0)
    assert Affine((0,)).choices == ()


def test_a_value_outside_of_its_bounds_is_named() -> None:
    step = ValueBounds((1, 2), -1.0, 0.5)
    assert apply_steps(np.array([9.0, -1.0, 0.5]), (step,)).tolist() == [9.0, -1.0, 0.5]
    with pytest.raises(ObservationError, match=r"state\[2\]: expected a value from -1 to 0.5, got 0.75"):
        apply_steps(np.array([9.0, 0.0, 0.75]), (step,))


# ----------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Said:
    """What the step makes of SAID, a text before it and tokens; how a template shows it, and which tokens it holds."""

    step: PromptStep
    words: str
    instruction: str = " Pick up_the\nred, cube "
    text: str = "Do:"
    ids: tuple[int, ...] = (7, 3, 7, 1)
    slot: str = ""
    holds: tuple[str, int, int] | None = None
    refused: Mapping[str, tuple[dict[str, Any], str]] = field(default_factory=dict)


SAID = PromptText(" Pick up_the\nred, cube ", "Do:", np.array([0.9, -1.5]), "good")
WORDS = (("good", "\nAdvantage: good"), ("bad", "\nAdvantage: bad"))
NO_TEXT = {"nothing": ({"text": ""}, "text: expected 1 to 16384 characters, got 0")}
NONE = {"none": ({"count": 0}, "count: expected 1 to 8192, got 0")}
UNKNOWN = {"unknown": ({"token": 10**9}, "expected token ids of the vocabulary, 0 to ")}
PROMPTS = {
    "clean": Said(Clean(), "underscores and line breaks as spaces", "Pick up the red, cube"),
    "strip": Said(Strip(), "stripped", "Pick up_the\nred, cube"),
    "lower": Said(Lower(), "in small letters", " pick up_the\nred, cube "),
    "words_only": Said(
        InstructionPrompt(), "small letters, digits and spaces alone", " pick up_the\nred cube "
    ),
    "task": Said(
        TaskPrompt(),
        "small letters, one line, no quotation marks around and no punctuation at the end",
        "pick up_the red, cube",
    ),
    "as_list": Said(AsList(), "as a list of one text", "[' Pick up_the\\nred, cube ']"),
    "advantage": Said(
        Advantage(WORDS),
        '"\\nAdvantage: good" or "\\nAdvantage: bad" behind the instruction',
        instruction=" Pick up_the\nred, cube \nAdvantage: good",
        refused={
            "nothing": ({"words": ()}, "words: expected 1 to 256 advantages, got 0"),
            "many": (
                {"words": tuple((str(i), "x") for i in range(257))},
                "words: expected 1 to 256 advantages, got 257",
            ),
            "twice": ({"words": (*WORDS, WORDS[0])}, "words: expected a different name for each advantage"),
            "a name": (
                {"words": (("a\nb", "x"),)},
                "words[0][0]: expected 1 to 64 printable characters, got 'a\\nb'",
            ),
            "no words": ({"words": (("good", ""),)}, "words[0][1]: expected 1 to 64 characters, got 0"),
            "usual": ({"usual": "best"}, "usual: expected one of good, bad, or none, got 'best'"),
        },
    ),
    "only_for": Said(
        OnlyFor(1, (7.0, 8.0), "Nothing is said."),
        "where the state's number 1 is 7 or 8, else 'Nothing is said.'",
        text="Nothing is said.",
        refused={
            "no value": ({"values": ()}, "values: expected one or more, got none"),
            "no text": ({"text": ""}, "text: expected 1 to 16384 characters, got 0"),
            "no number": ({"dim": -1}, "dim: expected 0 to 8192, got -1"),
        },
    ),
    "only_for what is there": Said(
        OnlyFor(1, (-1.5,), "Nothing is said."), "where the state's number 1 is -1.5, else 'Nothing is said.'"
    ),
    "advantage in the text": Said(
        Advantage(WORDS, "bad", "text"),
        '"\\nAdvantage: good" or "\\nAdvantage: bad" as {advantage}, bad where none is named',
        text="Do:\nAdvantage: good",
        slot="{advantage}",
    ),
    "text": Said(Text(" {x}"), '" {x}"', text="Do: {x}", slot=" {x}", refused=NO_TEXT),
    "instruction": Said(
        Instruction(), "the instruction", text="Do: Pick up_the\nred, cube ", slot="{prompt}"
    ),
    "state": Said(
        State(3, 4),
        "3 values of the state in 4 bins",
        text="Do:3 -1 2",
        slot="{state}",
        refused={
            "values": ({"values": -1}, "values: expected 0 to 8192, got -1"),
            "bins": ({"bins": 0}, "bins: expected 1 to 8192, got 0"),
        },
    ),
    "state_tokens": Said(
        StateTokens(9),
        "a token per value of the state, of 9 levels",
        text="Do:<state_8><state_0>",
        slot="{state}",
        refused={"levels": ({"levels": 0}, "levels: expected 1 to 8192, got 0")},
    ),
    "image": Said(
        Image("#", 3, 5),
        "a view, 3 times #",
        text="Do:###",
        slot="{image}",
        holds=("image tokens", 5, 3),
        refused={**NONE, **UNKNOWN},
    ),
    "suffix": Said(Suffix("\n"), '"\\n" at the end', text="Do:\n", slot="\n", refused=NO_TEXT),
    "suffix that is there": Said(Suffix(":"), '":" at the end', slot=":"),
    "drop": Said(
        Drop((7,)),
        "without tokens 7",
        ids=(3, 1),
        refused={"unknown": ({"ids": (3, -1)}, "expected token ids of the vocabulary, 0 to ")},
    ),
    "fill": Said(
        Fill(9, 0, 6, (("Do:", 6),)),
        "filled up to 9 tokens, 1 texts to fewer",
        ids=(7, 3, 7, 1, 0, 0, 6, 6, 6),
        refused={
            **UNKNOWN,
            "twice": ({"lengths": (("a", 2), ("a", 3))}, "lengths: expected different texts"),
            "too long": ({"lengths": (("a", 10),)}, "lengths: expected at most 9 tokens, got 10"),
        },
    ),
    "fill of another text": Said(
        Fill(9, 0, 6, (("Done:", 6),)),
        "filled up to 9 tokens, 1 texts to fewer",
        ids=(7, 3, 7, 1, 0, 0, 0, 0, 0),
    ),
    "fill of too many": Said(Fill(3, 0, 6), "filled up to 3 tokens"),
    "last": Said(Last(9), "token 9 at the end", ids=(7, 3, 7, 1, 9), refused=UNKNOWN),
    "last that is there": Said(Last(1), "token 1 at the end"),
    "marker": Said(
        Marker(3, 2),
        "2 tokens 3",
        holds=("marking tokens", 3, 2),
        refused={"none": ({"count": -1}, "count: expected 0 to 8192, got -1"), **UNKNOWN},
    ),
    "marker that may not be there": Said(Marker(3, 0), "0 tokens 3", holds=("marking tokens", 3, 0)),
    "without": Said(Without("<point>"), 'without "<point>"', refused=NO_TEXT),
}


@pytest.fixture(params=PROMPTS)
def said(request: pytest.FixtureRequest) -> Said:
    return PROMPTS[request.param]


def test_a_prompt_says_what_it_says(said: Said) -> None:
    made = said.step.forward(SAID)
    assert (made.instruction, made.text) == (said.instruction, said.text)
    assert made.state is SAID.state
    assert tuple(said.step.tokens([7, 3, 7, 1], SAID.text)) == said.ids
    assert said.step.slot == said.slot
    assert said.step.holds == said.holds
    assert said.step.whole in (0, len(said.ids)) or len(said.ids) > said.step.whole


def test_a_step_that_reads_the_state_says_so(said: Said) -> None:
    """What a prompt says is remembered where no step reads the state."""
    asked: list[Any] = []

    class Watched(PromptText):
        @property
        def state(self) -> Any:
            asked.append(self[2])
            return self[2]

    said.step.forward(Watched(*SAID))
    assert bool(asked) == said.step.reads_state


def test_a_prompt_without_what_it_holds_is_refused() -> None:
    """Tokens of several views count together, and an instruction may add none."""
    manifest = Bundle(BUNDLE).manifest
    recipe = replace(manifest.processing.prompt, steps=(Image("#", 2, 5), Image("#", 2, 5), Marker(6, 1)))
    prompter = Prompter(manifest.tokenizer, recipe)
    assert prompter.check_tokens([5, 5, 6, 5, 5]).tolist() == [5, 5, 6, 5, 5]
    for wrong, message in (
        ([5, 5, 5, 5, 5, 6], r"expected 4 image tokens \(5\), got 5"),
        ([5, 5, 5, 5], r"expected 1 marking tokens \(6\), got 0"),
    ):
        with pytest.raises(ObservationError, match=message):
            prompter.check_tokens(wrong)


def test_an_instruction_with_a_text_that_has_a_rule_of_its_own_is_rejected() -> None:
    with pytest.raises(
        ObservationError, match="prompt: expected an instruction without red, which Sinew does not"
    ):
        Without("red").forward(SAID)


# ----------------------------------------------------------------------------- all of them

CASES: dict[str, Any] = {**IMAGES, **VECTORS, **{f"prompt {name}": case for name, case in PROMPTS.items()}}
REGISTRIES = {"image": registry.IMAGE, "vector": registry.VECTOR, "prompt": registry.PROMPT}
BASES: dict[str, type[Tagged]] = {"image": ImageStep, "vector": VectorStep, "prompt": PromptStep}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


def with_step(manifest: Manifest, case: Any, **changes: Any) -> Manifest:
    """The manifest of a bundle whose processing is the step, its fields changed."""
    step: Tagged = replace(case.step, **changes)
    spec, processing = manifest.spec, manifest.processing
    if isinstance(step, ImageStep):
        image = ImageRecipe(*case.size, (step,))
        return replace(manifest, processing=replace(processing, image=image))
    if isinstance(step, PromptStep):
        most = case.step.whole or processing.prompt.max_tokens
        prompt = replace(processing.prompt, max_tokens=most, steps=(step, Instruction()))
        return replace(manifest, processing=replace(processing, prompt=prompt))
    ten, same = VectorSpec(10), Normalization("identity")
    return replace(
        manifest,
        seen=None,
        spec=replace(spec, state=ten, action=ten, noise_dim=10, motion=None, keys=()),
        processing=replace(
            processing,
            state=same,
            action=same,
            padded_state_dim=10,
            padded_action_dim=10,
            action_steps=(step,),
        ),
    )


def test_a_step_says_what_it_does(case: Any) -> None:
    assert str(case.step) == case.words


def test_rules_refuse_by_name(case: Any) -> None:
    assert not list(problems(case.step))
    for changes, said in case.refused.values():
        if "vocabulary" not in said:  # which the recipe knows
            assert next(problems(replace(case.step, **changes))) == said
    manifest = Bundle(BUNDLE).manifest
    for changes, said in case.refused.values():
        with pytest.raises(BundleError, match=f"{case.step.kind}: {re.escape(said)}"):
            with_step(manifest, case, **changes).check()


def test_a_step_travels_in_a_bundle(case: Any, tmp_path: Path) -> None:
    bundle = Bundle(BUNDLE)
    wanted = with_step(bundle.manifest, case)
    rewrite(bundle, wanted, tmp_path / "it.gguf")
    assert Bundle(tmp_path / "it.gguf").manifest == wanted


def test_what_a_step_does_not_have_is_refused(case: Any) -> None:
    base = next(base for base in BASES.values() if isinstance(case.step, base))
    record: dict[str, Any] = from_json(to_json(case.step), dict, "step")
    assert base.read(record) == case.step
    for wrong, said in (
        ({"kind": "sharpen"}, "kind: expected one of .*, got 'sharpen'"),
        ({"kind": None}, "kind: expected one of .*, got None"),
        *(({each.name: {}}, f"{case.step.kind}: .*{each.name}") for each in fields(case.step)[:-1]),
    ):
        with pytest.raises(ValueError, match=said):
            base.read(record | wrong)
    with pytest.raises(ValueError, match="expected a step, an object with a .kind., got str"):
        base.read(case.step.kind)


@pytest.mark.parametrize("room", REGISTRIES)
def test_every_registered_step_has_a_row_and_a_file_of_its_own(room: str) -> None:
    base, places = BASES[room], REGISTRIES[room]
    assert {case.step.kind for case in CASES.values() if isinstance(case.step, base)} == set(places)
    files = [place.split(":")[0] for place in places.values()]
    assert len(set(files)) == len(files)
    for kind in places:
        found = base.registered(kind)
        assert is_dataclass(found)
        assert found.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert found.kind == kind


@pytest.mark.parametrize("room", REGISTRIES)
def test_a_step_is_named_in_its_file_and_in_the_registry_alone(room: str) -> None:
    """Converters make steps, older formats know their tags; nothing else asks which step it has."""
    may = ("convert/", "families/", "vlacpp/", "bundle/upgrade.py", "steps/registry.py")
    names = {place.split(":")[1]: place.split(":")[0] for place in REGISTRIES[room].values()}
    evaluation = (ROOT / "eval" / "sinew_eval").rglob("*.py")
    assert not [
        path for path in evaluation if re.search(r"\bstep\.kind |sinew\.steps\.\w+\.", path.read_text())
    ]
    for path in sorted((ROOT / "sinew").rglob("*.py")):
        place = path.relative_to(ROOT / "sinew").as_posix()
        text = path.read_text()
        if not place.startswith(may):
            assert not re.search(r"\bstep\.kind [!=]=|\bstep\.kind (not )?in\b", text), place
        for module in set(re.findall(r"from (sinew\.steps\.\w+\.\w+) import", text)) & set(names.values()):
            assert place.startswith((*may, f"steps/{room}/", "engine/cuda/")), (place, module)


def test_a_new_step_is_its_file_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that this repository has never heard of is read, checked, run, shown and written."""
    (tmp_path / "sinew_mirror.py").write_text(MIRROR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.IMAGE, "mirror", "sinew_mirror:Mirror")
    step = ImageStep.read({"kind": "mirror", "times": 3})
    bundle = Bundle(BUNDLE)
    image = bundle.manifest.processing.image
    recipe = replace(image, steps=(step, *image.steps))
    manifest = replace(bundle.manifest, processing=replace(bundle.manifest.processing, image=recipe))
    rewrite(bundle, manifest, tmp_path / "mirror.gguf")
    found = Bundle(tmp_path / "mirror.gguf").manifest.processing.image
    assert found == recipe
    assert str(found).startswith("mirrored 3 times, letterbox")
    assert np.array_equal(apply_image_steps(FRAME, found), apply_image_steps(FRAME[:, ::-1], image))
    assert "mirrored 3 times: Sinew computes its library" in Tables.why_not(replace(recipe, steps=(step,)))
    wrong = replace(recipe, steps=(ImageStep.read({"kind": "mirror", "times": 10}),))
    with pytest.raises(BundleError, match=r"image.steps\[0\]: mirror: times: expected 1 to 9, got 10"):
        replace(manifest, processing=replace(manifest.processing, image=wrong)).check()


@pytest.mark.parametrize("room", ["prompt", "vector"])
def test_a_new_step_of_a_prompt_or_a_vector_is_its_file_and_a_line(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"sinew_new_{room}.py").write_text(NEW + (SHOUT if room == "prompt" else NEGATE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REGISTRIES[room], "new", f"sinew_new_{room}:New")
    bundle = Bundle(BUNDLE)
    processing, nothing = bundle.manifest.processing, np.zeros(bundle.manifest.spec.state.dim)
    if room == "prompt":
        step: Any = PromptStep.read({"kind": "new", "marks": 2})
        prompt = replace(processing.prompt, steps=(step, *processing.prompt.steps))
        manifest = replace(bundle.manifest, processing=replace(processing, prompt=prompt))
    else:
        step = VectorStep.read({"kind": "new", "dims": [0], "marks": 2})
        manifest = replace(bundle.manifest, processing=replace(processing, action_steps=(step,)))
    path = tmp_path / "new.gguf"
    rewrite(bundle, manifest, path)
    assert Bundle(path).manifest == manifest
    assert main(["inspect", str(path)]) == 0
    assert "something new, 2 times" in " ".join(capsys.readouterr().out.split())
    if room == "prompt":
        assert Processor(manifest).prompter.text("go", nothing).startswith("GO!!")
    else:
        chunk = np.ones((2, processing.padded_action_dim), np.float32)
        old, new = (Processor(each).finish(chunk, nothing) for each in (bundle.manifest, manifest))
        assert np.array_equal(new[:, 0], -2 * old[:, 0])
        same = turn_back(new.astype(np.float64), (step,), nothing)
        assert np.array_equal(same, old)
    wrong = with_step(bundle.manifest, SimpleNamespace(step=step), marks=10)
    with pytest.raises(BundleError, match=r"steps\[0\]: new: marks: expected 1 to 9, got 10"):
        wrong.check()


NEW = """
from dataclasses import dataclass, field
from typing import Literal
from typing import Annotated
from sinew.core.fields import within
from sinew.steps.prompt.base import PromptStep
from sinew.steps.vector.base import VectorStep

class Numbered:
    def __str__(self):
        return f"something new, {self.marks} times"
"""
SHOUT = """
@dataclass(frozen=True)
class New(Numbered, PromptStep):
    marks: Annotated[int, within(1, 9)] = 1
    kind: Literal["new"] = field(default="new", kw_only=True, repr=False)
    def forward(self, said):
        return said._replace(instruction=said.instruction.upper() + "!" * self.marks)
"""
NEGATE = """
@dataclass(frozen=True)
class New(Numbered, VectorStep):
    dims: tuple[int, ...]
    marks: Annotated[int, within(1, 9)] = 1
    kind: Literal["new"] = field(default="new", kw_only=True, repr=False)
    def forward(self, part, reference):
        return -self.marks * part
    def inverse(self, part, reference):
        return part / -self.marks
"""
MIRROR = """
from dataclasses import dataclass, field
from typing import Literal
from typing import Annotated
from sinew.core.fields import within
from sinew.steps.image.base import ImageStep

@dataclass(frozen=True)
class Mirror(ImageStep):
    times: Annotated[int, within(1, 9)] = 1
    kind: Literal["mirror"] = field(default="mirror", kw_only=True, repr=False)
    keeps_size = True
    def forward(self, frame):
        return frame[:, ::-1] if self.times % 2 else frame
    def __str__(self):
        return f"mirrored {self.times} times"
"""


@pytest.mark.parametrize(
    ("steps", "frame", "enough"),
    [
        ((Letterbox(224, 224),), (480, 640), (168, 224)),  # bars need no pixels
        ((Letterbox(512, 512),), (240, 320), (240, 320)),  # enlarged
        ((Resize(224, 224),), (480, 640), (224, 299)),  # squeezed: the side that shrinks less
        ((Resize(224, 400),), (480, 640), (300, 400)),
        ((Jpeg(), ShortSide(256), CentreCrop(224, 224)), (720, 1280), (256, 456)),
        ((CentreCrop(224, 224), Resize(64, 64)), (480, 640), (480, 640)),  # cut by pixels, not by shares
        ((), (64, 64), (64, 64)),
    ],
)
def test_the_least_frame_that_is_enough(steps, frame, enough):
    recipe = ImageRecipe(224, 224, steps)
    assert recipe.enough(*frame) == enough
    assert recipe.enough(*enough) == enough

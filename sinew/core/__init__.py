"""The types and errors that all parts of ``sinew`` share: observations, action chunks, and errors.

Most of them are defined in the client package (:mod:`sinew_client.types`, :mod:`sinew_client.errors`). Code of
``sinew`` imports them from this package, together with the types of converters, bundles and engines. Other modules in
this folder spell options in messages (``hints``), report missing packages (``extras``), list all families
(``registry``), and help with the machine, locks, scratch folders, progress, bounded logs and figures. This package does
not import torch.
"""

from __future__ import annotations

from sinew_client.errors import (
    BusyError,
    CancelledError,
    ClientError,
    ObservationError,
    RequestError,
    SinewError,
    did_you_mean,
)
from sinew_client.types import (
    CONDITIONS,
    CONTINUATION,
    MAX_HISTORY,
    MAX_HISTORY_STEPS,
    RTC,
    SCHEDULES,
    WORDS,
    ActionChunk,
    CameraSpec,
    ContinuationRequest,
    KeyMap,
    Moment,
    MotionSpec,
    Observation,
    PolicySpec,
    RealTimeChunking,
    Timing,
    VectorSpec,
)


class BundleError(SinewError):
    """A bundle file is truncated, corrupted, hostile, or does not fit the code that reads it."""

    code = "bad_bundle"


class ConvertError(SinewError):
    """A checkpoint cannot be converted into a bundle. The message contains the next step."""

    code = "bad_checkpoint"


# Key: name of a number type in flags, recipes and reports. Value: torch's name of the type.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

MAX_SAID = 256  # a language head generates at most this many tokens for one text
# Largest length in a file: pixels along a side of an image, number of tokens, actions or dimensions.
MAX_SIZE = 8192
# The name of the token table in a language model. One inference reads only the rows of its own tokens.
PROMPT_TABLE = "embed_tokens"


def dtype_word(text: str) -> str:
    """Return Sinew's name of a number type: fp32, bf16, fp16 or native. ``text`` is Sinew's name or torch's name.

    Raises:
        SinewError: The name is unknown.
    """
    words = {long: word for word, long in DTYPES.items()}
    if (word := words.get(text, text)) not in (*DTYPES, "native"):
        raise SinewError(f"dtype: expected one of {', '.join(DTYPES)}, native, got {text!r}")
    return word


def upcast_text(kind: str) -> str:
    """Return a sentence for reports. It states that the engine computes in float32 with weights that are
    stored as ``kind`` (such as "bf16").
    """
    return f"fp32 ({kind} weights)"

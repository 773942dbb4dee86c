"""The shared types and errors of ``sinew``: observations, action chunks, and what can go wrong.

They come from the client package (:mod:`sinew_client.types`, :mod:`sinew_client.errors`). Code of ``sinew`` imports
them from here, together with the types of converters, bundles and engines. Further modules of this folder have the
spelling of options in messages (``hints``), missing packages (``extras``), the names of all families (``registry``),
and helpers for the machine, locks, scratch folders, progress, bounded logs and figures. No torch.
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
    """A checkpoint cannot be converted into a bundle; the message has the next step."""

    code = "bad_checkpoint"


# The words of flags, recipes and reports -> torch's names of the types.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

MAX_SAID = 256  # tokens of one text of a language head; each is a row of every pass behind it
MAX_SIZE = 8192  # bound of every length in a file: pixels of a side, tokens, actions, dimensions
# The name, in a model, of a language model's table of tokens, of which only rows are read
PROMPT_TABLE = "embed_tokens"


def dtype_word(text: str) -> str:
    """Return fp32, bf16, fp16 or native for one of these, or for torch's own name of the type."""
    words = {long: word for word, long in DTYPES.items()}
    if (word := words.get(text, text)) not in (*DTYPES, "native"):
        raise SinewError(f"dtype: expected one of {', '.join(DTYPES)}, native, got {text!r}")
    return word


def upcast_text(kind: str) -> str:
    """Return the name, for reports, of float32 arithmetic on weights of precision ``kind``."""
    return f"fp32 ({kind} weights)"

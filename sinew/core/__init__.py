"""The shared vocabulary: what goes into a policy, what comes out, and what can go wrong.

Types and errors are those of the robot's package (:mod:`sinew_client.types`, :mod:`sinew_client.errors`). The code of
``sinew`` takes them from here, with what only a converter, a bundle or an engine meets. How a message spells an option,
or names the package that is missing, stands beside (``hints``, ``extras``), and so do the names of all families
(``registry``) and the small helpers that know no policy: the machine, locks and scratch folders, progress, bounded
logs, figures. No torch.
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
    MAX_HISTORY,
    MAX_HISTORY_STEPS,
    RTC,
    SCHEDULES,
    WORDS,
    ActionChunk,
    CameraSpec,
    KeyMap,
    Moment,
    MotionSpec,
    Observation,
    PolicySpec,
    Timing,
    VectorSpec,
)


class BundleError(SinewError):
    """A bundle file is truncated, corrupted, hostile, or does not fit the code that reads it."""

    code = "bad_bundle"


class ConvertError(SinewError):
    """An upstream checkpoint cannot be turned into a bundle; the message says what to give."""

    code = "bad_checkpoint"


# The words of flags, recipes and reports -> torch's names of the types.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

MAX_SAID = 256  # tokens of one text of a language head; each is a row of every pass behind it
MAX_SIZE = 8192  # of every length that is taken from elsewhere: pixels of a side, tokens, actions, dimensions
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

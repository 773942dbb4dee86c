"""Keep what an engine computed of earlier observations, for one that repeats them to the byte; numpy alone.

A context belongs to everything that was read: where none of that changed it is handed out again. The tokens of a view
belong to its pixels where a model encodes views apart from one another; whether the tokens of a view alone are the bits
that it has among others, its products' order of sums decides, so that is tried before it is relied on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sinew.engine.watch import Watch
from sinew.processing import ModelInputs

VIEWS, CONTEXTS = 8, 2  # views and contexts that are kept, the newest ones
LOOK = 4096  # bytes that tell most frames apart
FIELDS = ("camera_mask", "tokens", "token_mask", "pixels")


class Reuse:
    """Keep views and contexts of one engine.

    encode: pixels [B, V, ...] -> tokens [B, V, N, C] in the engine's own arrays. join: several of those, or one, as a
    new one, along the axis of views. same: whether two are the same bits. renew: a context and a newer state -> the
    context that reading it gives; None where the state is read with all else. threads: that compute on the calling
    thread, as sums may depend on them.

    Only observations that are read alone, and views of shapes that were tried, are looked at and kept.
    """

    def __init__(
        self,
        encode: Callable[[np.ndarray], Any],
        join: Callable[[list[Any]], Any],
        same: Callable[[Any, Any], bool],
        threads: Callable[[], int],
        renew: Callable[[Any, np.ndarray], Any] | None = None,
        alike: bool = True,
    ):
        self._encode, self._join, self._same = encode, join, same
        self._threads, self._renew, self._alike = threads, renew, alike
        self._views: deque[tuple[int, np.ndarray, Any]] = deque(maxlen=VIEWS)
        self._contexts: deque[tuple[int, ModelInputs, Any]] = deque(maxlen=CONTEXTS)
        self._tried: dict[tuple[int, tuple[int, ...]], str] = {}

    def try_views(self, shape: tuple[int, ...]) -> str:
        """Find out whether views of pixels ``shape``, [1, V, ...], may be encoded one by one; return why not, "" if so.

        Uniform random pixels are encoded together and alone, and every bit is compared.
        """
        key = (self._threads(), tuple(shape))
        if not self._alike and shape[1] > 1:
            self._tried[key] = "the model encodes its views together"
        if key not in self._tried:
            pixels = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
            whole, why = self._encode(pixels), ""
            if tuple(whole.shape[:2]) != tuple(shape[:2]):
                why = f"the model encodes {whole.shape[1]} views where {shape[1]} are given"
            for view in range(shape[1] if shape[1] > 1 and not why else 0):
                at = slice(view, view + 1)
                if not self._same(self._encode(np.ascontiguousarray(pixels[:, at])), whole[:, at]):
                    why = "a view's tokens depend on the others, if only by a rounding"
                    break
            self._tried[key] = why
        return self._tried[key]

    def forget(self) -> None:
        """Keep nothing of what was computed so far, as the weights are others."""
        self._views.clear()
        self._contexts.clear()

    def tokens(self, pixels: np.ndarray, watch: Watch) -> Any:
        """Return the encoding of ``pixels``. Views with the same bytes as earlier ones are not computed again."""
        if len(pixels) != 1 or self._tried.get(key := (self._threads(), pixels.shape), "not tried"):
            return self._encode(pixels)
        kept = tuple(self._views)  # as it is now: a stream reads on a thread of its own
        threads, views = key[0], [pixels[:, [view]] for view in range(pixels.shape[1])]
        found = [
            next((t for n, seen, t in kept if n == threads and _equal(seen, view)), None) for view in views
        ]
        watch.reused_views = sum(tokens is not None for tokens in found)
        if not watch.reused_views:
            whole = self._encode(pixels)
            made = [self._join([whole[:, view : view + 1]]) for view in range(len(views))]
        else:
            made = [self._encode(v) if t is None else t for v, t in zip(views, found, strict=True)]
            whole = self._join(made)
        # Those that were found once more: a camera that stands still outlasts one that moves.
        self._views.extend((threads, view, tokens) for view, tokens in zip(views, made, strict=True))
        return whole

    def context(self, inputs: ModelInputs, watch: Watch) -> Any:
        """Return the context of the same inputs, read before; None without one."""
        for threads, seen, context in tuple(self._contexts):
            if threads != self._threads() or not all(
                _equal(getattr(seen, n), getattr(inputs, n)) for n in FIELDS
            ):
                continue
            if not (still := _equal(seen.state, inputs.state)) and self._renew is None:
                continue
            watch.reused_views, watch.reused_prefix = inputs.pixels.shape[1], True
            watch.lap("vision")
            found = context if still or self._renew is None else self._renew(context, inputs.state)
            watch.lap("prefix")
            return found
        return None

    def keep(self, inputs: ModelInputs, context: Any) -> None:
        """Keep the context of inputs that were just read."""
        if len(inputs.pixels) == 1:
            copied = ModelInputs(
                inputs.pixels.copy(),
                inputs.camera_mask.copy(),
                inputs.tokens.copy(),
                inputs.token_mask.copy(),
                inputs.state.copy(),
            )
            self._contexts.append((self._threads(), copied, context))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True for the same bytes in the same shape."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(left[:LOOK], right[:LOOK]) and np.array_equal(left, right)

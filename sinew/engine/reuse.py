"""Cache results of an engine for later observations with the same bytes. This module imports numpy, but no PyTorch.

A context (the result of vision tower and language model) depends on all inputs of the observation. If no input
changed, the stored context is returned again. If the model encodes views separately, the tokens of a view depend on
its pixels alone.

The number of views may still change the order of sums in the products. Then the tokens of a view can have other last
bits if the view is encoded alone. A test checks this before views are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sinew.engine.watch import Watch
from sinew.processing import ModelInputs

VIEWS, CONTEXTS = 8, 2  # the largest numbers of stored views and stored contexts
# Two frames are first compared in this many bytes at the start, because most different frames differ there.
FIRST_BYTES = 4096
FIELDS = ("camera_mask", "tokens", "token_mask", "pixels")


class Reuse:
    """The cache of an engine: the tokens of camera views, and the contexts of observations.

    Only observations without a batch, and views of tested shapes, are looked up and stored.

    Args:
        encode: Computes the tokens [B, V, N, C] of pixels [B, V, ...], in the engine's own array type.
        join: Concatenates arrays of tokens along the axis of views. The result is a new array.
        same: Returns True if two arrays of tokens have the same bits.
        threads: Returns the number of threads that compute for the calling thread, because sums may depend on it.
        renew: A function of a context and a newer state that returns the context for this state. None if the state
            cannot be read separately from the other inputs.
        alike: False if the model encodes all views together, so that one view cannot be encoded alone.
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
        """Test whether views can be encoded one by one.

        Uniform random pixels are encoded together and one by one, and every bit is compared.

        Args:
            shape: Shape of the pixels, [1, V, ...].

        Returns:
            The reason why views cannot be encoded one by one, or "" if they can.
        """
        key = (self._threads(), tuple(shape))
        if not self._alike and shape[1] > 1:
            self._tried[key] = "the model encodes its views together"
        if key not in self._tried:
            pixels = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
            whole, why = self._encode(pixels), ""
            if tuple(whole.shape[:2]) != tuple(shape[:2]):
                why = f"the model encodes {whole.shape[1]} views of {shape[1]} in the observation"
            for view in range(shape[1] if shape[1] > 1 and not why else 0):
                at = slice(view, view + 1)
                if not self._same(self._encode(np.ascontiguousarray(pixels[:, at])), whole[:, at]):
                    why = "a view's tokens depend on the other views, at least in their rounding"
                    break
            self._tried[key] = why
        return self._tried[key]

    def forget(self) -> None:
        """Empty the cache, because the weights of the model changed."""
        self._views.clear()
        self._contexts.clear()

    def tokens(self, pixels: np.ndarray, watch: Watch) -> Any:
        """Return the image tokens of ``pixels``. Views with the same bytes as stored views are not computed again."""
        if len(pixels) != 1 or self._tried.get(key := (self._threads(), pixels.shape), "not tried"):
            return self._encode(pixels)
        # Use a copy, because another thread may change the views while a stream runs.
        views_before = tuple(self._views)
        threads, views = key[0], [pixels[:, [view]] for view in range(pixels.shape[1])]
        hits = [
            next((t for n, seen, t in views_before if n == threads and _equal(seen, view)), None)
            for view in views
        ]
        watch.reused_views = sum(tokens is not None for tokens in hits)
        if not watch.reused_views:
            whole = self._encode(pixels)
            encoded = [self._join([whole[:, view : view + 1]]) for view in range(len(views))]
        else:
            encoded = [self._encode(v) if t is None else t for v, t in zip(views, hits, strict=True)]
            whole = self._join(encoded)
        # Append reused views again as the newest entries of the cache. The views of a camera whose picture does not
        # change then stay in the cache longest.
        self._views.extend((threads, view, tokens) for view, tokens in zip(views, encoded, strict=True))
        return whole

    def context(self, inputs: ModelInputs, watch: Watch) -> Any:
        """Return the stored context of an earlier observation with the same inputs; None if there is none.

        If only the state differs, the stored context may be updated with the new state.
        """
        for threads, seen, context in tuple(self._contexts):
            if threads != self._threads() or not all(
                _equal(getattr(seen, n), getattr(inputs, n)) for n in FIELDS
            ):
                continue
            if not (still := _equal(seen.state, inputs.state)) and self._renew is None:
                continue
            watch.reused_views, watch.reused_prefix = inputs.pixels.shape[1], True
            watch.lap("vision")
            renewed = context if still or self._renew is None else self._renew(context, inputs.state)
            watch.lap("prefix")
            return renewed
        return None

    def keep(self, inputs: ModelInputs, context: Any) -> None:
        """Store the context that the engine has just computed for ``inputs``."""
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
    """Return True if two arrays have the same shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(left[:FIRST_BYTES], right[:FIRST_BYTES]) and np.array_equal(left, right)

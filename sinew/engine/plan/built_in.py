"""Savings that eager has too, because model, processor or converter are made that way. Listed, so that a
reader of the plan need not ask; the tests hold each of them."""

from __future__ import annotations

from sinew.engine.plan.rewrite import Rewrite


def _built_in(name: str, summary: str, reason: str, *where: str) -> Rewrite:
    return Rewrite(name, summary, lambda _: ("built in", reason, where))


DROP_HEADS = _built_in(
    "drop-heads",
    "heads that predict tokens are left out",
    "a bundle holds no language-model head: the converter leaves them out",
)
DROP_PADDING = _built_in(
    "drop-padding",
    "padded prompt tokens are left out",
    "the processor leaves padded tokens and missing cameras out",
)
BATCH_VIEWS = _built_in(
    "batch-views",
    "all camera views are one batch",
    "embed_images() runs the tower once over all views",
    "vision",
)

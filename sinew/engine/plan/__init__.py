"""Rewrites of a loaded model that every engine shares. ``docs/plan.md`` lists them."""

from sinew.engine.plan.plan import REWRITES, Plan
from sinew.engine.plan.rewrite import Outcome, Rewrite

__all__ = ["REWRITES", "Outcome", "Plan", "Rewrite"]

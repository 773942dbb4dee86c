"""Rewrites of a loaded model that all engines share. ``docs/plan.md`` lists them."""

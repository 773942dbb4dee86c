"""Rewrites of a loaded model that every engine shares. ``docs/plan.md`` lists them."""

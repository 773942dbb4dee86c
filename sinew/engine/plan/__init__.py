"""Rewrites of a loaded model that make it faster without a change of its results, except for rounding. Several
engines use them. ``docs/plan.md`` lists the rewrites.
"""

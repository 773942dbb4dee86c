"""Closed-loop evaluation: play episodes of a policy in a gymnasium environment, and compute statistics, reports and a
gate.

``runner`` plays one episode. ``campaign`` plays many in parallel and can be resumed. ``report`` and ``plots`` show
the results, and ``gate`` compares them with a recorded run. ``docs/eval.md`` explains the semantics.
"""

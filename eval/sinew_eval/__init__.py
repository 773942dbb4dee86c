"""Closed-loop evaluation: episodes of a policy in a gymnasium environment, statistics, reports, a gate.

``runner`` plays one episode, ``campaign`` plays many in parallel and can be resumed, ``report`` and
``plots`` show them, ``gate`` holds them against a recorded run. ``docs/eval.md`` explains the semantics.
"""

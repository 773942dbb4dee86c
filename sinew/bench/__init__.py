"""Measure the inference times of a bundle on this machine.

`measure.py` measures the stages of one engine. `ladder.py` compares all engines.
"""

"""Bundles in fewer bits, and what that costs.

`quantization.py` writes and measures, `recipe_search.py` finds a recipe. `recipes.py`, `sources.py` and `gptq.py` have
the formats of weights and how they are rounded.
"""

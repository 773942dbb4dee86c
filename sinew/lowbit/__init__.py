"""Store the weights of a bundle with fewer bits, and measure the loss.

`quantization.py` writes and measures the bundle, and `recipe_search.py` searches a recipe. `recipes.py`, `sources.py`
and `gptq.py` contain the formats of weights and their rounding.
"""

"""Store the weights of a bundle with fewer bits (quantisation), and measure how much the actions change.

`quantization.py` writes and measures the bundle, and `recipe_search.py` searches the best precision of each component
(the quantisation recipe). `recipes.py`, `sources.py` and `gptq.py` contain the formats of weights and their rounding.
"""

"""The ways to store a matrix of weights, one class each (``sinew/layers/stores/store.py``)."""

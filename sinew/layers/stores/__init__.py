"""The ways to store a weight matrix. Each way is one class (``sinew/layers/stores/store.py``)."""

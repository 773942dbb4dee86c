"""The forms in which a weight matrix can be in memory. Each form is one class (``sinew/layers/stores/store.py``)."""

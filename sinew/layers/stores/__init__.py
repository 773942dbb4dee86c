"""The forms in which a weight matrix can be in memory. Each form is a class, called a store
(``sinew/layers/stores/store.py``).
"""

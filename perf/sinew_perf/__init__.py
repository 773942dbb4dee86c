"""Predict the latency and memory of a policy by the roofline: its operators, and the data of machines."""

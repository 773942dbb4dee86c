"""The roofline of a policy: its operators, what machines offer, and what that makes of latency and memory."""

"""Streams: sessions, loops, windows; with a policy in this process."""

"""The server: a wire decodes requests, the scheduler runs them one at a time, the loop moves bytes."""

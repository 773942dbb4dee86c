"""Statistics, tables and success gates of finished episodes."""

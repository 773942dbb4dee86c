"""Statistics, tables, figures, animations and gates of finished episodes."""

"""What a reader of the documents does: every line of every page, typed as it stands, judged by its outcome."""

"""What was seen and done, on disk: written beside a server, read by whoever asks later."""

"""A static page over server-sent events: what the server sees, answers, and how long it takes."""

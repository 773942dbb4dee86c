"""Processing steps between an observation and a model, and between a model and an action. Each step is one class in
one file."""

"""What happens between an observation and a model, and back, as steps that a bundle lists: one class in one file."""

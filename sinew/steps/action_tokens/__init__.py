"""Action tokens: one class per file that converts the tokens of an autoregressive head to actions."""

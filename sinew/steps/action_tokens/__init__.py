"""Action tokens: one class per file that turns the tokens of an autoregressive head into actions."""

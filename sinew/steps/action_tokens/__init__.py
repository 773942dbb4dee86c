"""What the tokens mean that a head says in turn: one class in one file."""

"""Steps that convert an instruction to tokens, one step per file. A step changes the instruction, writes text, or
changes tokens."""

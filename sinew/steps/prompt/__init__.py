"""How an instruction becomes tokens: a step a file. Some change the instruction, some write, some change the tokens."""

"""Play episodes of a task: one or many, in one process or several, with a policy and a simulated robot."""

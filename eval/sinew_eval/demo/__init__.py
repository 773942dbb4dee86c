"""``sinew demo``: the demonstrations of the package. No other module imports this one."""

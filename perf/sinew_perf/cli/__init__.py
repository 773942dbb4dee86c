"""The commands of ``sinew perf``: what is possible, before and after you buy the hardware."""

"""Commands of ``sinew perf``: predictions and measurements, before and after you buy the hardware."""

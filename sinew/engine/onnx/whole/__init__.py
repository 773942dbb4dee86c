"""Forms of an export for runtimes that take a file and nothing else: one graph of the whole policy, and pairs of
static 8-bit scales for compilers of NPUs."""

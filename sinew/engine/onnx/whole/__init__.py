"""A policy as one graph, for runtimes that take a file and nothing else; nothing here runs it but its proof."""

"""Development tools. Nothing here is part of a distribution."""

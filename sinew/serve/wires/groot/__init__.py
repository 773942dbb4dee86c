"""The wire of Isaac-GR00T's policy client."""

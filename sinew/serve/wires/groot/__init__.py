"""The protocol of Isaac-GR00T's policy client."""

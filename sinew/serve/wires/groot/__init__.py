"""The server's side of the protocol of Isaac-GR00T's policy client."""

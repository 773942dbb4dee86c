"""``sinew demo``: what everybody sees first, and no other part of Sinew needs."""

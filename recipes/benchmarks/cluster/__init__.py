"""An emulated cluster on one Linux machine, and every way to share a sequence measured on it."""

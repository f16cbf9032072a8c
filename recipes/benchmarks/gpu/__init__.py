"""Everything that only a GPU can show, on one of them, in at most 20 minutes."""

"""The papers' numbers beside ours: WallFacer and Ring Attention, from formulas and from calls on fake ranks."""

"""What the planner predicts for up to 1024 ranks, against named ways and a lower bound, and checked by simulation."""

"""WallFacer's figures of throughput, as the planner predicts them; tests/papers has what needs no prediction."""

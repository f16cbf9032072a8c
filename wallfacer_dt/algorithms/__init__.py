"""Context-parallel attention: schedules as data, one loop that executes them, and the volumes they move."""

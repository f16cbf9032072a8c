"""``wallfacer plan`` and ``wallfacer profile``: what is predicted and measured, as tables, JSON and pictures."""

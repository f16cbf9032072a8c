"""Runnable recipes: whole training runs that use `wallfacer_dt` the way a user would."""

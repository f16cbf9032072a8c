"""``wallfacer explain``: who holds what, and who sends what to whom at each step, as data, text and a picture."""

from wallfacer_dt.command.explain.facts import Facts
from wallfacer_dt.command.explain.make import make_facts
from wallfacer_dt.command.explain.settings import Settings

__all__ = ["Facts", "Settings", "make_facts"]

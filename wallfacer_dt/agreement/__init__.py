"""Ranks compare what they are about to do: every call on a mesh, before anything is sent or while a device works.

The lowest layer: it knows ranks and names of meshes, and nothing of attention.
"""

from wallfacer_dt.agreement.agree import (
    agree,
    agree_on,
    fake_number,
    hear_all,
    hear_once,
    named,
    refusing_together,
    settle,
    settling,
    tell,
    waits_at_once,
)
from wallfacer_dt.agreement.meeting import outside_dispatch, outside_modes
from wallfacer_dt.agreement.worlds import is_lasting, lasting, name_mesh, world_timeout

__all__ = [
    "agree",
    "agree_on",
    "fake_number",
    "hear_all",
    "hear_once",
    "is_lasting",
    "lasting",
    "name_mesh",
    "named",
    "outside_dispatch",
    "outside_modes",
    "refusing_together",
    "settle",
    "settling",
    "tell",
    "waits_at_once",
    "world_timeout",
]

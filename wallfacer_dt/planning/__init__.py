"""The planner: predict every plan, drop what does not fit, measure the best, choose."""

from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.cluster import Cluster, Kernels, Link, PlanningError
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.predict import Prediction
from wallfacer_dt.planning.profiling import Measured, Profile, profile
from wallfacer_dt.planning.search import Plan, Ranked, plan

__all__ = [
    "Candidate",
    "Cluster",
    "Kernels",
    "Link",
    "Measured",
    "ModelShape",
    "Plan",
    "PlanningError",
    "Prediction",
    "Profile",
    "Ranked",
    "SequenceShape",
    "plan",
    "profile",
]

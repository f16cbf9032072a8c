"""What is asked of a plan: no other is made, and the fastest of those there are."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.divided import KERNELS, MODEL, SEQUENCE, cluster
from tests.strategies import examples
from wallfacer_dt import plan
from wallfacer_dt.command.planning.shape import parse_only
from wallfacer_dt.planning import Candidate, PlanningError
from wallfacer_dt.planning.candidates import attentions, with_layers
from wallfacer_dt.planning.dividing import divide
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.only import ATTENTION, GROUPS, LAYERS, Only
from wallfacer_dt.planning.predict import attention_costs, predict


def test_names_are_the_attributes_of_plans() -> None:
    assert {*ATTENTION, *LAYERS} == {field.name for field in fields(Candidate)}
    assert {*LAYERS} == set(Candidate(1).layers)
    assert {*GROUPS} == {field.name for field in fields(Division)} - {"microbatches", "loss_chunks", "last_less"}


@examples(12)
@given(st.data(), st.sampled_from([(4, 2), (8, 4)]), st.booleans(), st.sampled_from([None, 100]))
def test_the_fastest_of_what_is_asked_for(
    data: st.DataObject, size: tuple[int, int], causal: bool, window: int | None
) -> None:
    where = cluster(*size, kernels=replace(KERNELS, launch=1e-5))
    bounds = None if window is None else (window, 0 if causal else window)
    sequence = replace(SEQUENCE, is_causal=causal, window_size=bounds)
    every = [one for it in attentions(MODEL, sequence, where) for one in with_layers(it, MODEL)]
    some = data.draw(st.sampled_from(every))
    names = data.draw(st.sets(st.sampled_from([*ATTENTION, *LAYERS]), min_size=1, max_size=3))
    only = {name: getattr(some, name) for name in sorted(names)}

    def has_it(one: Candidate) -> bool:
        return all(getattr(one, name) == value for name, value in only.items())

    made = plan(MODEL, sequence, where, only=only, keep=None, margin=0.0)
    assert all(has_it(one.candidate) for one in made.ranked)
    told = MODEL, sequence, where
    fastest = min(predict(one, *told, *attention_costs(one, *told)).seconds for one in every if has_it(one))
    assert made.prediction.seconds == pytest.approx(fastest, rel=1e-9)
    assert made.considered == len({replace(one, **Candidate(1).layers) for one in every if has_it(one)})


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ({"tensor": 2}, "only must name some of ring, team, .*, got 'tensor', which is of divided ranks"),
        ({"rings": 2}, "only must name some of ring, team, .*, got 'rings'$"),
        ({"ring": 3}, "no plan has ring=3, but 1, 2, 4, 8"),
        ({"ring": "2"}, "no plan has ring='2', but 1, 2, 4, 8"),
        ({"schedule": "3d"}, "no plan has schedule='3d', but 2d, published"),
        ({"checkpoint": "half"}, "no plan has checkpoint='half', but attention, full, none"),
        ({"ring": 4, "team": 4}, "no plan has all of ring=4, team=4"),
        ({"projections": "metp", "ulysses": 2}, "no plan has all of ulysses=2, projections=metp"),
    ],
)
def test_what_no_plan_has_is_refused_by_name(only: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        plan(MODEL, SEQUENCE, cluster(8, 4), only=only)
    assert getattr(refused.value, "about", "only") == "only"
    if "no plan" in message:
        with pytest.raises(PlanningError, match="no plan has ") as refused:
            divide(MODEL, SEQUENCE, cluster(8, 4), 4, only=only)
        assert refused.value.about == "only"


@pytest.mark.parametrize("value", [True, 2.0, None])
def test_values_are_ints_or_names(value: object) -> None:
    for make in (lambda only: plan(MODEL, SEQUENCE, cluster(), only=only), Only.of):
        with pytest.raises(TypeError, match=f"only: ring must be an int or a str, got {value}"):
            make({"ring": value})


def test_a_text_is_read() -> None:
    assert parse_only(None, divides=False) == {}
    assert parse_only("tensor=8, schedule=2d", divides=True) == {"tensor": 8, "schedule": "2d"}

"""What is asked of a plan: no other is made, and the fastest of those there are."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.divided import KERNELS, MODEL, SEQUENCE, cluster
from tests.strategies import examples
from wallfacer_dt import plan
from wallfacer_dt.command.app import main
from wallfacer_dt.command.planning.shape import parse_only
from wallfacer_dt.mesh import PLACEMENTS
from wallfacer_dt.planning import Candidate, Measured, PlanningError, Profile
from wallfacer_dt.planning.candidates import as_usual, attentions, node_of, with_layers
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
        """Or it makes no difference."""
        rotates = one.ring * one.team > 1
        alike = [replace(one, placement=placement) for placement in PLACEMENTS]
        placements = {it.placement for it in alike if (node_of(it, size[1]) == node_of(one, size[1])).all()}
        return all(
            value in placements if name == "placement"
            else getattr(one, name) == value or (name.startswith("rotate") and not rotates)
            for name, value in only.items()
        )  # fmt: skip

    made = plan(MODEL, sequence, where, only=only, keep=None, margin=0.0)
    assert all(getattr(one.candidate, name) == value for one in made.ranked for name, value in only.items())
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


@pytest.mark.parametrize("placement", ["team_in_node", "ring_in_node", "ulysses_in_node"])
def test_a_placement_that_makes_no_difference_is_taken(placement: str) -> None:
    """On one node, and of one axis, whatever it is called; and so is what rotates where nothing does."""
    inside, across = cluster(4, 4), cluster(8, 4)
    for where, sizes in (
        (inside, {"ulysses": 2, "ring": 2}),
        (across, {"ring": 8}),
        (across, {"ulysses": 4, "ring": 2}),
    ):
        chosen = plan(MODEL, SEQUENCE, where, only=sizes | {"placement": placement}).chosen
        assert chosen.placement == placement
        assert all(getattr(chosen, name) == size for name, size in sizes.items())
    alone = plan(MODEL, SEQUENCE, inside, only={"ulysses": 4, "rotate": "q", "rotate_forward": "q"}).chosen
    assert (alone.rotate, alone.rotate_forward) == ("q", "q")
    made = divide(MODEL, SEQUENCE, inside, 4, only={"rotate": "q", "placement": placement})
    assert made.contexts == (1, 2, 4)


def test_what_was_measured_is_known_by_whatever_name() -> None:
    where, model = cluster(8, 4), replace(MODEL, heads=8, ffn=0)
    moved = {"rotate": "q", "rotate_forward": "q"}
    for axes, only in (({"ring": 8}, {}), ({"ulysses": 4, "ring": 2}, moved), ({"ulysses": 8}, moved)):
        asked = axes | only | {"placement": "ulysses_in_node"}
        made = plan(model, SEQUENCE, where, only=asked, keep=None)
        usual = [as_usual(one.candidate, where) for one in made.ranked]
        assert set(usual) <= {one for it in attentions(model, SEQUENCE, where) for one in with_layers(it, model)}
        profile = Profile(where, tuple(Measured(model, SEQUENCE, one, 2.0) for one in usual))
        again = plan(model, SEQUENCE, where, only=asked, profile=profile, keep=None)
        assert {one.candidate: one.measured for one in again.ranked} == {one.candidate: 2.0 for one in made.ranked}


def test_what_was_asked_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 64 --heads 4 --ffn 128 --layers 2 --full --ranks 4 --intra 1GB/s --memory 100MB --only ring=4"
    for more, said in (
        ("--seq 256", "plans with ring=4, for a step"),
        ("--seq 256 --sequences 2", "divisions with ring=4, for a step"),
        ("--seq longest", "the longest sequence of which a plan with ring=4 fits"),
    ):
        assert main(f"plan {sizes} {more}".split()) == 0
        assert said in capsys.readouterr().out
        if more != "--seq longest":
            assert main(f"plan {sizes} {more} --json".split()) == 0
            assert json.loads(capsys.readouterr().out)["only"] == "ring=4"


@pytest.mark.parametrize("value", [True, 2.0, None])
def test_values_are_ints_or_names(value: object) -> None:
    for make in (lambda only: plan(MODEL, SEQUENCE, cluster(), only=only), Only.of):
        with pytest.raises(TypeError, match=f"only: ring must be an int or a str, got {value}"):
            make({"ring": value})


def test_a_text_is_read() -> None:
    assert parse_only(None, divides=False) == {}
    assert parse_only("tensor=8, schedule=2d", divides=True) == {"tensor": 8, "schedule": "2d"}
    assert parse_only(f"ring={'9' * 5000}", divides=False) == {"ring": "9" * 5000}  # which no plan has

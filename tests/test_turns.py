"""Groups of heads in turn: each goes through all parts of its schedule, and the next begins before what is left."""

from hypothesis import given
from hypothesis import strategies as st

from wallfacer_dt.algorithms.steps import Parts
from wallfacer_dt.algorithms.turns import in_turn

BEGINS, COMES, COMPUTES, ENDS = range(len(Parts._fields))
ANY = st.builds(Parts, *[st.sampled_from([(), ("step",)])] * len(Parts._fields))


@given(st.integers(1, 20), ANY)
def test_every_group_goes_through_its_parts_in_order(groups: int, parts: Parts[str]) -> None:
    turns = in_turn(groups, parts)
    assert len(turns) == groups * len(parts)
    for group in range(groups):
        mine = [turn for turn in turns if turn.group == group]
        assert [turn.part for turn in mine] == [BEGINS, COMES, COMPUTES, ENDS]
        assert [turn.is_first for turn in mine] == [True, False, False, False]
        assert [turn.is_last for turn in mine] == [False, False, False, True]


@given(st.integers(2, 20), st.booleans())
def test_the_next_group_begins_when_the_last_data_have_come(groups: int, has_end: bool) -> None:
    """And what comes home is waited for after the next group's data; at most two groups are under way."""
    parts = Parts(("start",), ("wait",), ("attend",), ("wait",) * has_end)
    turns = in_turn(groups, parts)
    at = {(turn.group, turn.part): number for number, turn in enumerate(turns)}
    for group in range(groups - 1):
        assert at[group, COMES] < at[group + 1, BEGINS] < at[group, COMPUTES] < at[group + 1, COMES]
        assert (at[group + 1, COMES] < at[group, ENDS] < at[group + 1, COMPUTES]) is has_end
        assert has_end or at[group, ENDS] == at[group, COMPUTES] + 1
    under_way: set[int] = set()
    for turn in turns:
        under_way.add(turn.group)
        assert len(under_way) <= 2
        if turn.is_last:
            under_way.remove(turn.group)


@given(st.integers(1, 20))
def test_groups_that_send_nothing_come_one_after_the_other(groups: int) -> None:
    turns = in_turn(groups, Parts((), ("attend",), ("attend",), ()))
    assert [turn.group for turn in turns] == sorted(turn.group for turn in turns)

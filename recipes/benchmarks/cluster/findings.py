"""What the tables show, in words."""

import statistics
from collections.abc import Collection, Mapping, Sequence

from recipes.benchmarks.cluster.cases import Case, all_cases
from recipes.benchmarks.cluster.contenders import FLOOR, PLANNED, PREDICTED, PUBLISHED, RING, ULYSSES, USP
from recipes.benchmarks.cluster.judged import (
    NOISE,
    OVER_FLOOR,
    OVER_RING,
    REGRET,
    ROUNDS,
    Measured,
    behind_best,
    best_of,
    fastest,
    is_same,
    is_slower,
    known_as,
    noise,
    over_rings,
    regret,
    regret_by_round,
    times,
)


def findings(cases: Mapping[Case, Measured]) -> list[str]:
    """What the tables show, in words, with the cases that were lost by name."""
    whole = set(all_cases())
    lines = [f"{len(whole & cases.keys())} of the {len(whole)} cases of the whole comparison are in this report."]
    firsts = [known_as(measured, best_of(measured)) for measured in cases.values()]
    counts = sorted(((firsts.count(name), name) for name in set(firsts)), key=lambda pair: (-pair[0], pair[1]))
    lines.append("Best by cases: " + "; ".join(f"{name}, {count}" for count, name in counts) + ".")
    planned = {case: measured for case, measured in cases.items() if PLANNED in measured}
    if not planned:
        return [*lines, "Nothing was planned in these cases."]
    beyond = [case for case, measured in planned.items() if regret(measured) > REGRET]
    lines.append(f"Planned is more than {REGRET:.0%} slower than the best {_in(beyond, planned)}.")
    fair = {case: it for case, measured in planned.items() if (it := regret_by_round(measured)) is not None}
    if fair:
        beyond = [case for case, it in fair.items() if it > REGRET]
        lines.append(
            "The best of many is the luckiest, too. Against who was best in the other rounds, where there are several, "
            f"planned takes {1 + statistics.median(fair.values()):.2f} times as long in the median, and more than "
            f"{REGRET:.0%} longer {_in(beyond, fair)}."
        )
    for name, what in (
        (RING, "the plain ring"),
        (ULYSSES, "Ulysses"),
        (USP, "USP"),
        (PUBLISHED, "the published schedule"),
    ):
        others = {case: fastest(measured, name) for case, measured in planned.items() if fastest(measured, name)}
        judged = [case for case in others if len(planned[case][PLANNED].sums) >= ROUNDS]
        behind = {case: times(planned[case], PLANNED, it) - 1 for case, it in others.items()}
        slow = [case for case, it in others.items() if behind[case] > NOISE and not is_same(planned[case], it)]
        lost = [case for case in slow if case in judged and is_slower(planned[case], others[case])]
        line = f"Planned is slower than {what} beyond noise {_in(lost, judged)}."
        if seldom := len(others) - len(judged):
            more = [f"{case.name} ({behind[case]:+.0%})" for case in slow if case not in judged]
            line += f" Of {seldom} that ran fewer rounds it takes more than {NOISE:.0%} longer in {len(more)}"
            line += (": " if more else "") + "; ".join(more) + "."
        lines.append(line)
    few = [case for case, measured in planned.items() if case.heads < measured[PLANNED].cluster.ranks]
    short = [case for case in few if over_rings(planned[case]) < OVER_RING]
    lines.append(
        f"With fewer heads than ranks the faster of the two rings takes less than {OVER_RING} times as long as planned "
        f"{_in(short, few)}."
    )
    if beyond_reach := [
        case for case in short if FLOOR in planned[case] and over_rings(planned[case], FLOOR) < OVER_RING
    ]:
        lines.append(
            f"In {len(beyond_reach)} of those {len(short)} the rings take less than {OVER_RING} times as long as one "
            "process, too: on these cores there is hardly that much to gain."
        )
    behind = [case for case in few if USP in planned[case] and times(planned[case], PLANNED, USP) >= 1]
    lines.append(f"With fewer heads than ranks planned is not ahead of USP {_in(behind, few)}.")
    first = [case for case, measured in planned.items() if behind_best(measured, PREDICTED) > REGRET]
    lines.append(f"What was predicted alone is more than {REGRET:.0%} slower than the best {_in(first, planned)}.")
    if again := noise(planned):
        lines.append(
            f"{len(again)} times another contender is the very plan that was planned, which counts as no regret: one "
            f"took {statistics.median(again):.0%} longer than the other in the median, and up to {max(again):.0%}."
        )
    every = [entry for measured in planned.values() for entry in measured.values()]
    if spreads := [entry.range / entry.seconds for entry in every if len(entry.sums) > 1]:
        far = sum(spread > REGRET for spread in spreads)
        once = sum(len(measured[PLANNED].sums) == 1 for measured in planned.values())
        lines.append(
            f"The slowest round of a contender is {statistics.median(spreads):.0%} of its time above the fastest in "
            f"the median, and more than {REGRET:.0%} in {far} of {len(spreads)}. In {once} of {len(planned)} cases "
            "each ran once: what is closer than that is not told apart there."
        )
    free = [case for case in planned if case.rate is None and FLOOR in planned[case]]
    for what, of in (("the best contender", best_of), ("planned", lambda _: PLANNED)):
        above = [case for case in free if times(planned[case], of(planned[case]), FLOOR) > OVER_FLOOR]
        lines.append(f"Without a limit {what} takes more than {OVER_FLOOR} times one process {_in(above, free)}.")
    return lines


def _in(lost: Sequence[Case], among: Collection[Case]) -> str:
    names = f": {'; '.join(case.name for case in lost)}" if lost else ""
    return f"in {len(lost)} of {len(among)} cases{names}"

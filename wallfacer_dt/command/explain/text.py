"""The facts in words and tables, for a terminal of 100 columns."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from wallfacer_dt.command.explain.facts import Attend, Communicate, Facts, Message, Pair, Rank, Transfer
from wallfacer_dt.planning.units import format_size

_DO = {
    "heads": "tokens for heads",
    "gather": "all-gather",
    "move": "hop",
    "carry": "carry",
    "exchange": "all-to-all",
    "tokens": "heads for tokens",
}
_SIDES = {"q": "queries", "kv": "keys and values"}
_WIDTH = 90  # of columns beside a table's first


def print_facts(facts: Facts, rank: int, console: Console) -> None:
    """Print everything, with the steps of one rank.

    Args:
        facts: of all ranks.
        rank: whose steps.
        console: where.
    """
    for line in _summary(facts):
        console.print(line)
    chosen = facts.ranks[rank]
    tables = (_mesh_table(facts), _node_table(facts), _rank_table(facts), *_block_tables(facts))
    for table in (*tables, _transfer_table(facts), _step_table(chosen)):
        title, table.title = table.title, None
        print_table(str(title or ""), table, console)
    if len(chosen.heads) > 1:
        console.print(_other_groups(chosen))


def print_table(title: str, table: Table, console: Console) -> None:
    """A table with a line over it, if there is one."""
    if title:  # printed here, since a title is wrapped where its table ends
        console.print(f"\n{title}", style="bold")
    for column in table.columns:
        column.overflow = "fold"  # nothing is left out, however narrow
    console.print(table)


def _summary(facts: Facts) -> Iterator[str]:
    asked = facts.settings
    phase = "backward" if asked.backward else "forward"
    seen = ", causal" * asked.causal + (f", window {asked.window}" if asked.window is not None else "")
    shape = f"{asked.heads}/{asked.kv_heads} heads of {asked.head_dim}, batch {asked.batch}, {asked.dtype}"
    yield f"{phase} of {asked.length} tokens, {asked.order}{seen}; {shape}"
    stay, move = _SIDES[facts.stays], _SIDES[facts.moves]
    comes = "go round" if asked.schedule == "rings" else "are gathered in"
    gathered = f"{stay} {comes} teams of {asked.team} and stay" if asked.team > 1 else f"{stay} stay"
    if _is_placed(facts):
        blocks = asked.ring // asked.team
        yield f"published schedule: {stay} and {move} are gathered in teams of {asked.team};"
        yield f"a team's {move} are placed as Algorithm 2 says and go round rings of {blocks}"
    else:
        moves = f"{move} go round rings of {asked.ring}" if asked.ring > 1 else f"{move} stay, too"
        yield f"{asked.schedule} schedule: {gathered}; {moves}"
    if asked.ulysses > 1:
        yield f"around this, {asked.ulysses} ranks each exchange their tokens for heads (Ulysses)"


def _is_placed(facts: Facts) -> bool:
    return facts.settings.schedule == "published" and facts.settings.team > 1


def _mesh_table(facts: Facts) -> Table:
    """Ranks by ring and team, one part for each rank of the Ulysses axis."""
    asked = facts.settings
    table = _table("The mesh: global rank (node)", [*(["ulysses"] if asked.ulysses > 1 else []), "ring"])
    for member in range(asked.team):
        table.add_column(f"team {member}", justify="right")
    for u in range(asked.ulysses):
        for r in range(asked.ring):
            ranks = [asked.rank(u, r, m) for m in range(asked.team)]
            cells = [f"{rank} ({asked.node(rank)})" for rank in ranks]
            table.add_row(*([str(u)] if asked.ulysses > 1 else []), str(r), *cells)
    return table


def _node_table(facts: Facts) -> Table:
    table = _table("Nodes", ["node"])
    table.add_column("ranks")
    table.add_column("receives from other nodes", justify="right")
    nodes: dict[int, list[Rank]] = {}
    for rank in facts.ranks:
        nodes.setdefault(rank.node, []).append(rank)
    for node, ranks in nodes.items():
        received = format_size(sum(rank.received_from_other_nodes for rank in ranks))
        table.add_row(str(node), _listed(rank.rank for rank in ranks), received)
    return table


def _rank_table(facts: Facts) -> Table:
    has_groups = facts.settings.ulysses > 1
    table = _table("Who holds what: positions start:stop of the sequence, and what comes in", ["rank", "tokens"])
    table.add_column("positions")
    if has_groups:
        table.add_column("query heads by group")
        table.add_column("key heads")
    table.add_column("receives", justify="right")
    table.add_column("from other nodes", justify="right")
    for rank in facts.ranks:
        groups = [group for group in rank.heads if group.q[0] < group.q[1]]
        heads = [_spans([group.q for group in groups]), _spans([group.kv for group in groups])]
        tokens = sum(stop - start for start, stop in rank.positions)
        received = [format_size(rank.received), format_size(rank.received_from_other_nodes)]
        positions = _spans(rank.positions) or "none"
        table.add_row(str(rank.rank), str(tokens), positions, *(heads if has_groups else []), *received)
    return table


def _block_tables(facts: Facts) -> Iterator[Table]:
    """By block, with whose rows each rank works; some ranks at a time."""
    masked = facts.settings.causal or facts.settings.window is not None
    share = ", and the share of pairs seen" if masked else ""
    title = f"Whose {_SIDES[facts.moves]} each rank works on, by rank that holds them{share}"
    widest = max((len(_listed(attend.moves)) for rank in facts.ranks for attend in rank.attends), default=1)
    abreast = max(1, _WIDTH // (max(len("rank 12"), widest + 5 * masked) + 3))
    for first in range(0, len(facts.ranks), abreast):
        ranks = facts.ranks[first : first + abreast]
        table = _table(title if first == 0 else "", ["block"])
        for rank in ranks:
            table.add_column(f"rank {rank.rank}", justify="right")
        for block in sorted({attend.block for rank in ranks for attend in rank.attends}):
            cells = [_block_cell([a for a in rank.attends if a.block == block], masked) for rank in ranks]
            table.add_row(str(block), *cells)
        yield table


def _block_cell(attends: Sequence[Attend], masked: bool) -> str:
    # Own rows of block 0 may be computed in two parts, of one whole.
    wholes = {(attend.group, attend.part): attend.possible for attend in attends}
    possible = sum(wholes.values())
    share = sum(attend.pairs for attend in attends) / possible if possible else 0.0
    return _listed(attends[0].moves) + (f" {share:4.0%}" if masked else "")


def _transfer_table(facts: Facts) -> Table:
    several = len(facts.ranks[0].heads) > 1
    title = "Who sends what to whom, in the order of the first rank's steps"
    table = _table(title + (", for the first group of heads" if several else ""), ["transfer"])
    table.add_column("")
    table.add_column("what")
    table.add_column("from -> to, or {all with all}")
    table.add_column("a message", justify="right")
    by_rank = {rank.rank: {t.number: t for t in rank.transfers} for rank in facts.ranks}
    for number in _order(facts.ranks[0]):
        transfers = {rank: known[number] for rank, known in by_rank.items() if number in known}
        one = transfers[facts.ranks[0].rank]
        sizes = [message.bytes for transfer in transfers.values() for message in transfer.sends]
        table.add_row(str(number), _DO[one.kind], one.what, _routes(transfers), _range(sizes))
    return table


def _order(rank: Rank) -> list[int]:
    """Numbers of the first group's transfers by when they start."""
    first = {transfer.number for transfer in rank.transfers if transfer.group == 0}
    steps = [step for step in rank.steps if isinstance(step, Communicate)]
    return [step.transfer for step in steps if step.kind == "start" and step.transfer in first]


def _routes(transfers: dict[int, Transfer]) -> str:
    if next(iter(transfers.values())).kind in ("move", "carry"):
        pairs = [f"{rank}->{message.rank}" for rank, transfer in transfers.items() for message in transfer.sends]
        staying = [rank for rank, transfer in transfers.items() if not transfer.sends]
        return "  ".join(pairs) + (f"  stay: {_listed(staying)}" if staying else "")
    groups = {tuple(sorted({rank, *(m.rank for m in t.sends + t.receives)})) for rank, t in transfers.items()}
    return "  ".join(f"{{{_listed(group)}}}" for group in sorted(groups))


def _step_table(rank: Rank) -> Table:
    """The program of one rank until the results of its first group of heads leave."""
    table = _table(f"Steps of rank {rank.rank}", ["step"])
    table.add_column("")
    table.add_column("what")
    table.add_column("to and from ranks, or rows of queries x rows of keys")
    table.add_column("messages x elements, bytes each", justify="right")
    groups = [step.group if isinstance(step, Attend) else rank.transfer_of(step).group for step in rank.steps]
    is_home = [isinstance(step, Communicate) and _is_home(step, rank) for step in rank.steps]
    last = max(at for at, group in enumerate(groups) if group == 0 and (len(rank.heads) == 1 or not is_home[at]))
    for number, (step, group) in enumerate(zip(rank.steps[: last + 1], groups, strict=False)):
        which = f", group {group}" if len(rank.heads) > 1 else ""
        if isinstance(step, Attend):
            table.add_row(str(number), *_attend_cells(step, which), style="bold")
        else:
            table.add_row(str(number), step.kind, *_communicate_cells(step, rank.transfer_of(step), which))
    return table


def _is_home(step: Communicate, rank: Rank) -> bool:
    """Whether it waits for results by tokens."""
    return step.kind == "wait" and rank.transfer_of(step).kind == "tokens"


def _attend_cells(step: Attend, which: str) -> list[str]:
    share = step.pairs / step.possible if step.possible else 0.0
    stays, moves = ("own", f"block {step.block} of {_listed(step.moves)}")
    if step.part == "peer":
        stays = f"rows of {_listed(step.stays)}"
    return [
        "compute",
        f"{stays} x {moves}{which}",
        ", ".join(step.tiles) or "nothing seen",
        f"{step.pairs} pairs, {share:.0%}",
    ]


def _communicate_cells(step: Communicate, transfer: Transfer, which: str) -> list[str]:
    what = f"{transfer.number}: {_DO[transfer.kind]} {transfer.what}{which}"
    if not transfer.sends and not transfer.receives:
        return [what, "stays here", ""]
    if step.kind == "start":
        return [what, f"to {_listed(m.rank for m in transfer.sends) or 'none'}", _message_sizes(transfer.sends)]
    return [what, f"from {_listed(m.rank for m in transfer.receives) or 'none'}", _message_sizes(transfer.receives)]


def _message_sizes(messages: Sequence[Message]) -> str:
    elements = sorted({message.elements for message in messages})
    count = f"{elements[0]}" if len(elements) == 1 else f"{elements[0]} to {elements[-1]}" if elements else "0"
    return f"{len(messages)} x {count}, {_range([message.bytes for message in messages])}"


def _other_groups(rank: Rank) -> str:
    groups = [_spans([group.q]) for group in rank.heads[1:] if group.q[0] < group.q[1]]
    if not groups:
        return f"rank {rank.rank} has one group of heads, others have more"
    return f"And so on for query heads {', '.join(groups)}; all groups' results are waited for at the end."


def _table(title: str, numbers: Sequence[str]) -> Table:
    """A table whose first columns are numbers."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _range(sizes: Sequence[int]) -> str:
    if not sizes:
        return "0 B"
    low, high = format_size(min(sizes)), format_size(max(sizes))
    return low if low == high else f"{low} to {high}"


def _listed(ranks: Iterable[int]) -> str:
    """Ascending ranks, three and more neighbours as 0-2."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _spans(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in pairs)

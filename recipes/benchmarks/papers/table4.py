"""WallFacer's table 4: supported sequence lengths on A100s of 80 GB, from equations 6 and 7 with ZeRO-2."""

from fractions import Fraction

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers.budget import ZERO_2, longest, power_of_two
from recipes.benchmarks.papers.models import GIB, GPT_3B, GPT_7B, GPT_13B, K, Model, call_of
from recipes.benchmarks.papers.peak import activations
from recipes.benchmarks.papers.run import held

BUDGET = 80 * GIB
TEAM = 2
GPUS = 8
PRINTED = {"GPT 3B": 512, "GPT 7B": 256, "GPT 13B": 128}
"""The longest length with a tick, K tokens; the table tries 128, 256 and 512, and both methods have the same ticks."""
MODELS = (GPT_3B, GPT_7B, GPT_13B)


def equation_bytes(model: Model, tokens: int, gpus: int, team: int) -> Fraction:
    """Equation 6 (``team`` 1) or 7 in bytes, with the states of ZeRO-2.

    Args:
        model: whose.
        tokens: N.
        gpus: P.
        team: C.

    Returns:
        Bytes on one GPU.
    """
    activation = Fraction(2 * tokens * model.hidden, gpus)
    return ZERO_2.of(model, gpus) + activations(model.layers, team) * activation


def measured_bytes(model: Model, tokens: int, gpus: int, team: int) -> Fraction:
    """The same with what an attention call of this package holds in forward and backward instead of q, k and v."""
    schedule = "published" if team > 1 else "2d"
    # What is held is proportional to the tokens, so it is measured once.
    call = call_of(model, 128 * K, gpus, team, schedule)
    attention = Fraction(held(call).step_peak, 128 * K) * tokens
    checkpoints = (model.layers + 1) * Fraction(2 * tokens * model.hidden, gpus)
    return ZERO_2.of(model, gpus) + checkpoints + attention


def logits_bytes(model: Model, tokens: int, gpus: int, team: int) -> Fraction:
    """The same, and logits with their gradient in float32, which neither equation has."""
    return measured_bytes(model, tokens, gpus, team) + Fraction(8 * tokens * model.vocab, gpus)


def table() -> Table:
    """The lengths, and how many times the paper's they are."""
    rows = []
    for model in MODELS:
        for team in (1, TEAM):
            printed = PRINTED[model.name]
            one = longest(lambda n: equation_bytes(model, n, 1, 1), BUDGET)  # noqa: B023  (called at once)
            cells = [f"{printed}", f"{one // K}"]
            for needed in (equation_bytes, measured_bytes, logits_bytes):
                tokens = longest(lambda n: needed(model, n, GPUS, team), BUDGET)  # noqa: B023
                cells += [f"{tokens / K:,.0f}", f"{tokens / K / printed:.2f}", f"{power_of_two(tokens)}"]
            states = float(ZERO_2.of(model, GPUS)) / GIB
            name = "Ring Attention" if team == 1 else f"WallFacer, C = {team}"
            how = f"formula; attention executed, {GPUS} fake ranks"
            rows.append([f"{model.name}, {name}", *cells, f"{states:.1f}", how])
    head = [
        "K tokens", "paper, of 128, 256, 512", "ours on one GPU", f"equations 6 and 7 on {GPUS} GPUs", "/ paper",
        "as a power of 2", "attention as measured", "/ paper", "as a power of 2", "and logits", "/ paper",
        "as a power of 2", "states, GiB", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, table 4: supported sequence lengths", head, rows, _note(rows))


def _note(rows: list[list[str]]) -> str:
    def lost(place: int) -> str:
        lengths = [float(row[place].replace(",", "")) for row in rows]
        shares = [1 - wall / ring for ring, wall in zip(lengths[::2], lengths[1::2], strict=True)]
        return f"{min(shares):.0%} to {max(shares):.0%}"

    equal = sum(row[11] == row[1] for row in rows)
    narrow = 8 * GPT_13B.parameters / GIB
    return (
        "Terms: weights in bfloat16 on every GPU, gradients in bfloat16 and Adam's float32 copy and moments sharded "
        f"over the GPUs (ZeRO-2), Y + 1 checkpoints and q, k and v (equations 6 and 7), {BUDGET // GIB} GiB; then, "
        "instead of q, k and v, what an attention call holds at most in forward and backward; then logits of "
        f"{GPT_3B.vocab:,} words and their gradient in float32. Not in the paper: C, the vocabulary, and 13B's sizes "
        "(LLaMA's); table 3's 12 heads of 3B do not divide 4,096, here are 16. The paper's ticks are of one GPU by its "
        f"title. On one GPU the states alone of 7B and 13B are more than {BUDGET // GIB} GiB (13B's {narrow:.0f} GiB "
        "even with all of Adam in bfloat16), so that cannot be meant; the entries are those of the Ring Attention "
        "paper's table 3 for 8 A100s, and with 8 GPUs that share the sequence they can be compared. The table goes in "
        "powers of two, so a ratio from 1 to 2 is as near as can be said (with 3B it ends at 512, so that there it is "
        f"an upper bound): with logits {equal} of {len(rows)} are the same power of two. Ours is longer, as nothing is "
        "counted but these terms: not what a layer's feed-forward needs while it is run again, nor workspaces, "
        f"fragments and NCCL's buffers. By the equations C = {TEAM} costs {lost(3)} of the length, with attention as "
        f"measured {lost(6)}; the paper has the same ticks for both."
    )

"""What users may rely on: public names and signatures, and what importing costs."""

import inspect
import subprocess
import sys
import textwrap

import pytest
from expecttest import assert_expected_inline

import wallfacer_dt
from wallfacer_dt.checkpoint import save_attention
from wallfacer_dt.plans import llama3_plan


def described(thing: object) -> str:
    """Parameters without annotations, keyword-only ones after a star; of an exception what it is."""
    if isinstance(thing, type) and issubclass(thing, Exception):
        return f"    {thing.__mro__[1].__name__}"
    parameters = []
    for p in inspect.signature(thing).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return textwrap.fill(", ".join(parameters), 110, initial_indent="    ", subsequent_indent="    ")


def test_public_names_and_signatures() -> None:
    things = {name: getattr(wallfacer_dt, name) for name in wallfacer_dt.__all__}
    things |= {"checkpoint.save_attention": save_attention, "plans.llama3_plan": llama3_plan}
    lines = [f"{name}\n{described(thing)}" for name, thing in things.items()]
    assert_expected_inline(
        "\n".join(lines),
        """\
AttentionOptions
    *, is_causal=False, window_size=None, prefix_length=0, mask_mod=None, scale=None, softcap=None,
    length=None, kv_length=None, replicated=0, order=None, schedule='2d', rotate='auto',
    rotate_forward='auto', kernel='auto'
AttentionVolume
    forward, backward, rotate, rotate_forward
BlockwiseFeedForward
    *, chunk, check=True
Cluster
    ranks, ranks_per_node, intra, inter, nics=1, memory=None, kernels=Kernels(forward=357000000000000.0,
    backward=322000000000000.0, linear=666000000000000.0, overhead=2e-05, merge=2500000000000.0, copy=0.0,
    half_rows=0.0, attention='auto', launch=7e-05, takes_segments=True), striped_gathers=True,
    device_type='cuda'
EquivalenceError
    AssertionError
Kernels
    forward=357000000000000.0, backward=322000000000000.0, linear=666000000000000.0, overhead=2e-05,
    merge=2500000000000.0, copy=0.0, half_rows=0.0, attention='auto', launch=7e-05, takes_segments=True
Link
    bandwidth, latency=0.0
METPAttentionParallel
    *, output, head_dim, attention, query=None, key=None, value=None, qkv=None, kv_heads=None, rotary=None,
    rotation=None, example=None, input_layouts=None, output_layouts=None, check=True
METPParallel
    *, up, down, activation, gate=None, input_layouts=None, output_layouts=None, check=True
ModelShape
    hidden, heads, kv_heads=None, head_dim=None, ffn=0, gated=True, layers=1, vocab=0, experts=0,
    experts_per_token=0, windowed_layers=None, shared_ffn=0, value_dim=None, kv_rank=0, q_rank=0,
    rotary_dim=0, dense_layers=0, dense_ffn=0
Plan
    model, sequence, cluster, ranked, dropped=(), considered=0, only=''
Profile
    cluster, measured=()
RingParallel
    *, layout='BLNH', check=True, is_causal=False, window_size=None, prefix_length=0, mask_mod=None,
    scale=None, softcap=None, length=None, kv_length=None, replicated=0, order=None, rotate='auto',
    rotate_forward='auto', kernel='auto'
SequenceDataset
    tokens, length, order=None
SequenceSampler
    dataset, mesh=None, *, data_parallel=None, shuffle=True, seed=0
SequenceShape
    length, batch=1, is_causal=False, window_size=None, dtype=torch.bfloat16, documents=()
TokenOrder
    name, mesh
UlyssesParallel
    *, layout='BLNH', check=True, is_causal=False, window_size=None, prefix_length=0, mask_mod=None,
    scale=None, softcap=None, length=None, kv_length=None, replicated=0, order=None, kernel='auto'
Volume
    payload, statistics, bytes
WaitError
    DistError
WallFacerParallel
    *, layout='BLNH', check=True, is_causal=False, window_size=None, prefix_length=0, mask_mod=None,
    scale=None, softcap=None, length=None, kv_length=None, replicated=0, order=None, schedule='2d',
    rotate='auto', rotate_forward='auto', kernel='auto'
attention_volume
    ring, team, *, ulysses=1, batch, length, kv_length=None, heads, kv_heads, head_dim, value_dim=None,
    shared_dim=0, dtype, schedule='2d', rotate='auto', rotate_forward='auto', hops=None, order='contiguous',
    replicated=0, index=None
check_equivalence
    module, style, mesh, *, length=None, heads=None, head_dim=16, dtype=None, kwargs=None
check_model
    model, mesh, *, whole, sharded, order=None, document_ids=None, tolerance=None
context_mesh
    device_type, ring=1, team=1, *, ulysses=1, placement='team_in_node'
context_parallel
    mesh, *, buffers, buffer_seq_dims, no_restore_buffers=None, options
context_parallel_attention
    q, k, v, mesh, *, document_ids=None, cu_seqlens=None, sinks=None, k_shared=None, is_causal=False,
    window_size=None, prefix_length=0, mask_mod=None, scale=None, softcap=None, length=None, kv_length=None,
    replicated=0, order=None, schedule='2d', rotate='auto', rotate_forward='auto', kernel='auto'
feed_forward_volume
    axes, *, model_dim, hidden, dtype, gated=False, biases=0, out_dim=None
metp_attention_volume
    ring, team, *, batch, length, model_dim, heads, kv_heads, head_dim, dtype, bias=False, fused=False,
    out_dim=None, schedule='2d', rotate='auto', rotate_forward='auto', hops=None, index=0
note_progress
    what
plan
    model, sequence, cluster, *, only=None, profile=None, keep=5, margin=0.03
profile
    model, sequence, device_type, *, ranks_per_node=None, memory=None, top=4, iterations=3, turns=None,
    build=None, kernel='auto', cluster=None, path=None
register_kernel
    name, forward, backward, supports, version='', *, takes_bands=False, takes_segments=False
sequence_positions
    length, order, *, document_ids=None, cu_seqlens=None
shard_sequence
    x, order, *, dim, document_ids=None, cu_seqlens=None
split_context_axis
    mesh, ring=1, team=1, *, ulysses=1, placement='team_in_node'
unshard_sequence
    x, order, *, dim, document_ids=None, cu_seqlens=None, grad=False
checkpoint.save_attention
    policy=None
plans.llama3_plan
    *, order, check=True, schedule='2d', rotate='auto', rotate_forward='auto', kernel='auto'""",
    )


def test_every_public_name_is_documented() -> None:
    assert all(getattr(wallfacer_dt, name).__doc__ for name in wallfacer_dt.__all__)


@pytest.fixture(scope="module")
def imported() -> tuple[set[str], set[str]]:
    """Modules of a new process with what ParallelStyle and BlockMask are in (sympy comes with the former), and those
    that this package brings, which starts no process group.
    """
    code = (
        "import sys, torch.distributed as d, torch.distributed.tensor.parallel, torch.nn.attention.flex_attention;"
        "before = set(sys.modules);"
        "import wallfacer_dt;"
        "assert not d.is_initialized();"
        "print(*before); print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    before, brought = ({*line.split()} for line in done.stdout.splitlines())
    return before, brought


def test_importing_does_not_start_anything(imported: tuple[set[str], set[str]]) -> None:
    """No process group, no compiler, none of the recipes' packages."""
    heavy = {
        "rich", "typer", "matplotlib", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.onnx",
        "triton", "hypothesis", "pytest",
    }  # fmt: skip
    assert not heavy & set.union(*imported)


def test_importing_is_light(imported: tuple[set[str], set[str]]) -> None:
    assert "wallfacer_dt.calls" in imported[1]
    assert len([name for name in imported[1] if not name.startswith("wallfacer_dt")]) <= 10

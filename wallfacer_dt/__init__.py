"""Long-sequence Transformer training on a DeviceMesh: Ring Attention, WallFacer, Ulysses and their combinations."""

from wallfacer_dt.algorithms import AttentionVolume, Volume, attention_volume
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.data import SequenceDataset, SequenceSampler
from wallfacer_dt.equivalence import EquivalenceError, check_equivalence
from wallfacer_dt.mesh import context_mesh, release_order
from wallfacer_dt.sequence import sequence_positions, shard_sequence, unshard_sequence
from wallfacer_dt.styles import RingParallel, UlyssesParallel, WallFacerParallel

__all__ = [
    "AttentionVolume",
    "EquivalenceError",
    "RingParallel",
    "SequenceDataset",
    "SequenceSampler",
    "UlyssesParallel",
    "Volume",
    "WallFacerParallel",
    "attention_volume",
    "check_equivalence",
    "context_mesh",
    "context_parallel_attention",
    "release_order",
    "sequence_positions",
    "shard_sequence",
    "unshard_sequence",
]

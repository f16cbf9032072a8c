"""Long-sequence Transformer training on a DeviceMesh: Ring Attention, WallFacer, Ulysses, METP, and all together."""

from wallfacer_dt import versions as versions  # the first, since versions of torch may lack what others import
from wallfacer_dt.agreement.progress import note_progress
from wallfacer_dt.agreement.whereabouts import WaitError
from wallfacer_dt.algorithms.metp_volume import feed_forward_volume, metp_attention_volume
from wallfacer_dt.algorithms.volume import AttentionVolume, Volume, attention_volume
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.blockwise import BlockwiseFeedForward
from wallfacer_dt.data import SequenceDataset, SequenceSampler
from wallfacer_dt.equivalence.check import check_equivalence
from wallfacer_dt.equivalence.model import check_model
from wallfacer_dt.equivalence.trial import EquivalenceError
from wallfacer_dt.kernels.registry import register_kernel
from wallfacer_dt.mesh import context_mesh, split_context_axis
from wallfacer_dt.metp import METPAttentionParallel, METPParallel
from wallfacer_dt.options import AttentionOptions
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.planning import Cluster, Kernels, Link, ModelShape, Plan, Profile, SequenceShape, plan, profile
from wallfacer_dt.sdpa import context_parallel
from wallfacer_dt.sequence import sequence_positions, shard_sequence, unshard_sequence
from wallfacer_dt.styles import RingParallel, UlyssesParallel, WallFacerParallel

__all__ = [
    "AttentionOptions",
    "AttentionVolume",
    "BlockwiseFeedForward",
    "Cluster",
    "EquivalenceError",
    "Kernels",
    "Link",
    "METPAttentionParallel",
    "METPParallel",
    "ModelShape",
    "Plan",
    "Profile",
    "RingParallel",
    "SequenceDataset",
    "SequenceSampler",
    "SequenceShape",
    "TokenOrder",
    "UlyssesParallel",
    "Volume",
    "WaitError",
    "WallFacerParallel",
    "attention_volume",
    "check_equivalence",
    "check_model",
    "context_mesh",
    "context_parallel",
    "context_parallel_attention",
    "feed_forward_volume",
    "metp_attention_volume",
    "note_progress",
    "plan",
    "profile",
    "register_kernel",
    "sequence_positions",
    "shard_sequence",
    "split_context_axis",
    "unshard_sequence",
]

__version__ = "0.1.0"

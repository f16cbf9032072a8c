"""The ranks that share a mesh, in a process group of their own in which nothing but their calls is compared.

Note [Records]
A record is one 64-bit number: the digest of what a rank is about to do. All ranks of a meeting post theirs at every
call, so that the n-th record of each is about its n-th call. Each goes to every other rank directly: one step however
many ranks there are, and who waits in vain knows for whom. Records are of one size whatever ranks are about to do,
since gloo ends a process where sizes differ.

The group is made from the world's store under a name of these ranks, and not by ``torch.distributed.new_group``: that
must be called by all ranks of the world, or names the group after how many groups a rank has been in, which need not be
the same for all of its members (torch 2.13.0).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Private; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.utils._python_dispatch import _disable_current_modes

from wallfacer_dt.agreement.whereabouts import Whereabouts

_NOT_HERE = 0  # no record is
_KEPT = 1024


@contextmanager
def outside_modes() -> Iterator[None]:
    """Where no tracing mode (fake tensors, say) and no transform of torch.func sees what is done."""
    # Torch's way takes as long where there is no mode.
    is_in_mode = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    with _disable_current_modes() if is_in_mode else nullcontext(), torch._C._DisableFuncTorch():
        yield


@cache
def _usual_keys() -> tuple[Any, Any]:
    """The dispatcher's, included and excluded, of a thread that has just begun: this one may be in a mode already."""
    with ThreadPoolExecutor(1) as thread:
        found = [torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set]
        included, excluded = (thread.submit(keys).result() for keys in found)
    return included, excluded


# Private; run on torch 2.11.0, 2.13.0 and 2.15.0.
below_views = torch._C._AutoDispatchBelowADInplaceOrView
"""A context, below autograd and what notes views: what is made within is none, and can be written into."""


@contextmanager
def outside_dispatch() -> Iterator[None]:
    """As if called by the user: operators run below autograd, and below torch.vmap if in a dispatch mode."""
    with outside_modes(), torch._C._ForceDispatchKeyGuard(*_usual_keys()):
        yield


def kept(store: dict[Any, Any], key: Hashable, most: int, make: Callable[[], Any]) -> Any:
    """What is kept under a key, or made now. The latest comes last, and of more than ``most`` the first goes."""
    found = store.pop(key, kept)  # which is no value
    store[key] = found = make() if found is kept else found
    while len(store) > most:
        with suppress(KeyError, RuntimeError):  # another thread has removed it, or is about to
            del store[next(iter(store))]
    return found


class Pending(NamedTuple):
    """A record that has been posted: the operation, where the other ranks' arrive, and what is sent."""

    work: Any
    heard: torch.Tensor
    sent: torch.Tensor


class Meeting:
    """Ranks that compare their calls, in ascending order. All of them make one together, at their first call."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta, whereabouts: Whereabouts) -> None:
        self.ranks, self.timeout, self.whereabouts = tuple(ranks), timeout, whereabouts
        self.number = 0  # of this rank's last call
        self.posted = 0  # when, among this rank's calls in all meetings
        self.call = ""  # what that is, in words
        self.open: Any = None  # that call, as long as nobody has looked whether all ranks make the same
        self.seen: dict[int, None] = {}  # what all ranks have called, the latest last
        self.unlayered: dict[int, None] = {}  # of these, calls of which not all ranks knew their layer
        self.layers: dict[int, str] = {}  # in which forwards were called, by number
        self.heard: dict[Hashable, dict[int, Any]] = {}  # what ranks have said once, the latest last
        # Not through torch's collectives: what is compared is nobody's traffic, and costs no more than it must.
        self._group = _group(self.ranks, timeout)
        # What was posted last. Were a thread of gloo's the last to let go of it, it would need the interpreter, and end
        # the process where that is ending: "terminate called without an active exception" (torch 2.13.0).
        self._last: Pending | None = None

    def post(self, record: int) -> Pending:
        """Start telling all ranks a record, see Note [Records]."""
        assert record != _NOT_HERE
        with outside_modes():
            return self._sent(torch.full((len(self.ranks),), record, dtype=torch.int64, device="cpu"))

    def _sent(self, parts: torch.Tensor) -> Pending:
        """Start sending every rank its part, as much as each sends this one."""
        heard = torch.full_like(parts, _NOT_HERE)
        self._last = Pending(self._group.alltoall_base(heard, parts, [], []), heard, parts)
        return self._last

    def remember(self, likeness: int, *, is_layered: bool = True) -> None:
        """Note that all ranks have made a call like this, and whether all of them could say in which layer."""
        for store in (self.seen, *([] if is_layered else [self.unlayered])):
            kept(store, likeness, _KEPT, lambda: None)  # every packing of documents is like no other

    def layer_of(self, forward: int) -> str:
        """The layer that runs, or in the backward of a call the one in which that was made; empty if none is known."""
        if forward:
            return self.layers.get(forward, "")
        layer = self.whereabouts.layer
        return layer and kept(self.layers, self.number, _KEPT, lambda: layer)

    def wait(self, pending: Pending) -> list[int]:
        """All ranks' records, or a RuntimeError that says which of them, or one of which, did not come in time.

        Where one is lost, records of others that were on their way do not arrive either.
        """
        with outside_modes():
            try:
                pending.work.wait()
            except RuntimeError as error:
                here = pending.heard.tolist()
                missing = [str(rank) for rank, record in zip(self.ranks, here, strict=True) if record == _NOT_HERE]
                who = " or ".join(filter(None, (", ".join(missing[:-1]), *missing[-1:])))
                who = f"rank {who}" if missing else "a rank"
                raise RuntimeError(f"{who} did not come within {self.timeout}, or was lost") from error
            return pending.heard.tolist()

    def exchange(self, mine: bytes) -> list[bytes]:
        """What every rank says, of any length."""
        lengths = self.wait(self.post(len(mine) + 1))
        padded_length = max(lengths)
        with outside_modes():
            padded = torch.frombuffer(bytearray(mine.ljust(padded_length, b"\0")), dtype=torch.uint8)
            pending = self._sent(padded.repeat(len(self.ranks)))
            pending.work.wait()
            rows = pending.heard.view(len(self.ranks), padded_length).numpy()
            return [row[: length - 1].tobytes() for row, length in zip(rows, lengths, strict=True)]


def _group(ranks: tuple[int, ...], timeout: timedelta) -> Any:
    """The process group of a meeting; see Note [Records]."""
    if dist.get_backend() == "threaded":  # ranks of one process that take turns, which a wait in gloo would not give
        return dist.new_group(list(ranks), use_local_synchronization=True)
    store = dist.PrefixStore("wallfacer_dt " + " ".join(map(str, ranks)), default_store())
    return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)

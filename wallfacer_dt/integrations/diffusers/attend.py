"""In place of a module's attention processor: the same one, whose attention is computed on a mesh.

Note [Processors]
A processor projects, normalises and rotates tokens, and then calls ``scaled_dot_product_attention`` once. It is run as
it is, and that one call is replaced, which a mode of torch functions sees; so nothing of a processor is written here a
second time, and the queries that are attended are its own. A processor that computes attention otherwise, as with
another of diffusers' backends, is refused: no call was seen.
"""

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.agreement.progress import Within
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.diffusers.plans import Text
from wallfacer_dt.integrations.diffusers.sequence import ForwardPass, RotaryTables
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import AttentionKeywords

_TOKENS = 2  # the dim of tokens in (B, N, L, H)


@dataclass(eq=False)
class ProcessorOnMesh:
    """See Note [Processors].

    Attributes:
        processor: diffusers' own.
        mesh: context mesh.
        options: of attention that are the same at every call.
        text: how attention sees text, as in a plan.
        path: of the module, by which its calls are counted and messages name it.
    """

    processor: Any
    mesh: DeviceMesh
    options: AttentionKeywords
    text: Text
    path: str

    def __new__(cls, *given: Any, **named: Any) -> "ProcessorOnMesh":
        """Refuse (ValueError) to be made of nothing, as diffusers does where an IP-Adapter comes or goes."""
        if not given and not named:
            raise ValueError(
                "a model's attention is on a mesh, on which there are no IP-Adapters: call remove() before you load "
                "or unload one"
            )
        return super().__new__(cls)

    @property
    def _attention_backend(self) -> Any:
        """The processor's; which diffusers sets."""
        return self.processor._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if backend not in (None, "native"):
            raise ValueError(
                f"{self.path} attends on a mesh, by the kernel that context_parallel was given, kernel=...: call "
                "remove() before you set an attention backend of diffusers"
            )
        self.processor._attention_backend = backend

    @untraced("it looks process groups up; in a compiled model use a style")
    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        sharded_sequence: ForwardPass | None = None,
        # Names of keywords, which diffusers reads here to hand no others down.
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As diffusers calls a processor. Cross attention is as it was: a rank's tokens see all of the text here."""
        named = {"image_rotary_emb": image_rotary_emb, "encoder_hidden_states_mask": encoder_hidden_states_mask}
        kwargs |= {name: x for name, x in named.items() if x is not None}
        given = attn, hidden_states, *args
        known = _signature(type(self.processor)).bind(self.processor, *given, **kwargs).arguments
        text, mask = known.get("encoder_hidden_states"), known.get("attention_mask")
        if self.text == "cross" and text is not None:
            return self.processor(*given, **kwargs)
        with refusing_together(name_of(self.mesh)):
            rotary = next((x for x in (*args, *kwargs.values()) if isinstance(x, RotaryTables)), None)
            forward = sharded_sequence if rotary is None else rotary.forward_pass
            self._check(forward, text, mask)
        assert forward is not None, "checked"
        has_text = self.text == "before" or (self.text == "after" and text is not None)
        mode = _Attending(self, forward, forward.text if has_text else 0)
        with mode:
            out = self.processor(*given, **kwargs)
        with refusing_together(name_of(self.mesh)):
            if mode.calls != 1:
                raise ValueError(
                    f"{self.path} called scaled_dot_product_attention {mode.calls} times, where once is expected: set "
                    'attention_backend "native", and leave processors as they are'
                )
        forward.calls[self.path] += 1
        return out

    def __copy__(self) -> "ProcessorOnMesh":
        """Likewise."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessorOnMesh":
        """Nothing of it changes; a copy of the model refuses to be called."""
        return self

    def _check(self, forward: ForwardPass | None, text: Tensor | None, mask: Tensor | None) -> None:
        if forward is None:
            raise ValueError(
                f"{self.path} was called outside a forward of the model that context_parallel was given, or by a hook "
                "that makes tuples of rotary tables: call that model, not a part of it"
            )
        if mask is not None:
            raise ValueError(f"{self.path} was called with an attention_mask, which would be of one rank's tokens")
        if text is not None and self.text == "none":
            raise ValueError(f"{self.path} was called with encoder_hidden_states, of which this model is known to have "
                             "none")  # fmt: skip


@lru_cache(maxsize=64)
def _signature(kind: type) -> inspect.Signature:
    """What a kind of processor takes, which have no one order of it."""
    return inspect.signature(kind.__call__)


class _Attending(TorchFunctionMode):
    """The one call of scaled_dot_product_attention, on the mesh."""

    def __init__(self, on: ProcessorOnMesh, forward: ForwardPass, text: int) -> None:
        super().__init__()
        self.on, self.forward, self.text, self.calls = on, forward, text, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        del types
        return (self._attend if func is F.scaled_dot_product_attention else func)(*args, **kwargs or {})

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa  # heads of keys are never expanded
        self.calls += 1
        with refusing_together(name_of(self.on.mesh)):
            asked = {"attn_mask": attn_mask is not None, "dropout_p": bool(dropout_p), "is_causal": is_causal}
            if refused := [name for name, is_asked in asked.items() if is_asked]:
                raise ValueError(f"{self.on.path} calls attention with {refused[0]}, which is not implemented here")
        is_last = self.on.text == "after"
        if is_last:  # the text's rows are the first to attention on a mesh
            query, key, value = (self._rolled(x, x.shape[_TOKENS] - self.text) for x in (query, key, value))
        with Within(self.on.path):
            out = context_parallel_attention(
                query, key, value, self.on.mesh, scale=scale, replicated=self.text, length=self.forward.length,
                **self.on.options,
            )  # fmt: skip
        return self._rolled(out, self.text) if is_last else out

    def _rolled(self, x: Tensor, rows: int) -> Tensor:
        """The first rows after the others."""
        first, others = x.split([rows, x.shape[_TOKENS] - rows], _TOKENS)
        return torch.cat([others, first], _TOKENS) if self.text else x

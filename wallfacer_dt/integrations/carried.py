"""What goes through the modules of a model beside tensors, and is the same object behind all hooks."""

from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def carried(kind: Kind) -> Kind:
    """Have hooks hand a dataclass on as it is.

    FSDP2, which casts what a module is given, makes anew whatever it knows for a dataclass, and what is counted on one
    would be counted on its copy. ``dataclasses.replace`` does not know such a class either.
    """
    delattr(kind, "__dataclass_fields__")
    return kind

"""What goes through the modules of a model beside tensors, and is the same object behind all hooks."""

from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def carried(kind: Kind) -> Kind:
    """Have hooks take a dataclass for any other object.

    FSDP2, which casts what a module is given, makes every dataclass anew; what is counted on one would be counted on
    its copy. Such a class has no ``dataclasses.replace`` either.
    """
    delattr(kind, "__dataclass_fields__")
    return kind

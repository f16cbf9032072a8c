"""Roles of Sphinx in docstrings (``:func:`plan```) as links of this site where the name is public, else as code."""

import re
from typing import Any

from griffe import Extension, Module, Object

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([\w.]+)`")


class Roles(Extension):
    """Goes over every docstring of a package when it has been read."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:  # noqa: ARG002  (griffe's signature)
        """Rewrite the docstrings of a package and of all that is in it."""
        public = {f"{pkg.name}.{name}" for name in pkg.exports or ()}
        _rewrite(pkg, public, f"{pkg.name}.")


def _rewrite(thing: Object, public: set[str], scope: str) -> None:
    """``scope`` is what a short name stands in: the package, whose names integrations have for others of their own."""
    if thing.name == "integrations":
        scope = f"{thing.path}."

    def link(role: re.Match[str]) -> str:
        name = role[1] if role[1] in public else f"{scope}{role[1]}"
        return f"[`{role[1]}`][{name}]" if name in public else f"`{role[1]}`"

    if thing.docstring is not None:
        thing.docstring.value = _ROLE.sub(link, thing.docstring.value)
    for member in thing.members.values():
        if not member.is_alias:
            _rewrite(member, public, scope)

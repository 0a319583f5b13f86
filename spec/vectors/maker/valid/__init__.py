"""Every valid vector; one file per subject."""

from maker.catalogue import Valid

from . import affine, containers, edges, encodings, exact, folders, structures


def vectors() -> list[Valid]:
    """In the order of the index."""
    modules = (affine, encodings, exact, structures, containers, folders, edges)
    return [vector for module in modules for vector in module.vectors()]

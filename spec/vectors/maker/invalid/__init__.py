"""Every invalid vector; one file per group of rules."""

from maker.catalogue import Invalid

from . import container, content, descriptor, edges, folder, folder_edges, forgotten, keys, manifest, source


def vectors() -> list[Invalid]:
    """In the order of the index."""
    modules = (container, descriptor, keys, content, edges, folder, folder_edges, manifest, source, forgotten)
    return [vector for module in modules for vector in module.vectors()]

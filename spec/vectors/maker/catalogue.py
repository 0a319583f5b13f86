"""What a vector is, before it is written."""

from dataclasses import dataclass, field
from typing import Any

from .build import Tensor, container
from .folder import Files, Folder
from .weights import Weight, descriptor, metadata, tensors_of


@dataclass
class Valid:
    """A valid file or folder and what it holds; `expect` has values found by hand."""

    id: str
    comment: str
    content: bytes | Files
    weights: list[Weight]
    dense: dict[str, Tensor]
    planes: bool = False
    expect: dict[str, list[float] | str] = field(default_factory=dict)
    place: str | None = None
    setup: list[Any] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)


@dataclass
class Invalid:
    """A file or folder that breaks one rule. `schema`: a violation that schema.json alone can see."""

    rule: str
    what: str
    comment: str
    content: bytes | Files
    gzip: bool = False
    setup: list[Any] = field(default_factory=list)
    schema: str | None = None
    place: str | None = None

    @property
    def id(self) -> str:
        """`v113-overlap`."""
        return f"v{self.rule[-3:]}-{self.what}"


def lone(
    name: str,
    comment: str,
    weights: list[Weight],
    dense: dict[str, Tensor] | None = None,
    planes: bool = False,
    expect: dict[str, list[float] | str] | None = None,
    version: str = "1.0",
    ignorable: Any = None,
    extra: dict[str, str] | None = None,
) -> Valid:
    """A vector of one file."""
    described = descriptor(weights, version, ignorable)
    content = container(tensors_of(weights, dense), {**metadata(described), **(extra or {})})
    return Valid(name, comment, content, weights, dense or {}, planes, expect or {})


def whole(
    name: str,
    comment: str,
    folder: Folder,
    place: str | None = None,
    setup: list[Any] | None = None,
) -> Valid:
    """A vector of one folder."""
    return Valid(
        name,
        comment,
        folder.build(),
        folder.weights,
        folder.dense,
        place=place,
        setup=setup or [],
        uncovered=sorted(folder.unnamed),
    )

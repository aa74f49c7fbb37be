"""Trees of tensors, such as batches and state_dicts: apply a function to each tensor."""

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch


def map_tensors(tree: Any, function: Any, kind: Any = torch.Tensor) -> Any:
    """A copy of `tree` with `function` applied to everything of `kind` in its dictionaries, lists and tuples."""
    container: Any = type(tree)
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapped = copy(tree)  # with its attributes, such as a state_dict's _metadata, and a defaultdict's function
        for key, part in tree.items():
            mapped[key] = map_tensors(part, function, kind)
        return mapped
    if isinstance(tree, Mapping):
        return container((key, map_tensors(part, function, kind)) for key, part in tree.items())
    if hasattr(tree, "_fields"):  # a named tuple
        return container(*(map_tensors(part, function, kind) for part in tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return container(map_tensors(part, function, kind) for part in tree)
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the dictionaries, lists and tuples of `tree`, whatever it is."""
    if isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(part)
    else:
        yield tree

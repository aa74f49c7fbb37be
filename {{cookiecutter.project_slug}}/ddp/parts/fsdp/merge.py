"""Make one file, which torch.load alone can read, of a checkpoint whose rows are in other files (--shard).

    python -m ddp.parts.fsdp.merge CHECKPOINT FILE

It needs memory for all of it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ddp.checkpoint import storage
from ddp.core.errors import UsageError, UserError
from ddp.core.files import storage_errors
from ddp.core.options import OptionParser
from ddp.core.process_exit import process_exit
from ddp.distributed.tensors import whole_tree


def main(words: Sequence[str] | None = None) -> None:
    """Raises UsageError, InvalidCheckpoint or StorageError; then there is no new file."""
    parser = OptionParser(usage="python -m ddp.parts.fsdp.merge CHECKPOINT FILE")
    parser.add_argument("checkpoint", help="such as runs/cifar10-ToyModel/best.pt", type=Path)
    parser.add_argument("file", help="the new file", type=Path)
    given = parser.parse_args(words)
    path = given.file
    if path.exists():  # a run may be about to replace its best.pt
        raise UsageError(f"{path} exists: choose another FILE")
    content = whole_tree(storage.read(given.checkpoint))
    with storage_errors(path, needed=storage.size_of(content)):
        storage.write(path, {name: part for name, part in content.items() if name != "path"})
    print(f"{path} has everything: {storage.size_of(content) / 1e6:,.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(process_exit.handle_exception(error))

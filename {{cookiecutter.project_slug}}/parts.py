"""The parts of this project: README.md says how to add one, and how to remove one."""

PARTS: list[str] = [
    # One name a line.
    "fsdp",  # --shard, --checkpoint-activations: a model that one GPU cannot hold; docs/fsdp.md
    "mirror",  # --mirror URL: a copy of the run, to resume on another machine; docs/mirror.md
    "monitor",  # where the time went, slow ranks, MFU; --guard, --profile; docs/monitor.md
    "preflight",  # launch_node.sh --check: compares the machines before a run; docs/preflight.md
]

"""What makes a run distributed and safe. To train something else, edit model.py, data.py and config.py, not this.

    core/         errors and exit codes, options, signals, files, logs, network facts; no torch
    distributed/  ranks, rendezvous, process group, stops and failures that all ranks share, seeds
    data/         datasets: which sample goes to which rank, DataLoader workers, seeds, checks of the first batch
    checkpoint/   what a checkpoint holds, how it is written and verified, how a run resumes
    training/     DDP wrapping, learning rate, metrics, logs, the output directory, the run
    launcher/     what launch_node.sh runs: options, torchrun's agent, the rendezvous of the nodes, restarts
    entrypoint/   launch(main, Config), and --nproc
    parts/        what only some projects need: parts.py lists what this one has

A room imports only rooms above it; launcher imports core alone. Nothing in here imports main, model, data or config.
The others do not import parts/, but call its Callbacks: see core/parts.py.
"""

__version__ = "1.0.0"  # of ddp-template; name it in bug reports

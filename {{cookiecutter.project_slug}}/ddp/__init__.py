"""What makes a run distributed and safe. A different task changes `model.py` and `data.py`, and nothing in here.

    errors.py       exit codes, and errors that are one line
    ending.py       how a process ends: what it says, its exit code, what it leaves for its launcher
    logs.py         OUT/logs/rank_N.log: all that a rank says
    stop.py         requests to stop: signals, a launcher that is gone, time that is up
    launch.py       who am I: rank, local rank, world size, from whatever started this process
    spawn.py        --nproc
    status.py       status.json
    fingerprint.py  the project's code as digests
    launcher/       what launch_node.sh ends in: machines meet, torchrun runs, a lost process starts the job again
    peers.py        how ranks tell each other that they fail
    rendezvous.py   how the processes find each other, and the roll call
    agreement.py    whether all ranks stop at this step
    group.py        the process group: join it, talk in it, leave it
    workers.py      the worker processes of a DataLoader
    loader.py       which sample goes to which process, in which order, from which position
    schedule.py     the learning rate
    step.py         what turns a model into one that trains: DDP, precision, accumulation, compression
    metrics.py      sums over batches and ranks; metrics.jsonl, TensorBoard, the progress bar
    checkpoint.py   one checkpoint file: write it whole, verify it, read it
    state.py        state in memory: copy it, send it to every rank, reduce it to a digest
    folder.py       the output folder, as rank 0 sees it: its lock, its checkpoints, its records
    compare.py      whether a checkpoint belongs to this run
    saver.py        writes beside the training
    resume.py       what of a run is kept in checkpoints: how it is saved, and how it resumes
    profile.py      --profile
    preflight.py    launch_node.sh --check: are collectives right, and how fast are they
    run.py          a training run: its progress, what it logs, when it saves, how it ends

Imports run one way: `run` may use everything above it, `errors` uses nothing. Nothing in here imports `main`, `model`
or `data`. This file imports nothing, so that `config.py` can use `ddp.errors` without waiting for torch.
"""

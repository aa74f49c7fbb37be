"""Which sample goes to which rank, in which order, from which sample on."""

from torch.utils.data import Dataset, DistributedSampler


class ResumableSampler(DistributedSampler):
    """torch's DistributedSampler that can start an epoch after any number of samples, counted over all ranks.

    The order of an epoch is one permutation of (seed, epoch), and rank r of w takes every w-th entry. So after any
    number of steps the entries used are the first `samples_consumed` ones, whatever w is. Samples at the end of the
    epoch that do not fill a global batch are dropped.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, global_batch: int, seed: int) -> None:
        super().__init__(dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.length = len(dataset)  # type: ignore[arg-type]
        self.first = rank
        self.global_batch = global_batch

    def steps_left(self, samples_consumed: int) -> int:
        """Optimizer steps until the end of the epoch."""
        return (self.length - samples_consumed) // self.global_batch

    def start_at(self, epoch: int, samples_consumed: int) -> None:
        """Let the next iteration return this rank's part of order[samples_consumed:]."""
        self.set_epoch(epoch)
        used = self.steps_left(samples_consumed) * self.global_batch
        # DistributedSampler returns order[rank:total_size:num_replicas], and checks its length against num_samples.
        self.rank = samples_consumed + self.first
        self.total_size = samples_consumed + used
        self.num_samples = used // self.num_replicas

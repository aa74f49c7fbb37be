"""Batches for each rank: sampler, loaders, workers, downloads, images. Imports ddp.core and ddp.distributed."""

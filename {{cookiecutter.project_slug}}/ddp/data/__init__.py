"""Batches for each rank: datasets, sampler, loaders and their workers. Imports ddp.core and ddp.distributed."""

"""DDP wrapping, learning rate, metrics, logs, output directory, run. Imports core, distributed, data, checkpoint."""

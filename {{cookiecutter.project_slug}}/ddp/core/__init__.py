"""Errors, options, signals, files, logs, network facts. Imports neither torch nor another room; all rooms import it."""

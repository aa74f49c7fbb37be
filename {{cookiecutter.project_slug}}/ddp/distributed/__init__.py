"""The processes as a group: ranks, rendezvous, collectives, shared stops and failures, seeds. Imports core only."""

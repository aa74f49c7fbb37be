"""What launch_node.sh runs: options, agents, rendezvous of the nodes, torchrun and its workers.

Imports core only, and torch only in torchrun's own process.
"""

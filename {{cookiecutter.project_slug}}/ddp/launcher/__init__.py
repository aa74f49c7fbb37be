"""What launch_node.sh runs: options, the agent of one node, the rendezvous of the nodes. torchrun starts the workers.

Imports core only. launch_node.py checks the options before node_rendezvous.py imports torch.
"""

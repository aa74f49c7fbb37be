"""How a process becomes a rank: launch(main, Config), --nproc, launch_node.sh --check. Imports core and distributed."""

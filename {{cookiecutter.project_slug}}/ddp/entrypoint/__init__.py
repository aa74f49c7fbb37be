"""How a process becomes a rank: launch(main, Config), and --nproc. Imports core and distributed."""

"""What only some projects need: parts.py lists what this one has. A part imports the rest of ddp, and no other part."""

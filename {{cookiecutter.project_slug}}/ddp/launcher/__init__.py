"""What `launch_node.sh` ends in: one machine's part of a run. No torch in here, but in torchrun's own process.

network.py    this machine on the network: its addresses, who holds a port
visit.py      a node on its way to the meeting: what it says about itself, how it asks node 0
meeting.py    node 0 compares what all are about to run, before anybody starts
torchrun.py   torchrun's own process, quiet, and gone when the launcher is gone
round.py      torchrun, its workers, and what they have left when all of them are gone
node.py       rounds: meet, run, and start the whole job again when a process was lost
hosts.py       launch/ssh.sh: the hosts of a file, and the program for each
ssh.py         launch/ssh.sh: runs it there, each under an ssh client
facts.py       --check: what each node says about itself, side by side
"""

CHECK = "DDP_CHECK"  # a variable that --check sets for the processes: ddp/preflight.py takes the place of main

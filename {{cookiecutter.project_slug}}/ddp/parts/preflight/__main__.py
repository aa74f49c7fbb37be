"""The program of `launch_node.sh --check`, in place of main.py."""

import sys

sys.path.insert(0, __file__.rpartition("/ddp/")[0])  # Python has put the folder of this file there
from config import Config
from ddp.entrypoint.run_main import launch
from ddp.parts.preflight.check import check

if __name__ == "__main__":
    launch(check, Config)

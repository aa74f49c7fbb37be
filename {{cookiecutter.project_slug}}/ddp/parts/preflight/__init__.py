"""launch_node.sh --check: compares the machines of a run, and measures the network between them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp.core.options import option


@dataclass
class LaunchOptions:
    """The options of this part."""

    check: bool = option(False, "do not train: compare the machines, and measure their network", section="options")

    def script(self) -> str:
        """What the workers run in place of main.py."""
        return "ddp/parts/preflight/__main__.py" if self.check else ""


def data_status(config: Any) -> str:
    """What the table shows about this machine's data: what Config.data_status() returns, if your config.py has it."""
    if hasattr(config, "data_status"):
        return str(config.data_status())
    folders = {"cifar10": "cifar-10-batches-py", "imagefolder": "train"}
    name, folder = getattr(config, "dataset", "-"), getattr(config, "data_dir", "")
    if name not in folders:
        return str(name)
    if (Path(folder) / folders[name]).is_dir():
        return f"{name} in {folder}"
    return f"{name}: not in {folder}{', will be downloaded' if name == 'cifar10' else ''}"

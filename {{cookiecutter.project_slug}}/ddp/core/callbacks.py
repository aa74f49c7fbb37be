"""What a part does at the moments of a run."""

from collections.abc import Callable, Mapping
from typing import Any

Compute = Callable[..., bool]  # compute_gradients of main.py
WriteRest = Callable[[], dict[str, Any]]  # writes what is not in the file of a checkpoint


class Callback:
    """Methods that do nothing. All ranks call each at the same moment, unless it says otherwise.

    Those for training are not called with --evaluate: opened, started, stepped, saving, trained, finish.
    """

    needs_one_file = False  # whether a checkpoint must be one file

    def opened(self) -> None:
        """The output directory belongs to this run. No checkpoint was looked for yet."""

    def wrapped(self, model: Any, task: Any) -> None:
        """wrap_model has made `model` trainable. task: model.py."""

    def resumed(self, content: Mapping[str, Any]) -> None:
        """The progress is loaded. content: of the checkpoint, without the fields of Training; empty for a new run."""

    def started(self) -> None:
        """All is checked and loaded, and the files of the run are open: it may change its directory."""

    def phase(self, name: str) -> None:
        """Another phase begins, or the same one again: start-up, productive, saving or evaluation."""

    def wrap_compute(self, compute: Compute) -> Compute:
        """What computes the gradients of a step, in place of `compute`."""
        return compute

    def stepped(self) -> None:
        """A step of the optimizer was taken."""

    def synced(self) -> None:
        """The ranks have agreed whether to stop, after a step."""

    def figures(self, rates: Mapping[str, float], totals: Mapping[str, Any], seconds: float) -> tuple[dict, str]:
        """More figures of the steps since the last logged one, and those that the console shows.

        rates: of these steps, such as samples_per_s. totals: of batch_totals in these `seconds`, over all ranks.
        """
        return {}, ""

    def saving(self) -> None:
        """The state of this run is about to be saved."""

    def split(self, content: dict[str, Any]) -> tuple[dict[str, Any], WriteRest | None]:
        """What rank 0 writes of the content of a checkpoint, and what writes the rest: None if there is no rest.

        The latter is called on every rank, in the thread that writes. What it returns on rank 0 is written as well.
        """
        return content, None

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is on disk. On rank 0 alone, perhaps twice, or in the thread that has written it."""

    def state_dict(self) -> dict[str, Any]:
        """What each checkpoint holds of it, for `resumed`, in content["callbacks"][the name of this class]."""
        return {}

    def status(self) -> dict[str, Any]:
        """What status.json holds of it. On rank 0 alone."""
        return {}

    def trained(self) -> None:
        """No step follows; the last evaluations do."""

    def finish(self, timeout: float | None) -> None:
        """The last checkpoint is on disk, and the process ends, within `timeout` seconds if that is not None."""

    def failed(self) -> None:
        """The run ends with an error other than a stop. Other ranks may be gone."""

    def summary(self) -> str:
        """A line for the end of the run. On rank 0 alone."""
        return ""

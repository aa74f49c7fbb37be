"""Which change of a step makes it faster? Each of VARIANTS takes turns with the project as it is, as in versions.py.

    python benchmarks/variants.py --case toy-b128-p1
    python benchmarks/variants.py main-thread metrics-first --steps 8000

docs/gpu.md says what each may cost. A GPU needs more steps: a turn takes a second.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from training import REPOSITORY, cases_for  # it finds tests/template_copy.py

# isort: split
from template_copy import copy_template
from versions import FIRST_STEPS, TEMPLATE, turns

from made_up import cifar10

Edit = tuple[str, str, str]  # a file of the project, a text that it has once, and what replaces that

MAIN_THREAD: Edit = (
    "ddp/training/wrapping.py",
    "    scaler.scale(loss if passes == 1 else loss / passes).backward()\n",
    "    with torch.autograd.set_multithreading_enabled(False):\n"
    "        scaler.scale(loss if passes == 1 else loss / passes).backward()\n",
)
ADD_METRICS = "        training.meter.add(task.batch_totals(loss, outputs, targets))\n    return mean"
BACKWARD = "            backward(mean.weigh(loss, outputs, targets), training.scaler, config.grad_accum_steps)\n"
METRICS_FIRST: list[Edit] = [
    ("main.py", ADD_METRICS, "    return mean"),
    ("main.py", BACKWARD, "            training.meter.add(task.batch_totals(loss, outputs, targets))\n" + BACKWARD),
]
WITHOUT_FORK_RNG: list[Edit] = [
    (
        "ddp/distributed/seeds.py",
        "    with _fork_torch():\n        _seed_torch(seed, step, rank=-1)\n        yield\n",
        "    generators = [torch.default_generator]\n"
        "    if torch.cuda.is_initialized():\n"
        "        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])\n"
        "    states = [each.get_state() for each in generators]\n"
        "    try:\n"
        "        _seed_torch(seed, step, rank=-1)\n"
        "        yield\n"
        "    finally:\n"
        "        for generator, state in zip(generators, states, strict=True):\n"
        "            generator.set_state(state)\n",
    )
]
BATCHED_COPY: Edit = (
    "ddp/training/wrapping.py",
    "        gradient_as_bucket_view=True,\n",
    "        gradient_as_bucket_view=True,\n        batched_grad_copy=True,\n",
)
VARIANTS: dict[str, list[Edit]] = {
    "main-thread": [MAIN_THREAD],
    "metrics-first": METRICS_FIRST,
    "without-fork-rng": WITHOUT_FORK_RNG,
    "batched-grad-copy": [BATCHED_COPY],  # torch 2.14
    "three": [MAIN_THREAD, *METRICS_FIRST, *WITHOUT_FORK_RNG],
}


def edited(variant: str, checkout: Path) -> Path:
    """A copy of the template in `checkout`, with the edits of `variant`."""
    project = copy_template(checkout / TEMPLATE)
    for name, old, new in VARIANTS[variant]:
        text = (project / name).read_text()
        assert text.count(old) == 1, f"{variant}: {name} has this text {text.count(old)} times: {old}"
        (project / name).write_text(text.replace(old, new))
    return checkout


def main() -> None:
    cases = {case.name: case for case in cases_for(0) if case.dataset == "cifar10"}
    parser = argparse.ArgumentParser(description="Compare changes of a step with the project as it is.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", default=list(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--case", choices=cases, default="toy-b128-p1")
    parser.add_argument("--steps", type=int, default=600, help="of each version, per variant")
    options = parser.parse_args()
    case = cases[options.case]
    with tempfile.TemporaryDirectory(prefix="variants-") as name:
        images = Path(name) / "cifar10"
        cifar10(images)
        for variant in options.variants:
            folder = Path(name) / variant
            folder.mkdir()
            ratios = turns(
                case, FIRST_STEPS + options.steps, [REPOSITORY, edited(variant, folder / "checkout")], folder, images
            )
            if len(ratios) < 2:
                sys.exit("too few turns: raise --steps")
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{variant:<20} speed / as it is: {middle:.3f} ({low:.3f} to {high:.3f}), {len(ratios)} pairs")


if __name__ == "__main__":
    main()
